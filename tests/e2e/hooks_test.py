"""Commands of a recipe that the agent runs when something happens: T.on {...} with --hooks, and without."""

import json
import os
import signal
import sys

from harness import RunTest, main

LOG = 'cat >> "$CAIRN_RUN/../heard"; echo "$1 $2 $CAIRN_STEP" >> "$CAIRN_RUN/../seen"'


class Hooks(RunTest):
    def hooked(self, *hooks, **recipe):
        """A recipe with these hooks (T.on's insides)."""
        path = self.recipe(**({"tp": 1, "pp": 1, "dp": 2, "sp": "false", "steps": 12, "save": 5} | recipe))
        text = ", ".join(f"T.on {{ {hook} }}" for hook in hooks)
        path.write_text(path.read_text().replace("checkpoint = T.checkpoint", f"hooks = {{ {text} }}, checkpoint = "
                                                                               "T.checkpoint"))
        return path

    def heard(self):
        path = self.folder / "heard"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def test_a_run_calls_its_hooks_and_trains_the_same_bits(self):
        self.script("note", LOG)
        names = ["started", "saved", "ended", "best", "failed", "recovered"]
        recipe = self.hooked(*(f'"{name}", run = {{ "./note", "{{step}}", "{{dir}}" }}' for name in names))
        recipe.write_text(recipe.read_text().replace("keep = { T.last(3) }", 'keep = { T.last(3), T.best { metric = "loss" } }'))
        job = self.train(recipe, "without")
        self.assertIn("6 hooks of the recipe are not run: --hooks", job.output())
        self.assertEqual(self.heard(), [])
        job = self.train(recipe, "run", "--hooks", "--kill", "1@7")
        self.assertNotIn("--hooks", job.output())
        self.assert_same_training("run", "without", 12)  # the same recipe
        heard = self.heard()
        self.assertEqual({event["on"] for event in heard}, set(names))
        ended = [event for event in heard if event["on"] == "ended"]
        self.assertEqual([(e["step"], e["exit_code"], e["run"]) for e in ended], [(12, 0, str(self.folder / "run"))])
        self.assertIn(f"12 {self.checkpoint('run', 12)} 12", (self.folder / "seen").read_text().splitlines())
        self.assertEqual({e["dir"] for e in heard if e["on"] in ("saved", "best")} -
                         {str(self.checkpoint("run", step)) for step in range(1, 13)}, set())
        self.assertEqual(self.events("run", "hook_failed"), [])

        # A start says for itself whether they run.
        (self.folder / "heard").unlink()
        self.assertIn("6 hooks of the recipe are not run", self.cairn("resume", self.folder / "run").stdout.decode())
        self.assertEqual(self.heard(), [])
        self.cairn("resume", self.folder / "run", "--hooks")
        self.assertIn("ended", [event["on"] for event in self.heard()])

    def test_a_failing_or_hanging_hook_costs_the_run_nothing_but_its_timeout_at_the_end(self):
        recipe = self.hooked('"started", run = { "sh", "-c", "echo full >&2; exit 3" }',
                             '"saved", "ended", run = { "sh", "-c", "sleep 600" }, timeout = "300ms"')
        job = self.train(recipe, "run", "--hooks")
        failed = {(e["hook"], e["on"]): e["message"] for e in self.events("run", "hook_failed")}
        self.assertEqual(failed[1, "started"], "exited with code 3")
        self.assertIn("was ended", failed[2, "saved"])
        self.assertRegex(failed[2, "ended"], "was ended: it took|was not run: .*the command before it took")
        self.assertIn("warning: hook 1 (sh) of started, step 0: exited with code 3\n", job.output())
        self.assertIn("full", (self.folder / "run/logs/hook-1.log").read_text())
        self.assertEqual(self.events("run")[-1]["event"], "hook_failed")  # behind "end": it was waited for

    def test_a_signal_ends_the_wait_for_a_hook(self):
        recipe = self.hooked('"ended", run = { "sh", "-c", "echo $$ > pid; sleep 600" }, timeout = "1h"', steps=6)
        job = self.start(recipe, "run", "--hooks")
        pid = self.folder / "pid"
        self.until(lambda: pid.exists() and pid.read_text().strip(), "the hook", job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        self.assertIn("stopped by a signal", self.events("run", "hook_failed")[0]["message"])
        self.assertFalse(os.path.exists(f"/proc/{pid.read_text().strip()}"))

    def test_mistakes_are_told_with_their_line(self):
        for hook, said in [('"safed", run = { "x" }', 'hooks[1].events: "safed" is not one of'),
                           ('"saved", run = {}', "hooks[1]: run names no program"),
                           ('"saved"', "hooks[1].run is missing"),
                           ('run = { "x" }', "must begin with the events"),
                           ('"best", run = { "x" }', "checkpoint.keep has no T.best"),
                           ('"saved", run = { "x" }, at_most = 3', "and within is missing")]:
            text = self.cairn("check", self.hooked(hook), code=2).stderr.decode()
            self.assertIn(said, text)
            self.assertRegex(text, r"small\.lua:\d+:")


if __name__ == "__main__":
    main()
