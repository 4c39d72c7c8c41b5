"""Damaged checkpoints: named, left alone, and passed over for the newest whole one."""

import shutil
import signal

from harness import JUMP, OTHER_NAME, RunTest, main

STEPS = 60
SMALL = dict(tp=1, pp=2, dp=1, zero=0, sp="false", save=5, keep=10)


class Damage(RunTest):
    def setUp(self):
        super().setUp()
        self.long = self.recipe(name="long", steps=STEPS, **SMALL)
        self.train(self.long, "whole")
        self.quiet = self.recipe(name="quiet", steps=STEPS, **{**SMALL, "save": 1000})  # saves at its stops alone

    def stopped_run(self, run):
        """A run that was stopped twice before its end: a stop's checkpoint is there when the run has left, while a save
        beside the training may take any time. Returns the two checkpoints, four steps apart or more."""
        for _ in range(20):
            for _ in range(2):
                job, at = self.start(self.quiet, run), self.last_step(run)
                self.until_step(run, min(at + 4, STEPS), job)
                job.signal(signal.SIGTERM)
                self.finish(job)
            steps = self.checkpoints(run)
            if len(steps) >= 2 and steps[-1] < STEPS and steps[-1] - steps[-2] >= 4:
                return steps[-1], steps[-2]
            shutil.rmtree(self.folder / run)  # it was faster than the signal
        self.fail("no run was stopped twice before its end")

    def flip_payload(self, run, step):
        """Flips a bit in the middle of the largest shard; returns the tensor's name."""
        manifest = self.manifest(run, step)
        shard = max(self.shards(run, step), key=lambda s: s["bytes"])
        path = self.checkpoint(run, step) / manifest["files"][shard["file"]]["name"]
        with open(path, "r+b") as f:
            f.seek(shard["offset"] + shard["bytes"] // 2)
            byte = f.read(1)
            f.seek(-1, 1)
            f.write(bytes([byte[0] ^ 16]))
        return manifest["tensors"][shard["tensor"]]["name"]

    def test_a_flipped_byte_of_payload(self):
        newest, older = self.stopped_run("run")
        name = self.flip_payload("run", newest)
        job = self.train(self.long, "run", *OTHER_NAME)
        self.assertIn(f"checkpoints/step-{newest:08d}: ", job.output())
        self.assertIn(f"step-{newest:08d}", job.output())
        self.assertIn(name, job.output())  # the tensor
        self.assertIn("chunk", job.output())
        self.assertEqual(self.events("run", "start")[-1]["step"], older)
        self.assert_same_training("run", "whole", STEPS)

    def test_retention_does_not_take_a_damaged_one_for_a_good_one(self):
        newest, older = self.stopped_run("run")
        self.flip_payload("run", newest)
        one = self.recipe(name="one", steps=STEPS, **{**SMALL, "save": 1, "keep": 1})
        self.train(one, "run", *OTHER_NAME, "--kill", f"1@{older + 2}")
        # Had the damaged one counted, what was saved below it would have been removed in the same breath.
        below = [e for e in self.events("run", "saved")[-STEPS:] if older < e["step"] < newest]
        self.assertTrue(below)
        for event in below:
            self.assertNotIn(event["step"], event["removed"])
        # And memory counts although there is a "newer" one on disk.
        start = self.events("run", "start")[-1]
        self.assertIn("shared memory", start["from"])
        self.assertGreaterEqual(start["step"], older + 1)

    def test_a_truncated_file(self):
        newest, older = self.stopped_run("run")
        path = sorted(self.checkpoint("run", newest).glob("*.h5"))[-1]
        with open(path, "r+b") as f:
            f.truncate(path.stat().st_size - 4096)
        job = self.train(self.long, "run", *OTHER_NAME)
        self.assertIn(path.name, job.output())
        self.assertIn(f"checkpoints/step-{newest:08d}: ", job.output())
        self.assertEqual(self.events("run", "start")[-1]["step"], older)
        self.assert_same_training("run", "whole", STEPS)

    def test_a_damaged_manifest(self):
        for how in ("flipped", "empty", "missing"):
            with self.subTest(how=how):
                run = f"run-{how}"
                newest, older = self.stopped_run(run)
                path = self.checkpoint(run, newest) / "manifest.json"
                data = bytearray(path.read_bytes())
                if how == "flipped":
                    data[len(data) // 2] ^= 1
                    path.write_bytes(data)
                elif how == "empty":
                    path.write_bytes(b"")
                else:
                    path.unlink()
                job = self.train(self.long, run, *OTHER_NAME)
                self.assertIn(f"checkpoints/step-{newest:08d}: ", job.output())
                self.assertIn("manifest.json", job.output())
                self.assertEqual(self.events(run, "start")[-1]["step"], older)
                self.assert_same_training(run, "whole", STEPS)

    def test_nothing_is_started_or_deleted_when_all_are_damaged(self):
        self.stopped_run("run")
        for step in self.checkpoints("run"):
            path = self.checkpoint("run", step) / "manifest.json"
            path.write_bytes(path.read_bytes()[:-5])
        before = self.listing("run")
        lines = len(self.metrics_lines("run"))
        for _ in range(2):
            job = self.train(self.long, "run", code=65)
            for step in self.checkpoints("run"):
                self.assertIn(f"checkpoints/step-{step:08d}: ", job.output())
            self.assertEqual(self.listing("run"), before)
            self.assertEqual(len(self.metrics_lines("run")), lines)
        self.assertEqual(self.memory_left(self.folder), [])

    def test_more_damaged_payloads_than_restarts_still_find_the_whole_one_or_say_so(self):
        dense = self.recipe(name="dense", steps=STEPS, **{**SMALL, "save": 2})
        self.train(dense, "dense-whole")
        for one_left in (True, False):
            with self.subTest(one_left=one_left):
                run = f"run-{one_left}"
                while self.last_step(run) < 24:  # stopped again and again: a checkpoint each time
                    job, at = self.start(dense, run), self.last_step(run)
                    self.until_step(run, at + 1, job)
                    job.signal(signal.SIGTERM)
                    self.finish(job)
                self.assertGreater(len(self.checkpoints(run)), 4)
                whole = self.checkpoints(run)[0] if one_left else None
                for step in self.checkpoints(run):
                    if step != whole:
                        self.flip_payload(run, step)
                names = self.checkpoints(run)
                if whole is None:
                    for _ in range(2):
                        job = self.train(dense, run, code=65)
                        for step in names:
                            self.assertIn(f"checkpoints/step-{step:08d}: ", job.output())
                        self.assertEqual(self.checkpoints(run), names)
                else:
                    self.train(dense, run)
                    self.assertEqual(self.events(run, "start")[-1]["step"], whole)
                    self.assert_same_training(run, "dense-whole", STEPS)

    def test_behind_a_damaged_step_that_others_refer_to_its_number_is_saved_anew(self):
        recipe = self.recipe(name="still", steps=14, **{**SMALL, "pp": 1, "save": 2})
        # A weight that is not zero does not feel a step of 1e-30.
        recipe.write_text(recipe.read_text().replace("to = 1e-3", "to = 1e-31")
                          .replace("weight_decay = 0.1", "weight_decay = 0.0").replace("peak_lr = 1e-2", "peak_lr = 1e-30"))
        more = ["--set", "checkpoint.incremental=true"]
        for until in (8, 14):  # a new agent's first save refers to nothing
            self.train(recipe, "run", *more, "--set", f"stop=T.steps({until})", *JUMP)
        files = self.manifest("run", 14)["files"]
        self.assertEqual({f.get("step") for f in files}, {None, 10})
        refers = [shard for shard in self.shards("run", 14) if files[shard["file"]].get("step") == 10]
        shard = max(refers, key=lambda s: s["bytes"])
        with open(self.checkpoint("run", 10) / files[shard["file"]]["name"], "r+b") as f:
            f.seek(shard["offset"])
            byte = f.read(1)
            f.seek(shard["offset"])
            f.write(bytes([byte[0] ^ 16]))
        shutil.copytree(self.folder / "run", self.folder / "stop")
        (self.folder / "stop" / "run.json").unlink()  # a run of its own
        for run, how in (("run", []), ("stop", ["--set", "checkpoint.on_failure=stop"])):
            self.train(recipe, run, *more, *how)
            self.assertEqual(self.events(run, "start")[-1]["step"], 8)
            self.assertEqual(self.events(run, "save_failed"), [])
            for step in (10, 14):
                self.cairn("ckpt", "verify", self.checkpoint(run, step))

    def listing(self, run):
        folder = self.folder / run / "checkpoints"
        return sorted((str(p.relative_to(folder)), p.stat().st_size) for p in folder.rglob("*") if p.is_file())


if __name__ == "__main__":
    main()
