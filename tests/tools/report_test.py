"""`cairn report` of folders as no run leaves them, and of as many steps as a page has to hold."""

import json
import math
import os
import pathlib
import random
import re
import sys
import unittest

from program import ProgramTest, main

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from browser import chromium, in_browser  # noqa: E402

HOSTILE = "</script><script>document.title='taken'</script>\"'<img src=x onerror=\"document.title='taken'\">"


def step(number, loss=3.0, sources=("a", "b"), **more):
    return {"step": number, "samples": number, "tokens": 100 * number, "time": 1e9 + number, "loss": loss,
            "source_loss": {name: loss for name in sources}, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1000.0,
            "step_ms": 10.0, "checkpoint_lost_ms": 0.0, **more}


def lines(records):
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records)


def data_of(page):
    """The report that a page holds."""
    return json.loads(re.search(r'<script type="application/json" id="report">\n(.*?)\n</script>', page, re.S).group(1))


def timeless(run):
    """Without the line that says how long ago the last step was."""
    return {key: value for key, value in run.items() if key != "state"}


class ReportTest(ProgramTest):
    @classmethod
    def setUpClass(cls):
        if not chromium():
            print("no Chromium here: no page is tried in a browser", file=sys.stderr)

    def run_folder(self, name, records, events=()):
        self.write(f"{name}/metrics.jsonl", lines([{"schema": 1, "run": "x"}, *records]))
        self.write(f"{name}/events.jsonl", lines(events))
        return name

    def page(self, *runs):
        self.cairn("report", *runs, "--html", "page.html", errors="replace")
        with open(self.path("page.html"), encoding="utf-8") as f:
            return f.read()

    def hostile_run(self):
        name = self.run_folder(
            "a </script><b> \udcff",  # the last is the byte 0xff
            [step(1, 5), step(2, None), step(3, 4, sources=[HOSTILE, "b"]), '{"step": 4, "loss": NaN}', '{"step": 4, "lo',
             step(4, 1e308), step(5, 1e308, split_ms={HOSTILE: 1.0}), "\xff\xfe", step(6, 2), step(7, 9), step(8, 9),
             {"resumed_at": 5}, step(6, 2.5), step(7, 2, valid_loss=2.25, valid_source_loss={HOSTILE: 2, "b": 2})],
            [{"event": "start", "time": 1e9, "mesh": HOSTILE, "host": HOSTILE, "pid": 1},
             {"event": HOSTILE, "time": 1e9 + 3}, {"event": "failure", "time": "x", "message": HOSTILE, "class": HOSTILE},
             {"event": "roll_back", "to_step": 5, "why": HOSTILE, "time": 1e9 + 8}, {"event": "saved", "step": -4, "time": -1e300},
             {"event": "saved", "step": 6, "seconds": 1e300, "time": 1e9 + 6}, '{"torn'])
        self.write(f"{name}/checkpoints/labels.json", "{ no labels")
        self.write(f"{name}/lineage.jsonl", "no lineage\n")
        return name

    def test_the_page_and_json_have_the_same_numbers(self):
        runs = [self.run_folder(name, [step(k, 5 / k + n, valid_loss=5 / k if k % 10 == 0 else None) if k % 10 == 0 else
                                       step(k, 5 / k + n) for k in range(1, 101)]) for n, name in enumerate(("one", "two"))]
        one = self.cairn_json("report", "one")
        page = self.page("one")
        self.assertEqual([timeless(run) for run in data_of(page)["runs"]], [timeless(one)])
        self.assertEqual(one["curves"]["series"]["loss"]["mean"][:3], [5, 2.5, 1.66667])
        self.assertEqual(one["curves"]["axes"][0]["step"], list(range(1, 101)))
        both = list(map(timeless, self.cairn_json("report", *runs)["runs"]))
        self.assertEqual([run["run"] for run in both], runs)
        self.assertEqual(list(map(timeless, data_of(self.page(*runs))["runs"])), both)
        said = json.loads(self.cairn("report", *runs, "--html", "page.html", "--json").stdout)
        self.assertEqual(list(map(timeless, said["runs"])), both)

    def test_several_runs_are_compared_in_80_columns(self):
        for n, name in enumerate(("one", "two")):
            self.run_folder(name, [step(k, 5 / k + n) for k in range(1, 101)])
        for text in (self.cairn("report", "one", "two").stdout, self.on_terminal("report", "one", "two", columns=80)):
            self.assertLess(max(map(len, text.splitlines())), 80)
            self.assertRegex(text, r"(?m)^A one +100 +0\.050 ")
            self.assertRegex(text, r"(?m)^B two +100 +1\.050 ")
        said = self.cairn("report", "one", "two", "--follow", code=2).stderr
        self.assertIn("--html", said)
        self.assertIn("none", self.cairn("report", "one", "none", code=2).stderr)

    def test_hostile_folders_have_a_report(self):
        empty, hostile = self.run_folder("empty", []), self.hostile_run()
        said = self.cairn_json("report", hostile)
        self.assertEqual((said["steps"], said["last_loss"], said["valid_loss"]), (7, 2, 2.25))
        loss = said["curves"]["series"]["loss"]
        self.assertEqual(loss["mean"], [5, None, 4, 1e308, 1e308, 2.5, 2])
        self.assertEqual(loss["not_finite"], {"count": 1, "steps": [2]})
        self.assertEqual([said["curves"]["axes"][one["axis"]]["step"] for one in said["curves"]["abandoned"]], [[6, 7, 8]])
        self.assertEqual(len(said["unreadable"]), 2)
        self.assertIn("unreadable", self.cairn("report", hostile, errors="replace").stdout)
        compared = self.cairn("report", empty, hostile, errors="replace").stdout
        self.assertLess(max(map(len, compared.splitlines())), 80)
        page = self.page(empty, hostile)
        self.assertEqual(page.count("</script>"), 2)
        self.assertNotIn("<img", page)
        self.assertEqual(data_of(page)["runs"][1]["steps"], 7)
        self.assertEqual(data_of(page)["runs"][0]["curves"]["series"], {})

    @unittest.skipUnless(chromium(), "no Chromium here: pages are not tried in a browser")
    def test_hostile_text_is_text_in_a_browser(self):
        page = self.page(self.run_folder("empty", []), self.hostile_run())
        said, console = in_browser(page, """return { title: document.title, images: document.images.length,
            charts: document.querySelectorAll("figure").length, text: document.body.textContent.includes("onerror"),
            crosses: document.querySelectorAll("svg .bad").length, abandoned: document.querySelectorAll("svg .abandoned").length };""",
                                   self.folder.name)
        self.assertEqual(console, [])
        self.assertIn("Cairn report", said["title"])
        self.assertEqual((said["images"], said["text"], said["crosses"], said["abandoned"]), (0, True, 1, 1))
        self.assertGreater(said["charts"], 6)
        for page in (self.page("empty"), self.page(self.run_folder("short", [step(1)]))):
            self.assertEqual(in_browser(page, "return 0", self.folder.name), (0, []))

    def big_runs(self, count, steps):
        """The same metrics for each run: what they cost is the same, and making them takes long."""
        draw = random.Random(5)
        phases = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "log", "other")
        path = self.path("metrics.jsonl")
        with open(path, "w", encoding="utf-8") as f:
            f.write('{"schema":1,"run":"x"}\n')
            for k in range(1, steps + 1):
                loss = 2 + 9 * math.exp(-5 * k / steps) + 0.1 * draw.random()
                numbers = ",".join(f'"{name}":{draw.random() * 50:.6f}' for name in phases)
                f.write(f'{{"step":{k},"samples":{8 * k},"tokens":{8192 * k},"time":{1.7e9 + k / 8:.3f},"loss":{77 if k == 14321 else loss},'
                        f'"source_loss":{{"a":{loss * 0.93},"b":{loss * 1.07},"c":{loss * 1.13}}},"grad_norm":{draw.random()},'
                        f'"lr":{3e-4 * k / steps},"tokens_per_s":{65000 + 1000 * draw.random()},"step_ms":{125 + draw.random()},'
                        f'"checkpoint_lost_ms":{k % 2 * draw.random()},"mfu":{0.4 + draw.random() / 100},"tflops":{50 + draw.random()},'
                        f'"split_ms":{{{numbers}}}}}\n')
        for n in range(count):
            self.write(f"big-{n}/events.jsonl", lines({"event": "outlier", "step": k, "time": 1.7e9 + k / 8, "why": "loss 7.31, 9.4 deviations above"}
                                                      for k in range(1, 3000)))
            os.symlink(path, self.path(f"big-{n}/metrics.jsonl"))
        return [f"big-{n}" for n in range(count)]

    def test_five_long_runs_are_a_page_of_3_mb(self):
        page = self.page(*self.big_runs(5, 20_000))  # no more of them would fit than of 100,000
        self.assertLess(len(page.encode()), 3_000_000)
        for run in data_of(page)["runs"]:
            loss = run["curves"]["series"]["loss"]
            self.assertEqual(max(loss["greatest"]), 77)  # one step of 20,000
            self.assertGreater(len(loss["mean"]), 2000)  # columns of a wide screen
            self.assertGreater(len(run["curves"]["series"]["step_ms"]["mean"]), 600)
        if not chromium():
            self.skipTest("no Chromium here: the page's size was tried, and not its time")
        said, console = in_browser(page, """return { ms: performance.now(), paths: document.querySelectorAll("svg path").length,
            top: Number(document.querySelector("figure svg text").textContent) };""", self.folder.name)
        self.assertEqual(console, [])
        print(f"five long runs: {len(page) / 1e6:.2f} MB, {said['ms']:.0f} ms in Chromium", file=sys.stderr)
        self.assertLess(said["ms"], 30_000)  # half a second where nothing else computes
        self.assertGreater(said["paths"], 100)

    @unittest.skipUnless(chromium(), "no Chromium here: pages are not tried in a browser")
    def test_values_zoom_smoothing_and_axes_work_in_a_browser(self):
        spike = [step(k, 50 if k == 700 else 3 + k % 2, valid_loss=2.5) for k in range(1, 1001)]
        page = self.page(self.run_folder("one", spike, [
            {"event": "start", "time": 1e9}, {"event": "failure", "time": 1e9 + 400, "message": "a crash", "class": "crash"},
            {"event": "start", "time": 1e9 + 401, "generation": 1, "step": 400, "source": "memory"}]))
        said, console = in_browser(page, """
            const loss = charts[0], out = {};
            const move = (chart, value) => hover(chart, chart.scale.x(value), { clientX: 10, clientY: 10 });
            const tip = () => document.getElementById("tip").textContent;
            move(loss, 700); out.spike = tip();
            move(loss, 400); out.mark = tip();
            out.first = loss.lines[0].series.mean.length;
            change({ zoom: [600, 800] });
            out.zoomed = [loss.scale.toValue(LEFT), loss.scale.toValue(loss.scale.right)].map(Math.round);
            out.other = Math.round(charts[1].scale.toValue(LEFT));
            out.hash = decodeURIComponent(location.hash).includes("600");
            change({ zoom: [100, 200], smooth: 60 });
            move(loss, 150); out.smooth = tip();
            change({ zoom: null, smooth: 0, x: "tokens", logX: true, logY: true });
            move(loss, 100000); out.tokens = tip();
            change({ x: "seconds", logX: false, logY: false, clip: true });
            out.top = Math.max(...[...loss.svg.querySelectorAll("text")].map(one => Number(one.textContent)).filter(Number.isFinite));
            change({ theme: "dark" });
            out.dark = getComputedStyle(document.body).backgroundColor;
            change({ theme: "light" });
            out.light = getComputedStyle(document.body).backgroundColor;
            // A drag, as a person makes it.
            change({ x: "step", clip: false });
            const box = loss.svg.getBoundingClientRect();
            loss.svg.setPointerCapture = () => {};
            for (const [kind, value] of [["pointerdown", 300], ["pointermove", 350], ["pointerup", 400]])
              loss.svg.dispatchEvent(new PointerEvent(kind, { clientX: box.left + loss.scale.x(value), clientY: box.top + 50, button: 0 }));
            out.dragged = state.zoom.map(Math.round);
            return out;""", self.folder.name)
        self.assertEqual(console, [])
        self.assertNotIn("error", said)
        self.assertIn("step 700", said["spike"])
        self.assertIn("50", said["spike"])
        self.assertIn("a crash", said["mark"])
        self.assertEqual((said["zoomed"], said["other"], said["hash"]), ([600, 800], 600, True))
        self.assertRegex(said["smooth"], r"training3\.[45]\d*raw [34]")
        self.assertIn("100k tokens", said["tokens"])
        self.assertLess(said["top"], 6)
        self.assertNotEqual(said["dark"], said["light"])
        self.assertTrue(abs(said["dragged"][0] - 300) < 3 and abs(said["dragged"][1] - 400) < 3, said["dragged"])


if __name__ == "__main__":
    main()
