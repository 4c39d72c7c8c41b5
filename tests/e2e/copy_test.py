"""checkpoint.copy_to: checkpoints go on to a second place while a run trains, and a lost node begins with them."""

import os
import pathlib
import shutil
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import object_store
from harness import JUMP, Job, RunTest, main


class Copies(RunTest):
    def copies(self, *places, **recipe):
        """A recipe whose checkpoints go on to these places (T.place's insides)."""
        path = self.recipe(**({"tp": 1, "pp": 1, "dp": 2, "sp": "false"} | recipe))
        text = ", ".join(f"T.place {{ {place} }}" for place in places)
        path.write_text(path.read_text().replace("snapshot = T.every", f"copy_to = {{ {text} }}, snapshot = T.every"))
        return path

    def copier(self, job):
        """The process that copies, or None."""
        try:
            pids = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        except OSError:
            return None
        for pid in pids:
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"_copy" in words:
                return int(pid)
        return None

    def placed(self, folder):
        folder = pathlib.Path(folder)
        return sorted(int(p.name[5:]) for p in folder.glob("step-*")) if folder.is_dir() else []

    def assert_copy(self, copy, run, step):
        mine = {p.name: p.read_bytes() for p in self.checkpoint(run, step).iterdir()}
        self.assertEqual({p.name: p.read_bytes() for p in pathlib.Path(copy).iterdir()}, mine)

    def test_a_run_is_copied_and_a_lost_node_goes_on_from_the_copy(self):
        far = self.folder / "far"
        place = f'"{far}", keep_last = 2'
        for steps in (25, 40):  # the same, with its disk all the time
            self.train(self.recipe(name="plain", steps=steps, save=10, tp=1, pp=1, dp=2, sp="false"), "reference", *JUMP)
        recipe = self.copies(place, steps=25, save=10, name="plain", keep=1)
        job = self.train(recipe, "run")
        self.assertEqual(self.placed(far / "run")[-1], 25)
        self.assertLessEqual(len(self.placed(far / "run")), 2)
        self.assert_copy(far / "run" / "step-00000025", "run", 25)
        self.assertIn("copied step 25 to", job.output())
        self.assertEqual([p for p in (far / "run").iterdir() if p.name.startswith(".")], [])
        identity = self.run_id("run")
        shutil.rmtree(self.folder / "run")  # the node is gone, and its disk
        job = self.train(self.copies(place, steps=40, save=10, name="plain"), "run", *JUMP)
        self.assertIn("no checkpoint here; bringing step 25", job.output())
        self.assertEqual(self.events("run", "fetched")[0]["step"], 25)
        self.assertEqual(self.events("run", "start")[0]["step"], 25)
        self.assertEqual(self.run_id("run"), identity)
        got, wanted = self.metrics("run"), self.metrics("reference")
        self.assertEqual(sorted(got), list(range(26, 41)))
        for step in range(26, 41):
            self.assertEqual(got[step]["loss"], wanted[step]["loss"])
        self.assertEqual(self.contents("run", 40)[1], self.contents("reference", 40)[1])
        self.assertEqual(self.placed(far / "run")[-1], 40)

    def test_a_step_that_is_fetched_by_hand_goes_on_as_the_run_whose_copies_are_there(self):
        far = self.folder / "far"
        self.train(self.copies(f'"{far}"', steps=20, save=2, keep=100), "run")
        wanted, identity = self.metrics("run"), self.run_id("run")
        last = self.contents("run", 20)
        step = self.checkpoints("run")[0]
        self.assertLess(step, 20)
        self.cairn("ckpt", "push", self.checkpoint("run", step), far / "run")
        shutil.rmtree(self.folder / "run")
        (self.folder / "run" / "checkpoints").mkdir(parents=True)
        self.cairn("ckpt", "fetch", far / "run" / f"step-{step:08d}", "run")
        said = self.cairn("resume", self.folder / "run", "--threads", 1).stdout.decode()
        self.assertIn(f"resumes as run {identity}, whose copies", said)
        self.assertEqual(self.run_id("run"), identity)
        got = self.metrics("run")
        self.assertEqual({at: line["loss"] for at, line in got.items()},
                         {at: line["loss"] for at, line in wanted.items() if at > step})
        self.assertEqual(self.contents("run", 20), last)
        self.assertTrue(self.events("run", "copied"))

        # Elsewhere it is a run of its own, which has a place of its own.
        (self.folder / "other" / "checkpoints").mkdir(parents=True)
        self.cairn("ckpt", "fetch", far / "run" / f"step-{step:08d}", "other")
        self.assertNotIn("resumes as run", self.cairn("resume", self.folder / "other", "--threads", 1).stdout.decode())
        self.assertNotEqual(self.run_id("other"), identity)
        self.assertEqual(self.placed(far / "other")[-1], 20)

    def test_a_lost_node_does_not_begin_with_a_step_of_another_run(self):
        far = self.folder / "far"
        recipe = self.copies(f'"{far}"', steps=10, save=5, dp=1)
        self.train(recipe, "run")
        self.train(self.recipe(steps=20, save=20, tp=1, pp=1, dp=1, sp="false"), "other")
        shutil.copytree(self.checkpoint("other", 20), far / "run" / "step-00000020")
        mine, other = self.run_id("run"), self.run_id("other")
        shutil.rmtree(self.folder / "run")
        job = self.train(self.copies(f'"{far}"', steps=15, save=5, dp=1), "run", *JUMP)
        self.assertIn(f"step 20 in {far}/run is of run {other}, and the place and steps in it are of run {mine}: not taken",
                      job.output())
        self.assertEqual(self.events("run", "fetched")[0]["step"], 10)
        self.assertEqual(self.run_id("run"), mine)
        # With no step of its own below it, it may be what the run began with.
        for step in (5, 10, 15):
            shutil.rmtree(far / "run" / f"step-{step:08d}")
        shutil.rmtree(self.folder / "run")
        self.train(self.copies(f'"{far}"', steps=25, save=5, dp=1), "run")
        self.assertEqual(self.events("run", "fetched")[0]["step"], 20)

    def test_the_process_that_copies_is_killed_again_and_again(self):
        far = self.folder / "far"
        # Slow enough to be killed in the middle, and local retention leaves nothing to copy but what is held.
        recipe = self.copies(f'"{far}", max_mb_per_s = 2', steps=100000, save=20, keep=1)
        job = self.start(recipe, "run", "--set", "log.tensorboard=false")
        for _ in range(2):
            pid = self.until(lambda: self.copier(job), "the copying process", job)
            held = self.folder / "run" / "copying" / "0"
            self.until(lambda: held.is_dir() and list(held.glob("step-*")), "a copy under way", job)
            os.kill(pid, signal.SIGKILL)
            self.until(lambda: self.copier(job) != pid, "the end of the killed process", job)
        self.assertIn("killed by signal 9", job.output())
        self.until(lambda: self.events("run", "copied"), "a copy", job)
        at = self.last_step("run")
        self.until_step("run", at + 5, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        last = self.last_step("run")
        self.assertEqual(self.checkpoints("run")[-1], last)
        self.assertLessEqual(len(self.checkpoints("run")), 3)  # the newest good one and the next that may prove good
        self.assertEqual(self.placed(far / "run")[-1], last)
        self.assert_copy(far / "run" / f"step-{last:08d}", "run", last)
        self.assertEqual(list((self.folder / "run" / "copying" / "0").iterdir()), [])
        for step in self.placed(far / "run"):
            self.train_tool("ckpt", "verify", far / "run" / f"step-{step:08d}")

    def train_tool(self, *args):
        job = Job(self.program, args, self.folder / "tool.out", self.folder)
        self.jobs.append(job)
        self.finish(job, 0)
        return job

    def test_a_place_that_fails_is_told_once_and_never_stops_the_run(self):
        far = self.folder / "far"
        job = self.train(self.copies(f'"{far}"', steps=20, save=5), "run")  # begins with a place that is fine
        self.assertEqual(self.placed(far / "run")[-1], 20)
        shutil.rmtree(far)
        far.write_text("in the way")
        job = self.start(self.copies(f'"{far}", finish = 1', steps=100000, save=20), "run", *JUMP)
        self.until(lambda: self.events("run", "copy_failed"), "a failed copy", job)
        at = self.last_step("run")
        self.until_step("run", at + 30, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        reached = self.last_step("run")
        self.assertEqual(len(self.events("run", "copy_failed")), 1, job.output())
        self.assertIn(f"warning: checkpoints are not copied to {far}/run yet: ", job.output())
        self.assertIn("it is tried again", job.output())
        self.assertIn("not everything is copied", job.output())
        self.assertEqual(len(self.events("run", "copy_given_up")), 1)
        far.unlink()
        os.unlink(self.folder / "run" / "copying" / "0.place")  # wanted anew
        last = self.copies(f'"{far}"', steps=reached, save=20)
        job = self.train(last, "run")  # nothing to train, but to copy
        self.assertEqual(self.placed(far / "run")[-1], reached)
        self.assert_copy(far / "run" / f"step-{reached:08d}", "run", reached)
        # Another run of that name does not mix its steps with these.
        other = self.folder / "other"
        other.mkdir()
        shutil.move(self.folder / "run", other / "run")
        (self.folder / "run" / "checkpoints").mkdir(parents=True)
        shutil.copytree(self.checkpoint("other/run", reached), self.checkpoint("run", reached))
        job = self.train(last, "run", code=2)
        self.assertIn("holds checkpoints of another run", job.output())

    def test_a_copy_under_way_to_a_place_that_is_no_longer_wanted_is_let_go(self):
        job = self.start(self.copies(f'"{self.folder / "far"}", max_mb_per_s = 0.01', steps=100000, save=20), "run")
        held = self.folder / "run" / "copying" / "0"
        self.until(lambda: list(held.glob("step-*")), "a checkpoint that is held", job)
        job.kill_group()
        self.assertTrue(list(held.glob("step-*/*.h5")))
        self.train(self.recipe(steps=self.last_step("run") + 5, tp=1, pp=1, dp=2, sp="false"), "run")
        self.assertFalse(held.exists())

    def test_a_place_that_is_gone_as_a_run_goes_on_is_not_made_anew(self):
        far = self.folder / "far"
        recipe = self.copies(f'"{far}", finish = 3', steps=10, save=5)
        self.train(recipe, "run")
        self.assertEqual(self.placed(far / "run"), [5, 10])
        os.rename(far, self.folder / "unmounted")
        far.mkdir()  # its mount point
        job = self.train(recipe, "run", "--set", "stop=T.steps(20)", *JUMP)
        self.assertIn("nothing is there any more of what was copied there; mount it", job.output())
        self.assertEqual(list(far.iterdir()), [])
        shutil.rmtree(self.folder / "run" / "checkpoints")
        self.assertIn("it is not known whether", self.train(recipe, "run", code=69).output())
        far.rmdir()
        os.rename(self.folder / "unmounted", far)
        job = self.train(recipe, "run", "--set", "stop=T.steps(20)")
        self.assertIn("no checkpoint here; bringing step 10", job.output())
        self.assertEqual(self.placed(far / "run"), [5, 10, 15, 20])

    def test_a_copied_folder_is_the_run_when_the_original_goes_before_it_started(self):
        far = self.folder / "far"
        recipe = self.copies(f'"{far}"', dp=1, steps=6, save=2)
        for disk in ("small", "large"):
            (self.folder / disk).mkdir()
        self.train(recipe, "small/run")
        held = self.run_id("small/run")
        shutil.copytree(self.folder / "small/run", self.folder / "large/run")
        more = ["--set", "stop=T.steps(8)", *JUMP]
        for _ in range(2):  # as long as the original is there the second place is the original's
            job = self.train(recipe, "large/run", *more, code=2)
            self.assertIn("holds checkpoints of another run", job.output())
            self.assertEqual(self.run_id("large/run"), held)
        shutil.rmtree(self.folder / "small")
        self.train(recipe, "large/run", *more)
        self.assertEqual(self.events("large/run", "start")[-1]["step"], 6)
        self.assertEqual(self.run_id("large/run"), held)
        self.assertEqual(self.placed(far / "run")[-1], 8)
        self.assert_copy(far / "run" / "step-00000008", "large/run", 8)
        # One that nothing refuses has an id of its own from its first start on.
        shutil.copytree(self.folder / "large/run", self.folder / "large/other")
        self.train(recipe, "large/other", *more)
        self.assertNotEqual(self.run_id("large/other"), held)

    def test_an_object_store_as_a_second_place(self):
        try:
            store = object_store.Store(self.folder / "store")
        except object_store.Missing as missing:
            self.skipTest(str(missing))
        self.addCleanup(store.close)
        proxy = object_store.Proxy(store)
        self.addCleanup(proxy.close)
        for name, value in store.environment(proxy.endpoint).items():
            if name.startswith("AWS_"):
                self.addCleanup(os.environ.pop, name, None)
                os.environ[name] = value
        place = f'"s3://{store.bucket}/runs", keep_last = 1, timeout = 5'
        recipe = self.copies(place, steps=20, save=5)
        proxy.decide = lambda *request: "refuse"
        job = self.train(recipe, "run", code=69)  # is this the lost node of a run? Nobody can say
        self.assertIn("it is not known whether s3://", job.output())
        self.assertIn("SlowDown", job.output())
        refusals = [3]

        def flaky(method, path, head):
            if method == "PUT" and refusals[0] > 0:
                refusals[0] -= 1
                return "reset"

        proxy.decide = flaky
        job = self.train(recipe, "run")
        names = {key.split("/", 2)[2] for key in store.keys("runs/run/step-")}
        self.assertEqual(names, {f"step-00000020/{p.name}" for p in self.checkpoint("run", 20).iterdir()})
        for path in self.checkpoint("run", 20).iterdir():
            self.assertEqual(store.get(f"runs/run/step-00000020/{path.name}"), path.read_bytes())
        self.assertNotIn(store.secret, job.output() + (self.folder / "run" / "logs" / "copy-0.log").read_text())
        self.assertNotIn(store.secret, (self.folder / "run" / "recipe.resolved.json").read_text())
        before = self.contents("run", 20)[1]
        shutil.rmtree(self.folder / "run")
        job = self.train(self.copies(place, steps=30, save=5), "run", *JUMP)
        self.assertEqual(self.events("run", "start")[0]["step"], 20)
        self.assertEqual(self.contents("run", 20)[1], before)
        self.assertTrue(any(key.startswith("runs/run/step-00000030/manifest") for key in store.keys("runs/run")))


if __name__ == "__main__":
    main()
