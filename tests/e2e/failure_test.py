"""What can go wrong while training: a full disk, data that vanish, ranks that hang. Never a hang, always a culprit."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time

from harness import PATIENCE_S, RunTest, main


class Failure(RunTest):
    def setenv(self, name, value):
        """For what is started from here on."""
        os.environ[name] = str(value)
        self.addCleanup(os.environ.pop, name)

    def mount_small_disk(self, path, size):
        path.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
        if done.returncode != 0:
            self.skipTest(f"mount is refused: {done.stderr.decode().strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", path], check=True)

    def test_a_full_disk_costs_a_checkpoint_and_nothing_else(self):
        recipe = self.recipe(name="long", steps=100000, tp=1, pp=1, dp=2, sp="false", save=50, keep=2)
        folder = self.folder / "run" / "checkpoints"
        self.mount_small_disk(folder, "8m")
        job = self.start(recipe, "run")
        first = self.until(lambda: self.events("run", "saved"), "the first save", job)[0]["step"]
        ballast = folder / "ballast"
        with open(ballast, "wb", buffering=0) as f:  # a buffer that cannot be written would fail again when closed
            try:
                while True:
                    f.write(bytes(16384))
            except OSError:
                pass
        failed = self.until(lambda: self.events("run", "save_failed"), "a failed save", job)
        self.assertRegex(failed[0]["message"], "bytes free, step|No space left")
        self.assertIn("the next save tries again", job.output())
        kept = self.checkpoints("run")
        self.assertTrue(kept and kept[0] >= first)
        self.contents("run", kept[-1])
        at = self.last_step("run")
        self.until_step("run", at + 20, job)
        ballast.unlink()
        saved = lambda: [e for e in self.events("run", "saved") if e["step"] > at]
        self.until(saved, "a save after space is free again", job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        self.assertEqual(self.checkpoints("run")[-1], self.last_step("run"))
        self.assertEqual([p.name for p in folder.iterdir() if not p.name.startswith("step-")], ["labels.json"])

    def test_a_checkpoint_that_cannot_be_removed_is_told_once(self):
        recipe = self.recipe(name="long", steps=100000, tp=1, pp=1, dp=1, zero=0, sp="false", save=20, keep=1)
        job = self.start(recipe, "run")
        first = self.until(lambda: self.checkpoints("run"), "the first save", job)[0]
        stays = self.checkpoint("run", first)
        done = subprocess.run(["mount", "--bind", stays, stays], capture_output=True)  # its name is taken for good
        if done.returncode != 0:
            job.kill_group()
            self.skipTest(f"mount is refused: {done.stderr.decode().strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", stays], check=True)
        at = len(self.events("run", "saved"))
        self.until(lambda: len(self.events("run", "saved")) >= at + 4, "four saves more", job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)
        self.assertIn(first, self.checkpoints("run"))
        told = [line for line in job.output().splitlines() if "Device or resource busy" in line]
        self.assertEqual(len(told), 1, job.output())
        self.assertIn(f"warning: retention: step {first}: ", told[0])

    def test_an_older_save_that_fails_behind_the_last_one_costs_nothing(self):
        recipe = self.recipe(name="short", steps=6, tp=1, pp=1, dp=1, zero=0, sp="false", save=5)
        looks = "stat,lstat,newfstatat"  # whether the step is there already
        fault = [shutil.which("strace"), "-f", "-o", "/dev/null", "-e", f"trace={looks}", "-e",
                 f"inject={looks}:error=EIO:delay_enter=5000000"]  # microseconds
        if fault[0] is None or subprocess.run([fault[0], "-o", "/dev/null", "true"], capture_output=True).returncode != 0:
            self.skipTest("no strace")
        for run, how in (("run", "continue"), ("stop", "stop")):
            with self.subTest(how):
                done = subprocess.run([*fault, "-P", self.checkpoint(run, 5), self.program, "train", recipe, "--run", self.folder / run, "--threads", "1",
                                       "--set", "checkpoint.in_flight=2", "--set", f"checkpoint.on_failure={how}"],
                                      cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                      timeout=PATIENCE_S)
                said = done.stdout + done.stderr
                self.assertEqual(done.returncode, 0, said)
                self.assertRegex(said, "warning: step 5 was not saved: .*Input/output error; step 6 is on disk")
                self.assertRegex(said, f"done: 6 steps .*{self.checkpoint(run, 6)}")
                self.assertEqual([e["step"] for e in self.events(run, "save_failed")], [5])
                self.assertEqual(self.checkpoints(run), [6])
                self.assertEqual(self.memory_left(self.folder), [])

    def test_a_disk_full_at_the_end_keeps_the_state_in_memory(self):
        recipe = self.recipe(name="short", steps=30, tp=1, pp=1, dp=2, sp="false", save=1000)
        folder = self.folder / "run" / "checkpoints"
        self.mount_small_disk(folder, "128k")
        job = self.train(recipe, "run", code=74)  # told before the first step
        self.assertRegex(job.output(), "checkpoints: 1 kept [+] 1 being written, .* are free: .* are missing")
        self.assertEqual(self.metrics("run"), {})
        recipe.write_text(recipe.read_text().replace("T.checkpoint {", 'T.checkpoint { space = "warn",'))
        job = self.train(recipe, "run", code=74)
        self.assertIn("step 30 was not saved", job.output())
        self.assertEqual(len(self.memory_left(self.folder)), 1)
        again = self.train(recipe, "run", code=74)  # still no space: still nothing lost
        self.assertIn("took over the snapshot memory of this run", again.output())
        self.assertEqual(len(self.memory_left(self.folder)), 1)
        subprocess.run(["mount", "-o", "remount,size=8m", folder], check=True)
        last = self.train(recipe, "run")
        self.assertIn("saved step 30 from shared memory", last.output())
        self.assertEqual(self.checkpoints("run"), [30])
        self.assertEqual(self.memory_left(self.folder), [])

    def test_a_limit_of_file_sizes_is_told_by_the_file_that_met_it(self):
        recipe = self.recipe(name="short", steps=9, tp=1, pp=1, dp=1, zero=0, sp="false", save=1000)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))  # as `ulimit -f`; memory is a file, too
        job = self.train(recipe, "run", code=74)
        self.assertRegex(job.output(), "snapshot memory .*/dev/shm/cairn-.*: File too large")
        self.assertEqual(self.memory_left(self.folder), [])
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.train(recipe, "run")

    def test_data_that_vanish_end_the_run_with_their_name(self):
        recipe = self.recipe(name="long", steps=100000, save=100000)
        job = self.start(recipe, "run", "--set", "restart.backoff=0")
        self.until_step("run", 6, job)  # told by rank 0; the others may still be publishing it, but not the one before
        os.truncate(self.folder / "tokens.bin", 64)
        code = job.wait()
        self.assertIn(code, (65, 69, 74), job.output())
        failures = self.events("run", "failure")
        self.assertIn("tokens.bin", failures[0]["message"])
        self.assertIn("tokens.bin", self.events("run", "end")[-1]["message"])
        self.assertLessEqual(len(failures), 4)  # three restarts in a row at most
        # What was reached is on disk.
        self.assertEqual(len(self.checkpoints("run")), 1)
        self.assertGreaterEqual(self.checkpoints("run")[0], 5)
        self.assertEqual(self.memory_left(self.folder), [])

    def test_a_rank_that_always_dies_is_given_up(self):
        recipe = self.recipe(name="long", steps=100000, save=100000)
        log = self.folder / "termination-log"
        log.touch()
        self.setenv("CAIRN_TERMINATION_LOG", log)
        self.setenv("TORCHELASTIC_ERROR_FILE", self.folder / "elastic.json")
        # A rank killed again and again before it gets anywhere.
        job = self.start(recipe, "run", "--set", "restart.max_restarts=2", "--set", "restart.backoff=0.1")
        killed = set()
        while job.process.poll() is None:
            ranks = job.children()
            if ranks.get(3) and ranks[3] not in killed:
                killed.add(ranks[3])
                try:
                    os.kill(ranks[3], signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.001)
        self.finish(job, 128 + signal.SIGKILL)
        self.assertEqual(len(self.events("run", "failure")), 3)
        self.assertIn("given up after 2 restarts in a row", job.output())
        self.assertIn("rank 3", self.events("run", "failure")[0]["message"])
        self.assertEqual(self.events("run", "end")[-1]["class"], "killed")
        record = json.loads((self.folder / "run" / "failure.json").read_text())
        self.assertEqual([record[key] for key in ("rank", "class", "exit", "restarting", "generation")],
                         [3, "killed", 137, False, 2])
        self.assertLess(abs(record["first_seen"] - time.time()), 60)
        self.assertIn("killed on ", log.read_text())
        told = json.loads((self.folder / "elastic.json").read_text())["message"]
        self.assertEqual(told["errorCode"], 137)
        self.assertIn("was killed by signal 9", told["message"])
        report = self.cairn("report", self.folder / "run").stdout.decode()
        self.assertRegex(report, r"failures       3: killed by hand, or evicted on \S+ \(3\)")
        self.assertEqual(self.memory_left(self.folder), [])

    def test_a_stopped_rank_is_named_and_the_run_goes_on(self):
        recipe = self.recipe(name="long", steps=100000, save=100000)
        job = self.start(recipe, "run", "--set", "restart.deadline=2")
        self.until_step("run", 5, job)
        for rank in (2, 0):
            before = len(self.events("run", "failure"))
            at = self.last_step("run")
            begin = time.monotonic()
            os.kill(self.until(lambda: job.children().get(rank), f"rank {rank}", job), signal.SIGSTOP)
            failure = self.until(lambda: self.events("run", "failure")[before:], "the deadline", job)[0]
            took = time.monotonic() - begin
            self.assertRegex(failure["message"], f"^rank {rank} .* is stopped")
            self.assertEqual(failure["class"], "hang")
            self.assertLess(took, 60)  # deadline 2 s, the agent's own check 4 s; the rest is for a loaded machine
            print(f"rank {rank} stopped: reported after {took:.1f} s: {failure['message']}")
            self.until_step("run", at + 5, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)


if __name__ == "__main__":
    main()
