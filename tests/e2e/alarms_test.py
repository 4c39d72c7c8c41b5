"""A run whose losses leave their level says so within eight steps, names the command that shows the samples, and trains
on."""

import json
import random

from harness import RunTest, main, write_pair

# A hold, then a rate that no small model bears.
JUMP = ("T.schedule { T.warmup { over = T.steps(4) }, T.hold { over = T.steps(145) }, "
        "T.linear { to = 3, over = T.steps(1) }, T.hold {} }")
KINDS = ("outlier", "divergence", "drop", "level_shift")


class Alarms(RunTest):
    def small(self):
        return self.recipe(steps=165, tp=1, pp=1, dp=1, zero=0, sp="false", save=50, keep=3)

    def alarms(self, run):
        return [event for event in self.events(run) if event["event"] in KINDS]

    def test_a_divergence_is_called_once_and_changes_nothing(self):
        window = ("--set", "watch.window=32")
        self.train(self.small(), "quiet", *window)
        self.assertEqual(self.alarms("quiet"), [])
        # The same until step 150, and killed in the trouble: a step that is done again raises no alarm.
        job = self.train(self.small(), "jump", *window, "--set", f"optimizer.lr={JUMP}", "--set",
                         "checkpoint.snapshot=T.every { steps = 8 }", "--kill", "0@157")
        self.assertEqual(len(self.events("jump", "failure")), 1)
        told = self.alarms("jump")
        first = told[0]
        self.assertIn(first["step"], range(150, 156), told)
        self.assertEqual(first["event"], "outlier")
        divergences = [event for event in told if event["event"] == "divergence"]
        self.assertEqual(len(divergences), 1, told)
        divergence = divergences[0]
        self.assertIn(divergence["step"], range(153, 159), told)
        self.assertEqual(divergence["onset"], first["step"])
        steps = [event["step"] for event in told]
        self.assertEqual(steps, sorted(set(steps)))
        text = job.output()
        self.assertIn(f'the run diverges since step {first["step"]}: step {divergence["step"]}: ', text)
        steps = f'--step {first["step"]}..{divergence["step"]}'
        command = f'"cairn data samples {self.folder / "jump"} {steps} --suspects --text" shows'
        self.assertIn(command, text)
        options = command.split('"')[1].split()[1:]
        shown = json.loads(self.cairn(*options, "--json").stdout)["samples"]
        # The samples that metrics.jsonl has of these steps, with their losses; without --suspects all of them.
        recorded = [[step, *one] for step in range(first["step"], divergence["step"] + 1)
                    for one in sorted(self.metrics("jump")[step].get("outlier", []))]
        self.assertGreater(len(recorded), 3)
        self.assertEqual([[one["step"], one["position"], one["loss"], one["z"]] for one in shown], recorded)
        options.remove("--suspects")
        shown = json.loads(self.cairn(*options, "--json").stdout)["samples"]
        self.assertEqual({one["step"] for one in shown}, set(range(first["step"], divergence["step"] + 1)))
        self.assertEqual(sum("z" in one for one in shown), len(recorded))
        self.assertEqual(self.last_step("jump"), 165)

    def test_another_batch_is_another_level_and_no_alarm(self):
        """A stage of whole new data: of the steps before no loss is like these."""
        write_pair(self.folder / "other", random.Random(3).randbytes(60000))
        data = ('data=T.blend { sources = { T.megatron { prefix = "tokens", weight = 1 }, '
                'T.megatron { prefix = "other", weight = 1e-5 } } }')
        stage = "stages={ T.stage { at = T.steps(130), data = { weights = { other = 1e5 } } } }"
        self.train(self.small(), "staged", "--set", "watch.window=32", "--set", data, "--set", stage)
        self.assertGreater(self.metrics("staged")[131]["loss"], self.metrics("staged")[130]["loss"] + 1)
        self.assertEqual(self.alarms("staged"), [])


if __name__ == "__main__":
    main()
