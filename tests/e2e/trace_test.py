"""cairn train --trace, and where the time of each step went."""

import json

from harness import RunTest, main

PHASES = {"other", "data", "forward", "backward", "pipeline", "reduce", "optimizer", "validation", "checkpoint", "log"}


class Trace(RunTest):
    def test_a_window_of_steps_is_drawn_by_every_rank_on_one_clock(self):
        recipe = self.recipe(steps=8, save=3)
        job = self.train(recipe, "run", "--trace", "steps=3..4")
        path = self.folder / "run" / "trace" / "trace.json"
        self.assertIn(str(path), job.output())
        merged = json.loads(path.read_text())["traceEvents"]
        bars = [e for e in merged if e["ph"] == "X"]
        self.assertEqual(min(e["ts"] for e in bars), 0)
        ranks = sorted({e["pid"] for e in bars if e["pid"] < 8})
        self.assertEqual(ranks, list(range(8)))
        names = {e["args"]["name"] for e in merged if e["name"] == "process_name"}
        self.assertIn("rank 5 (tp 1, dp 0, pp 1)", names)
        for rank in ranks:
            mine = [e for e in bars if e["pid"] == rank]
            single = json.loads((self.folder / "run" / "trace" / f"rank-{rank}.json").read_text())["traceEvents"]
            self.assertEqual(len(mine), len([e for e in single if e["ph"] == "X"]))
            self.assertEqual({e["args"]["step"] for e in mine}, {3, 4})
            self.assertLessEqual({"data", "forward", "backward", "reduce", "optimizer", "checkpoint"},
                                 {e["name"] for e in mine if e["cat"] == "phase"})
            self.assertLessEqual({"attention", "mlp", "attention backward"},
                                 {e["name"] for e in mine if e["cat"] == "compute"})
            for lane in {e["tid"] for e in mine}:
                self.check_nested([e for e in mine if e["tid"] == lane])
            # Eight samples, two replicas: four micro-batches a step and rank.
            for step in (3, 4):
                forwards = [e for e in mine if e["name"] == "forward" and e["args"]["step"] == step]
                self.assertEqual(sorted(e["args"]["micro_batch"] for e in forwards), [0, 1, 2, 3])
            for e in mine:
                if e["cat"] == "comm" and e["name"] not in ("barrier", "wait_sends"):
                    self.assertGreater(e["args"]["bytes"], 0)
                    self.assertRegex(e["args"]["group"], r"^[a-z ]+\[[\d,]+\]$")
        self.check_messages(merged, bars)
        self.check_collectives(bars)
        # The agent's save of step 3 may fall into the window's file or come after it; if drawn, it is whole.
        for e in bars:
            if e["cat"] == "checkpoint" and e["pid"] > 8:
                self.assertGreater(e["args"]["bytes"], 0)

    def check_nested(self, bars):
        """Bars of a lane do not cross: a viewer could not draw them."""
        open_ends = []
        for e in sorted(bars, key=lambda e: (e["ts"], -e["dur"])):
            end = e["ts"] + e["dur"]
            while open_ends and open_ends[-1] <= e["ts"] + 1e-3:
                open_ends.pop()
            if open_ends:
                self.assertLessEqual(end, open_ends[-1] + 1e-3, e)
            open_ends.append(end)

    def check_messages(self, merged, bars):
        """Every message has its two ends, and none arrives before it was sent: one clock for all ranks."""
        sent = {e["id"]: e for e in merged if e["ph"] == "s"}
        received = {e["id"]: e for e in merged if e["ph"] == "f"}
        self.assertTrue(sent)
        self.assertEqual(set(sent), set(received))
        for key, e in received.items():
            self.assertGreaterEqual(e["ts"], sent[key]["ts"])
            self.assertNotEqual(e["pid"], sent[key]["pid"])

    def check_collectives(self, bars):
        """The members of a collective are in it at one moment: the last to come, before the first to leave."""
        groups = {}
        for e in bars:
            if e["cat"] == "comm" and e["name"] == "all_reduce":
                key = e["args"]["group"], e["args"]["what"]
                groups.setdefault(key, {}).setdefault(e["pid"], []).append(e)
        checked = 0
        for (group, _), members in groups.items():
            if len({len(calls) for calls in members.values()}) != 1:
                continue
            for calls in zip(*members.values()):
                self.assertLessEqual(max(e["ts"] for e in calls), min(e["ts"] + e["dur"] for e in calls) + 1e-3)
                checked += 1
        self.assertGreater(checked, 0)

    def test_a_wrong_window_is_refused_and_a_window_past_the_end_draws_nothing(self):
        recipe = self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false")
        job = self.train(recipe, "run", "--trace", "steps=9..2", code=2)
        self.assertIn("expected steps=A..B", job.output())
        self.train(recipe, "run", "--trace", "steps=90..99")
        self.assertFalse((self.folder / "run" / "trace" / "trace.json").exists())

    def test_a_window_that_the_end_cuts_is_drawn(self):
        recipe = self.recipe(steps=6, tp=1, pp=1, dp=2, sp="false")
        self.train(recipe, "run", "--trace", "steps=3..100")
        bars = json.loads((self.folder / "run" / "trace" / "trace.json").read_text())["traceEvents"]
        self.assertEqual({e["args"]["step"] for e in bars if e["ph"] == "X" and e["pid"] < 2}, {3, 4, 5, 6})

    def test_the_time_of_each_step_is_split_and_its_use_of_the_peak_told(self):
        recipe = self.recipe(steps=12, tp=1, pp=2, dp=2, sp="false", save=4)
        job = self.train(recipe, "run", "--peak-tflops", "0.5")
        self.assertRegex(job.output(), r"mfu [\d.]+%")
        parts = sum(sum(line["split_ms"].values()) for line in self.metrics("run").values())
        begin, end = (self.events("run", kind)[0]["time"] for kind in ("start", "end"))
        self.assertLessEqual(parts, 1000 * (end - begin))  # each moment counts once
        for step, line in self.metrics("run").items():
            split = line["split_ms"]
            self.assertEqual(set(split), PHASES)
            for ms in split.values():
                self.assertGreaterEqual(ms, 0)
            self.assertGreater(split["forward"], 0)
            self.assertGreater(split["backward"], 0)
            self.assertGreater(split["optimizer"], 0)
            self.assertGreaterEqual(sum(split.values()), line["step_ms"] * 0.999, step)  # from one line to the next
            self.assertAlmostEqual(line["mfu"], line["tflops"] / (4 * 0.5), places=6)
        events = b"".join(p.read_bytes() for p in (self.folder / "run" / "tensorboard").iterdir())
        for tag in (b"time/forward_ms", b"time/reduce_ms", b"speed/mfu", b"speed/model_tflops"):
            self.assertIn(tag, events)


if __name__ == "__main__":
    main()
