"""What report, train --json, ckpt ls and ckpt verify say of real runs: kills, resumes, layouts, metrics, what to do."""

import json
import os
import re
import shutil
import signal
import subprocess

from harness import RunTest, main, write_tokens
from browser import chromium, in_browser  # harness has put tests/support on the path

BLEND = """
local T = require "cairn"
return T.recipe {{
  name = "blend", seed = 11, stop = T.steps(12),
  model = T.gpt {{ layers = 2, width = 32, heads = 4, context = 32, vocab = 257 }},
  tokenizer = T.bytes,
  data = T.blend {{ sources = {{ T.megatron {{ prefix = "{a}", name = "a", split = {{ 80, 20 }}, weight = 3 }},
                   T.megatron {{ prefix = "{b}", name = "b", split = {{ 80, 20 }} }},
                   T.megatron {{ prefix = "{b}", name = "c" }} }} }},
  batch = {{ samples = 8, micro = 2 }},
  optimizer = T.adamw {{ peak_lr = 1e-2 }},
  eval = {{ at = T.every {{ steps = 4 }}, steps = 2 }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }}, deterministic = "layout",
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 4 }} }},
                              keep = {{ T.last(1), T.best {{ metric = "valid_loss", count = 2 }} }} }},
}}
"""


class Report(RunTest):
    def blend(self, **mesh):
        write_tokens(self.folder / "a", 6000)
        write_tokens(self.folder / "b", 6000, seed=3)
        path = self.folder / "blend.lua"
        path.write_text(BLEND.format(a=self.folder / "a", b=self.folder / "b", **{"tp": 1, "pp": 1, "dp": 1, **mesh}))
        return path

    def report(self, run):
        return (json.loads(self.cairn("report", self.folder / run, "--json").stdout),
                self.cairn("report", self.folder / run).stdout.decode())

    def test_the_validation_loss_of_each_source_adds_up_and_is_of_no_layout(self):
        self.train(self.blend(), "one")
        self.train(self.blend(tp=2, pp=2), "four")
        said = (self.folder / "one.out").read_text()
        self.assertIn("source c has no validation part", said)  # before anything is started
        self.assertRegex(said, r"step 8: validation loss \d\.\d+ \(a \d\.\d+, b \d\.\d+\)")
        one, four = self.metrics("one"), self.metrics("four")
        for step in (4, 8, 12):
            of = one[step]["valid_source_loss"]
            self.assertEqual(sorted(of), ["a", "b"])
            self.assertNotEqual(of["a"], of["b"])
            # 16 windows, of which the blend's rule gives 12 to a; the total is of all tokens
            self.assertAlmostEqual(one[step]["valid_loss"], (12 * of["a"] + 4 * of["b"]) / 16, delta=1e-6)
            self.assertEqual((four[step]["valid_loss"], four[step]["valid_source_loss"]), (one[step]["valid_loss"], of))
        self.assertNotIn("valid_source_loss", one[5])
        events = b"".join(p.read_bytes() for p in (self.folder / "one" / "tensorboard").iterdir())
        self.assertIn(b"valid/loss/a", events)
        self.assertIn("(a ", self.report("one")[1])

        # ckpt ls: the metric of the rules, and which of them keeps a step
        listed = json.loads(self.cairn("ckpt", "ls", self.folder / "one", "--json").stdout)
        self.assertEqual(listed["rules"], ["last(1)", "best(valid_loss, 2)"])
        why = {c["step"]: c["why"].replace(", the newest good one", "") for c in listed["checkpoints"]}
        saved = [e["step"] for e in self.events("one", "saved")]  # one that is put off by a step has no valid_loss
        best = sorted((step for step in saved if step in (4, 8, 12)), key=lambda step: one[step]["valid_loss"])[:2]
        wanted = {step: "best(valid_loss, 2)" for step in best}
        wanted[12] = "last(1), best(valid_loss, 2)" if 12 in best else "last(1)"
        self.assertEqual(why, wanted)
        text = self.cairn("ckpt", "ls", self.folder / "one").stdout.decode()
        self.assertRegex(text.splitlines()[0], r"loss +valid_loss")
        self.assertRegex(text, r"step-00000012 .* " + re.escape(f"{one[12]['valid_loss']:.5g}") + " .*kept by last")

    def test_report_tells_a_killed_agent_resumes_layouts_and_who_is_at_work(self):
        recipe = self.recipe(steps=100000, tp=1, pp=2, dp=1, sp="false", save=5)
        job = self.start(recipe, "run")
        self.until_step("run", 6, job)
        told, text = self.report("run")
        self.assertTrue(told["alive"])
        self.assertEqual(told["holder"]["pid"], str(job.pid))
        self.assertRegex(text, rf"state +running \(pid {job.pid} on .*\); step \d+, .* ago")
        job.kill_group()
        told, text = self.report("run")
        self.assertFalse(told["alive"])
        self.assertEqual([(s["end"], s["source"]) for s in told["starts"]], [("killed", "fresh")])
        self.assertIn("not running: its agent was killed; step", text)
        self.assertIn("cairn resume", text)
        last = self.last_step("run")

        job = self.start(recipe, "run", "--set", "mesh.tp=2", "--set", "mesh.pp=1")
        self.until_step("run", last + 5, job)
        follower = subprocess.Popen([self.program, "report", self.folder / "run", "--follow"], stdout=subprocess.PIPE,
                                    text=True)
        self.addCleanup(lambda: follower.poll() is None and follower.kill())
        for line in follower.stdout:  # the report, then news
            if line.startswith("step "):
                break
        job.signal(signal.SIGTERM)
        self.finish(job)
        rest = follower.communicate(timeout=60)[0]
        self.assertEqual(follower.returncode, 0)
        self.assertIn("asked to stop", rest)
        self.assertIn("ended with exit code 0", rest)
        told, text = self.report("run")
        self.assertEqual([s["end"] for s in told["starts"]], ["killed", "ended"])
        self.assertIn(told["starts"][1]["source"], ("memory", "disk"))  # it was another layout's: written out first
        self.assertEqual([l["mesh"] for l in told["layouts"]], ["2 = tp 1 x dp 1 x pp 2", "2 = tp 2 x dp 1 x pp 1"])
        self.assertTrue(all(l["tokens_per_s_median"] > 0 for l in told["layouts"]))
        # Ranks go on until they miss their agent; the next start brings the lines of steps that only memory had. A step
        # that was told while its copy was not complete yet is done again.
        heard = re.search(r"life +the agent \(pid \d+ on .*\) was killed without an end, last heard of at step (\d+)\b", text)
        went_on = re.search(r"life +resumed from step (\d+) .*, layout 2 = tp 1 x dp 1 x pp 2 -> 2 = tp 2 x dp 1 x pp 1", text)
        self.assertTrue(heard and went_on, text)
        self.assertTrue(last <= int(heard[1]) <= int(went_on[1]) + 1, text)
        self.assertRegex(text, r"state +not running: ended with exit code 0")

    def test_a_page_follows_a_run_that_fails_and_recovers(self):
        page = self.folder / "page.html"
        job = self.start(self.recipe(steps=100000, tp=1, pp=1, dp=2, sp="false", save=5), "run", "--kill", "1@8")
        self.until_step("run", 3, job)
        follower = subprocess.Popen([self.program, "report", self.folder / "run", "--html", page, "--follow"],
                                    stdout=subprocess.PIPE, text=True)
        self.addCleanup(lambda: follower.poll() is None and follower.kill())
        said = lambda: json.loads(re.search(r'id="report">\n(.*?)\n</script>', page.read_text(), re.S)[1])
        self.until(page.exists, "the page", job)
        first = said()
        self.assertEqual((first["follow_seconds"], first["runs"][0]["alive"]), (10, True))
        self.until(lambda: said()["runs"][0]["steps"] > max(first["runs"][0]["steps"], 20), "a newer page", job)
        job.signal(signal.SIGTERM)
        self.finish(job)
        self.assertIn("page.html: 1 run, ", follower.communicate(timeout=60)[0])
        self.assertEqual(follower.returncode, 0)
        self.assertEqual([path.name for path in self.folder.glob("*page*")], ["page.html"])
        last, (run,) = said(), said()["runs"]
        told = self.report("run")[0]
        self.assertEqual({**run, "state": ""}, {**told, "state": ""})
        self.assertEqual((last["follow_seconds"], run["alive"], run["steps"]), (0, False, self.last_step("run")))
        metrics = self.metrics("run")
        curve = run["curves"]["series"]["loss"]
        self.assertEqual(run["curves"]["axes"][curve["axis"]]["step"], sorted(metrics))
        self.assertEqual(curve["mean"], [float(f"{metrics[step]['loss']:.6g}") for step in sorted(metrics)])
        self.assertEqual([one["generation"] for one in run["starts"]], [0, 1])
        self.assertEqual([mark["event"] for mark in run["marks"] if mark["kind"] in ("failure", "restart")],
                         ["start", "kill", "failure", "start"])
        self.assertEqual(len(run["labels"]), len(self.checkpoints("run")))
        self.assertEqual([one["cause"] for one in run["lineage"]], ["start"])
        if not chromium():
            self.skipTest("no Chromium here: the page was not tried in a browser")
        seen, console = in_browser(page.read_text(), """return { steps: document.querySelector(".card b").textContent,
            flags: document.querySelectorAll("svg .flag").length, loss: document.querySelector("svg .curve").getAttribute("d") };""",
                                   self.folder)
        self.assertEqual((seen["steps"], console), (f"{run['steps']:,}", []))
        self.assertGreater(seen["flags"], 2)
        self.assertTrue(seen["loss"].startswith("M"))

    def test_train_json_is_one_object_and_progress_goes_to_stderr(self):
        recipe = self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3)
        run = self.folder / "run"
        words = ["train", recipe, "--run", run, "--threads", 1, "--accept", "optimizer.lr", "--json"]
        done = self.cairn(*words)
        said = json.loads(done.stdout)
        self.assertEqual((said["why"], said["first_step"], said["step"], said["of"], said["exit_code"]),
                         ("done", 0, 6, 6, 0))
        self.assertEqual((said["samples"], said["run"]), (48, str(run)))
        self.assertEqual(said["loss"], self.metrics("run")[6]["loss"])
        self.assertEqual(said["checkpoint"], str(self.checkpoint("run", 6)))
        self.assertIn(b"step ", done.stderr)
        again = json.loads(self.cairn("resume", run, "--json").stdout)
        self.assertEqual((again["why"], again["step"], again["checkpoint"]),
                         ("nothing_to_do", 6, str(self.checkpoint("run", 6))))
        self.assertTrue(json.loads(self.cairn("resume", run, "--json", "--dry-run").stdout)["ok"])
        refused = json.loads(self.cairn(*words, "--set", "data.prefix=gone", code=2).stdout)
        self.assertEqual((refused["ok"], refused["exit_code"]), (False, 2))
        wrong = json.loads(self.cairn(*words, "--set", "model.heads=5", code=2).stdout)
        self.assertIn("model.heads", json.dumps(wrong["diagnostics"]))
        bad = json.loads(self.cairn("resume", self.folder / "none", "--json", code=2).stdout)
        self.assertEqual(bad["error"]["exit_code"], 2)
        job = subprocess.Popen([self.program, *map(str, words[:-1]), "--json", "--set", "stop=T.steps(1000000)"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=self.folder)
        self.addCleanup(lambda: job.poll() is None and job.kill())
        self.until(lambda: self.last_step("run") > 8, "step 8")
        job.send_signal(signal.SIGTERM)
        stopped = json.loads(job.communicate(timeout=60)[0])
        self.assertEqual((stopped["why"], stopped["first_step"], stopped["exit_code"]), ("stopped", 6, 0))

    def test_verify_ends_with_what_to_do(self):
        recipe = self.recipe(steps=300, tp=1, pp=1, dp=1, sp="false", save=20)
        copies = self.folder / "copies"
        recipe.write_text(recipe.read_text().replace("snapshot =", f'copy_to = {{ T.place "{copies}" }}, '
                                                                   "snapshot ="))
        self.train(recipe, "run")
        run = self.folder / "run"
        self.assertTrue(self.cairn("ckpt", "verify", run, "--all").stdout.decode().endswith("nothing to do\n"))

        def damage(step):
            path = next(self.checkpoint("run", step).glob("*.h5"))
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)

        first, second, newest = self.checkpoints("run")  # a save may have been put off by some steps
        damage(newest)
        said = self.cairn("ckpt", "verify", run, code=65).stdout.decode()
        self.assertIn(f"what to do: step {second} is sound: the next start of the run passes over the damaged one", said)
        fetch = re.search(r"`cairn (ckpt fetch [^`]*)`", said).group(1)
        told = json.loads(self.cairn("ckpt", "verify", run, "--json", code=65).stdout)
        self.assertEqual(told["next"]["sound_step"], second)
        dry = self.cairn("train", recipe, "--run", run, "--dry-run")
        self.assertEqual(dry.returncode, 0)
        damage(first)
        self.cairn(*fetch.split())
        said = self.cairn("ckpt", "verify", run, "--all", code=65).stdout.decode()
        self.assertIn(f"what to do: the newest step, {newest}, is sound", said)
        for step in (second, newest):
            damage(step)
        self.assertIn("no sound step is left here", self.cairn("ckpt", "verify", run, code=65).stdout.decode())
        shutil.rmtree(run)
        self.assertIn(f"step {newest} would be brought from {copies}",
                      self.cairn("train", recipe, "--run", run, "--dry-run").stdout.decode())
        self.assertFalse(run.exists())

    def test_a_damaged_newest_step_is_told_before_the_start(self):
        recipe = self.recipe(steps=300, tp=1, pp=1, dp=1, sp="false", save=20, keep=2)
        self.train(recipe, "run")
        run = self.folder / "run"
        older, newest = self.checkpoints("run")
        os.truncate(next(self.checkpoint("run", newest).glob("*.h5")), 100)
        for words in (("train", recipe, "--run", run, "--dry-run"), ("check", recipe, "--run", run), ("check", "--run", run)):
            self.assertRegex(self.cairn(*words).stdout.decode(),
                             f"(?s)passed over: .*step-{newest:08}: .*resumes from step {older} ")
        said = self.cairn("check", recipe, "--run", run, "--set", "model.width=64", code=2).stderr.decode()
        self.assertIn(f"step-{older:08}", said)  # of another model
        os.truncate(next(self.checkpoint("run", older).glob("*.h5")), 100)
        self.assertIn("none of its checkpoints can be used", self.cairn("check", recipe, "--run", run, code=2).stderr.decode())


if __name__ == "__main__":
    main()
