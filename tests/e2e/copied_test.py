"""Snapshots that are copied beside training (checkpoint.snapshot_by = "copy"): the same run bit for bit, over deaths too."""

import os
import signal

from harness import RunTest, main

STEPS = 40


class Copied(RunTest):
    def with_checkpoint(self, words, **changes):
        path = self.recipe(steps=STEPS, **changes)
        path.write_text(path.read_text().replace("snapshot = T.every", f"{words}, snapshot = T.every"))
        return path

    def copying(self, name="small", **changes):
        return self.with_checkpoint('snapshot_by = "copy"', **{**dict(name=name, save=1000), **changes})

    def test_files_are_those_of_a_run_with_banks(self):
        for name, layout in (("all", {}), ("zero3", dict(tp=1, pp=1, dp=4, zero=3, sp="false", precision="bf16"))):
            with self.subTest(layout=name):
                # All saves may be under way at once: on a busy machine one would come later, behind the one before.
                changes = dict(name=name, save=10, keep=8, **layout)
                self.train(self.with_checkpoint("in_flight = 4", **changes), f"{name}-banks")
                self.train(self.with_checkpoint('in_flight = 4, snapshot_by = "copy"', **changes), f"{name}-copies")
                for run in (f"{name}-banks", f"{name}-copies"):
                    self.assertEqual(self.checkpoints(run), [10, 20, 30, 40])
                for step in (10, 20, 30, 40):
                    mine, other = self.contents(f"{name}-copies", step), self.contents(f"{name}-banks", step)
                    self.assertEqual(mine[1], other[1])
                self.assertEqual(self.cairn("ckpt", "verify", f"{name}-copies").returncode, 0)
                self.assertEqual(self.memory_left(self.folder), [])

    def test_killed_ranks_go_on_from_the_newest_complete_copy(self):
        recipe = self.copying()
        self.train(recipe, "whole")
        for kills in (["5@3", "2@11"], ["0@7"], ["7@2", "0@6"]):
            with self.subTest(kills=kills):
                run = "cut-" + kills[0].replace("@", "-")
                self.train(recipe, run, *[word for kill in kills for word in ("--kill", kill)])
                self.assert_same_training(run, "whole", STEPS)
                starts = self.events(run, "start")
                self.assertEqual(len(starts), len(kills) + 1)
                for start, kill in zip(starts[1:], kills):
                    # Of the steps before the killed one all ranks had completed the last but one at least.
                    self.assertGreaterEqual(start["step"], int(kill.split("@")[1]) - 2)
                    if start["step"] > 0:
                        self.assertIn("shared memory", start["from"])

        # Memory that is not trusted is checked against the sums that the copies took on the way.
        job = self.start(recipe, "crash")
        self.until_step("crash", 5, job)
        os.kill(job.children()[3], signal.SIGSEGV)
        self.finish(job)
        self.assertIn("shared memory", self.events("crash", "start")[-1]["from"])
        self.assertGreaterEqual(self.events("crash", "start")[-1]["step"], 3)
        self.assert_same_training("crash", "whole", STEPS)

    def test_a_signal_and_the_death_of_the_agent(self):
        recipe = self.copying()
        self.train(recipe, "whole")
        job = self.start(recipe, "stopped")
        self.until_step("stopped", 5, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        reached = self.last_step("stopped")
        self.assertEqual(self.checkpoints("stopped"), [reached])
        self.train(recipe, "stopped")
        self.assert_same_training("stopped", "whole", STEPS)

        job = self.start(recipe, "dead")
        self.until_step("dead", 6, job)
        job.kill_group()
        reached = self.last_step("dead")
        second = self.train(recipe, "dead")
        self.assertIn("took over the snapshot memory of this run's dead agent", second.output())
        self.assertGreaterEqual(self.events("dead", "start")[-1]["step"], reached - 1)
        self.assert_same_training("dead", "whole", STEPS)
        self.assertEqual(self.memory_left(self.folder), [])

    def test_not_with_state_on_a_disk(self):
        path = self.copying()
        path.write_text(path.read_text().replace("weight_decay = 0.1,", 'weight_decay = 0.1, offload = "/tmp",'))
        self.assertIn("but optimizer.offload keeps it on a disk", self.cairn("check", path, code=2).stderr.decode())


if __name__ == "__main__":
    main()
