"""Stopping on request, refusing a second agent, and the exit codes that schedulers read."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

from harness import JUMP, PATIENCE_S, Job, RunTest, main

STEPS = 150


class Stop(RunTest):
    def test_a_signal_saves_at_the_next_step_and_the_next_start_goes_on(self):
        recipe = self.recipe(steps=STEPS, save=1000)
        self.train(recipe, "whole")
        for number, word in ((signal.SIGTERM, "asked to stop"), (signal.SIGINT, "interrupted")):
            with self.subTest(signal=number.name):
                run = f"cut-{number.name}"
                job = self.start(recipe, run)
                self.until_step(run, 5, job)
                job.signal(number)
                self.finish(job, 0)
                reached = self.last_step(run)
                self.assertLess(reached, STEPS, "stopped too late to prove anything")
                self.assertIn(word, job.output())
                self.assertIn(f"stopped after step {reached} of {STEPS}", job.output())
                self.assertEqual(self.checkpoints(run), [reached])
                self.assertEqual(self.memory_left(self.folder), [])
                self.train(recipe, run)
                self.assertEqual(self.events(run, "start")[-1]["step"], reached)
                self.assert_same_training(run, "whole", STEPS)

    def test_signals_that_schedulers_and_wrappers_send_besides_do_not_cost_the_save(self):
        recipe = self.recipe(steps=STEPS, save=1000)
        for name, first, apart_s, second in (("LSF", signal.SIGINT, 1.3, signal.SIGTERM),
                                             ("a wrapper and its group", signal.SIGINT, 0.05, signal.SIGTERM),
                                             ("Slurm", signal.SIGTERM, 1.3, signal.SIGTERM),
                                             ("a group twice", signal.SIGINT, 0.05, signal.SIGINT)):
            with self.subTest(name):
                run = name.replace(" ", "-")
                job = self.start(recipe, run)
                self.until_step(run, 5, job)
                # With a stopped rank the save cannot have come before the second signal.
                for pid in job.children().values():
                    os.kill(pid, signal.SIGSTOP)
                job.signal(first)
                self.until(lambda: self.events(run, "stop_requested"), "the first signal", job)
                time.sleep(apart_s)
                job.signal(second)
                time.sleep(0.1)
                for pid in job.children().values():
                    os.kill(pid, signal.SIGCONT)
                self.finish(job, 0)
                self.assertEqual(self.checkpoints(run), [self.last_step(run)])
                self.assertLess(self.last_step(run), STEPS)

    def test_a_second_ctrl_c_leaves_at_once_and_memory_keeps_the_steps(self):
        recipe = self.recipe(steps=STEPS, save=1000)
        self.train(recipe, "whole")
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(signal=number.name):
                run = f"cut-{number.name}"
                job = self.start(recipe, run)
                self.until_step(run, 5, job)
                # A stopped rank cannot reach the next step boundary: the first signal alone would wait.
                for pid in job.children().values():
                    os.kill(pid, signal.SIGSTOP)
                job.signal(number)
                self.until(lambda: self.events(run, "stop_requested"), "the first signal", job)
                time.sleep(1.3)
                job.signal(signal.SIGINT)
                self.finish(job, 128 + signal.SIGINT)
                self.assertIn("left at once", job.output())
                self.assertEqual(self.checkpoints(run), [])
                self.assertEqual(len(self.memory_left(self.folder)), 1)
                second = self.train(recipe, run)
                self.assertIn("took over the snapshot memory of this run", second.output())
                self.assert_same_training(run, "whole", STEPS)
                self.assertEqual(self.memory_left(self.folder), [])

    def test_the_newest_step_in_memory_is_saved_when_the_boundary_is_long_in_coming(self):
        recipe = self.recipe(steps=100000, save=100000)
        job = self.start(recipe, "run")
        reached = self.until_step("run", 5, job)
        for pid in job.children().values():
            os.kill(pid, signal.SIGSTOP)
        job.signal(signal.SIGTERM)
        saved = self.until(lambda: self.events("run", "saved"), "the save", job)[0]
        took = saved["time"] - self.events("run", "stop_requested")[0]["time"]
        self.assertTrue(4.9 < took < 60, took)
        self.assertGreaterEqual(saved["step"], reached - 1)
        self.assertIn(f"no step boundary in 5 s: saving step {saved['step']}, the newest in memory", job.output())
        self.assertEqual(self.checkpoints("run"), [saved["step"]])
        for pid in job.children().values():
            os.kill(pid, signal.SIGCONT)
        self.finish(job, 0)
        self.assertEqual([e["step"] for e in self.events("run", "saved")], [saved["step"], self.last_step("run")])
        self.assertGreater(self.last_step("run"), saved["step"])
        self.assertEqual(self.checkpoints("run"), [saved["step"], self.last_step("run")])

    def slowed(self, call, delay_s, *train, path=()):
        """An agent of which each such system call (on that path) takes a while, under strace; it and its own pid."""
        strace = shutil.which("strace")
        if strace is None or subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode != 0:
            self.skipTest("no strace")
        job = Job(strace, ["-f", "-o", "/dev/null", *path, "-e", f"trace={call}", "-e",
                           f"inject={call}:delay_enter={int(delay_s * 1e6)}", self.program, "train", *train,
                           "--threads", 1, "--set", "checkpoint.direct_io=false"], self.folder / "slow.out", self.folder)
        self.jobs.append(job)
        task = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children")

        def agent():
            for pid in task.read_text().split():
                with contextlib.suppress(OSError):
                    if pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().startswith(os.fsencode(self.program) + b"\0"):
                        return int(pid)
            return None

        return job, self.until(agent, "the agent", job)

    def test_signals_while_the_recipe_is_read_wait_for_the_run(self):
        recipe = self.recipe(name="two", steps=400, tp=1, pp=1, dp=2, sp="false", save=1000)
        job, agent = self.slowed("openat", 2, recipe, "--run", self.folder / "run", path=("-P", recipe))
        self.until(lambda: self.holds(agent), "the first lines of main()", job)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            os.kill(agent, number)
        time.sleep(0.2)
        self.assertFalse((self.folder / "run").exists(), "too late to prove anything")
        self.finish(job, 0)
        self.assertEqual({e["by"] for e in self.events("run", "save_requested")}, {"SIGUSR1", "SIGUSR2"})
        self.assertIn("SIGQUIT: ", job.output())
        self.assertGreater(len(self.checkpoints("run")), 1)
        self.assertEqual(self.checkpoints("run")[-1], 400)

    def test_a_load_ends_at_a_signal(self):
        recipe = self.recipe(name="two", steps=10, tp=1, pp=1, dp=2, sp="false", save=5)
        self.train(recipe, "run")
        files = [f for path in self.checkpoint("run", 10).glob("*.h5") for f in ("-P", path)]
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(number.name):
                job, agent = self.slowed("pread64", 3, recipe, "--run", self.folder / "run", "--set", "stop=T.steps(20)",
                                         *JUMP, path=files)
                self.until(lambda: "run folder" in job.output(), "the start", job)
                time.sleep(2)  # in a read, which may end
                os.kill(agent, number)
                self.finish(job, 75)
                self.assertIn("asked to stop while a checkpoint was being loaded", job.output())
                self.assertEqual(len(self.events("run", "start")), 1)  # no rank was started
                self.assertEqual(self.memory_left(self.folder), [])
        self.train(recipe, "run", "--set", "stop=T.steps(20)", *JUMP)
        self.assertEqual(self.events("run", "start")[-1]["step"], 10)

    def test_the_save_after_a_failure_is_given_up_by_a_second_ctrl_c(self):
        recipe = self.recipe(name="two", steps=100000, tp=1, pp=1, dp=2, sp="false", save=100000)
        job, agent = self.slowed("pwrite64", 3, recipe, "--run", self.folder / "run", "--kill", "1@5", "--set",
                                 "restart.max_restarts=0")
        self.until(lambda: self.events("run", "failure"), "the failure", job)
        os.kill(agent, signal.SIGTERM)
        time.sleep(1.3)
        os.kill(agent, signal.SIGTERM)
        time.sleep(0.3)
        self.assertIsNone(job.process.poll())
        os.kill(agent, signal.SIGINT)
        self.finish(job, 128 + signal.SIGINT)
        self.assertIn("left at once", job.output())
        self.assertEqual(self.checkpoints("run"), [])
        self.assertEqual(len(self.memory_left(self.folder)), 1)
        job = self.start(recipe, "run")
        self.until(lambda: len(self.events("run", "start")) == 2, "the next start", job)
        # Another recipe, by what `slowed` sets: written first, and gone on from there.
        step = self.events("run", "start")[-1]["step"]
        self.assertGreaterEqual(step, 4)
        self.assertIn(f"wrote step {step} from the snapshot memory of this run's dead agent", job.output())
        job.signal(signal.SIGTERM)
        self.finish(job, 0)

    def test_one_run_folder_has_one_agent(self):
        recipe = self.recipe(steps=100000, save=1000)
        job = self.start(recipe, "run")
        self.until_step("run", 2, job)
        second = subprocess.run([self.program, "train", recipe, "--run", self.folder / "run"], timeout=PATIENCE_S,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(second.returncode, 73, second.stdout)
        self.assertRegex(second.stdout, rf"is in use by another cairn \(pid {job.pid} on {re.escape(socket.gethostname())}, "
                                        r"since [\d-]+ [\d:]+ UTC\); one run folder, one run\n")
        before = self.last_step("run")
        self.until_step("run", before + 3, job)  # the first one did not notice
        job.signal(signal.SIGTERM)
        self.finish(job, 0)

    def test_a_run_that_another_agent_has_taken_is_left_to_it(self):
        recipe = self.recipe(name="long", steps=100000, save=50, keep=2)
        last = self.recipe(name="last", steps=60, save=1000)
        taken = json.dumps({"host": "far", "pid": 7, "since": "2026-11-25 01:02:03 UTC", "token": "0"}) + "\n"
        for run, content, wanted in (("taken", taken, "another one has taken it (pid 7 on far, since 2026-11-25 01:02:03 UTC)"),
                                     ("removed", None, "its run.lock was removed"), ("at-the-end", taken, "pid 7 on far")):
            with self.subTest(run):
                job = self.start(last if run == "at-the-end" else recipe, run)
                if run == "at-the-end":
                    self.until_step(run, 2, job)
                else:
                    self.until(lambda: len(self.events(run, "saved")) >= 3, "three saves", job)  # and retention is at work
                lock, checkpoints = self.folder / run / "run.lock", self.folder / run / "checkpoints"
                if content:
                    lock.write_text(content)
                else:
                    lock.unlink()
                before = sorted(os.listdir(checkpoints))
                self.finish(job, 69)
                self.assertEqual(sorted(os.listdir(checkpoints)), before)
                self.assertEqual(lock.read_text() if content else lock.exists(), content or False)
                self.assertIn(f"{self.folder / run} is not this cairn's any more: ", job.output())
                self.assertIn(wanted, job.output())
                for kind in ("failure", "save_failed", "end"):
                    self.assertEqual(self.events(run, kind), [])
                self.assertEqual(len(self.events(run, "start")), 1)
                self.assertEqual(job.children(), {})
        self.assertEqual(len(self.memory_left(self.folder)), 3)  # for a start of the run here

    def test_two_runs_side_by_side_leave_each_other_alone_and_what_a_dead_one_would_lose(self):
        recipe = self.recipe(name="long", steps=100000, tp=1, pp=1, dp=2, sp="false", save=100000)
        dead = self.start(recipe, "dead")
        self.until_step("dead", 2, dead)
        dead.kill_group()
        reached = self.last_step("dead")
        left = self.memory_left(self.folder)
        self.assertEqual(len(left), 1)
        live = self.start(recipe, "live")
        self.until_step("live", 2, live)
        told = f"{left[0]} of a dead run, {self.run_id('dead')}, still holds step (\\d+), which no"
        self.assertRegex(live.output(), told)
        held = int(re.search(told, live.output())[1])
        mine = self.memory_left(self.folder)
        self.assertEqual(len(mine), 2)
        short = self.recipe(name="short", steps=10, tp=1, pp=1, dp=2, sp="false")
        self.train(short, "other")
        self.assertEqual(self.memory_left(self.folder), mine)
        rank = live.children()[1]
        os.kill(rank, signal.SIGKILL)  # its memory must still be good for a recovery
        self.until(lambda: self.events("live", "recovered"), "the recovery", live)
        self.assertIn("shared memory", self.events("live", "start")[-1]["from"])
        live.signal(signal.SIGTERM)
        self.finish(live, 0)
        again = self.start(recipe, "dead")
        self.until(lambda: len(self.events("dead", "start")) == 2, "the second start", again)
        self.assertIn("shared memory", self.events("dead", "start")[-1]["from"])
        # Rank 0 wrote its line of the last step when it had ended it itself; the other one may have been about to.
        self.assertGreaterEqual(held, reached - 1)
        self.assertEqual(self.events("dead", "start")[-1]["step"], held)
        again.signal(signal.SIGTERM)
        self.finish(again, 0)
        self.assertEqual(self.memory_left(self.folder), [])

    def test_refusals_have_their_codes(self):
        recipe = self.recipe(steps=10)
        self.train(recipe, "run", "--set", "batch.samples=7", code=2)
        for kill in ("9@1", "0@0", "-1@1", f"0@{(1 << 64) + 1}", "0@1x", "0", "nan@1"):
            self.train(recipe, "run", "--kill", kill, code=2)
        self.assertFalse((self.folder / "run" / "checkpoints").exists() and self.checkpoints("run"))
        self.train(recipe, "run")
        self.train(recipe, "run", "--fresh", code=2)
        again = self.train(recipe, "run")
        self.assertIn("nothing to do", again.output())
        missing = self.recipe(name="missing", prefix=self.folder / "nowhere")
        self.assertIn("nowhere", self.train(missing, "missing", code=2).output())


if __name__ == "__main__":
    main()
