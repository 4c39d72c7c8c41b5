"""What schedulers and people ask of a run under way: signals in every phase, files in its folder, the time limit."""

import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time

from harness import PATIENCE_S, Job, RunTest, main

TOLD = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


class Requests(RunTest):
    def long(self, name="long", steps=100000, **changes):
        """Two small ranks, that save at the end alone."""
        return self.recipe(name=name, steps=steps, tp=1, pp=1, dp=2, sp="false", zero=0, save=1000000, **changes)

    def begin(self, run="run", *extra, step=3, recipe=None):
        job = self.start(recipe or self.long(), run, *extra)
        self.until_step(run, step, job)
        return job

    def everybody(self, job, number):
        """As a scheduler that signals each process of a job."""
        os.killpg(job.pid, number)

    def stopped(self, job, run="run", code=0):
        self.finish(job, code)
        self.assertEqual(self.checkpoints(run)[-1], self.last_step(run))
        self.assertIn("stopped after step", job.output())

    def test_signals_that_ask_for_a_save_or_a_report_end_nothing(self):
        job = self.begin("run", "--set", "checkpoint.snapshot=T.unset", "--set", "checkpoint.save={}")
        ranks = job.children()
        for count, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), 1):
            self.everybody(job, number)
            saved = self.until(lambda: self.events("run", "saved")[count - 1:], f"the save of {number.name}", job)[0]
            self.assertTrue(saved["asked"])
            self.assertEqual(self.events("run", "save_requested")[-1]["by"], number.name)
            self.contents("run", saved["step"])  # complete
            self.until_step("run", saved["step"] + 3, job)
        self.everybody(job, signal.SIGQUIT)
        report = self.until(lambda: self.events("run", "report"), "the report", job)[0]
        text = pathlib.Path(report["report"]).read_text()
        self.assertIn("asked for by SIGQUIT", text)
        for pid in ranks.values():
            self.assertIn(f"pid {pid}", text)
        self.assertIn("#0 ", text)
        self.assertEqual(job.children(), ranks)
        self.assertEqual(self.events("run", "failure"), [])
        self.assertEqual(len(self.events("run", "saved")), 2)
        self.everybody(job, signal.SIGTERM)
        self.stopped(job)

    def test_signals_before_the_first_step_and_behind_the_last_end_nothing(self):
        recipe = self.recipe(name="short", steps=6, tp=1, pp=1, dp=2, sp="false", save=1000)
        job = self.start(recipe, "run", "--set", f'checkpoint.copy_to={{ T.place {{ path = "{self.folder}/far" }} }}')
        sent = 0
        end = time.monotonic() + PATIENCE_S
        while job.process.poll() is None and time.monotonic() < end:
            for number in TOLD:
                if self.holds(job.pid):  # from its first lines of main() on
                    os.killpg(job.pid, number)
                    sent += 1
            time.sleep(0.001)
        self.finish(job, 0)
        self.assertGreater(sent, 20)
        self.assertEqual(self.checkpoints("run")[-1], 6)
        self.assertEqual(self.events("run", "failure"), [])
        self.assertEqual(self.events("run", "copy_failed"), [])
        self.assertEqual(len(list((self.folder / "far" / "run").glob("step-*"))), len(self.checkpoints("run")))

    def test_signals_that_end_a_session_or_a_queue_stop_the_run_with_a_save(self):
        recipe = self.long()
        for number in (signal.SIGHUP, signal.SIGXCPU):
            with self.subTest(number.name):
                job = self.begin(number.name, recipe=recipe)
                self.everybody(job, number)
                self.stopped(job, number.name)
                self.assertEqual(self.events(number.name, "stop_requested")[0]["by"], number.name)
        with self.subTest("a stop of each"):
            job = self.begin("usr", "--on-usr", "stop", "--exit-when-unfinished", 85, recipe=recipe)
            self.everybody(job, signal.SIGUSR2)
            self.stopped(job, "usr", 85)
        with self.subTest("a limit of processor time, which ranks reach"):
            limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 60))
            job = self.started_with("cpu", recipe, limit)
            self.stopped(job, "cpu")
            self.assertEqual(self.events("cpu", "stop_requested")[0]["by"], "SIGXCPU")
            self.assertEqual(self.events("cpu", "failure"), [])
        # UCX is linked by way of Gloo and MPI on some distributions.
        for run, preload in (("nohup", {}), ("nohup-beside-ucx", {"LD_PRELOAD": os.environ["SIGNAL_TAKER"]})):
            with self.subTest(run):
                job = self.started_with(run, recipe, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), preload)
                step = self.until_step(run, 3, job)
                self.everybody(job, signal.SIGHUP)
                self.until_step(run, step + 20, job)
                self.assertEqual(self.events(run, "stop_requested"), [])
                rank = job.children()[0]
                os.kill(rank, signal.SIGSEGV)
                failure = self.until(lambda: self.events(run, "failure"), "the failure", job)[0]
                self.assertEqual(failure["rank"], 0)
                self.assertIn("killed by signal 11", failure["message"])
                job.signal(signal.SIGTERM)
                self.stopped(job, run)

    def started_with(self, run, recipe, prepare, environment=()):
        def both():
            os.setsid()
            prepare()
        job = Job.__new__(Job)
        job.log_path = self.folder / f"{run}.out"
        with open(job.log_path, "ab") as out:
            job.process = subprocess.Popen([self.program, "train", recipe, "--run", self.folder / run, "--threads", "1"],
                                           stdout=out, stderr=subprocess.STDOUT, cwd=self.folder,
                                           stdin=subprocess.DEVNULL, preexec_fn=both,
                                           env={**os.environ, **dict(environment)})
        job.pid = job.process.pid
        self.jobs.append(job)
        return job

    def test_files_ask_for_saves_and_stops(self):
        recipe = self.long()
        (self.folder / "run").mkdir()
        stop, save = self.folder / "run" / "stop", self.folder / "run" / "save"
        stop.touch()
        os.utime(stop, (1e9, 1e9))
        job = self.begin(recipe=recipe)
        self.assertFalse(stop.exists())
        self.assertIn("from before this start: not obeyed, removed", job.output())
        save.touch()
        self.until(lambda: not save.exists(), "the save that was asked for", job)
        self.assertEqual(len(self.checkpoints("run")), 1)
        self.until(lambda: self.events("run", "saved"), "the news of it", job)
        stop.write_text("later\n")
        self.until(lambda: "found `later`, expected" in job.output(), "the refusal", job)
        at = self.last_step("run") + 100000
        stop.write_text(f"{at}\n")
        self.until(lambda: self.events("run", "stop_planned"), "the plan", job)
        stop.unlink()
        self.until(lambda: self.events("run", "stop_taken_back"), "its end", job)
        stop.touch()
        self.stopped(job)
        self.assertFalse(stop.exists())
        self.assertEqual(self.events("run", "stop_requested")[0]["by"], "RUN/stop")
        reached = self.last_step("run")

        self.assertEqual(len([e for e in self.events("run", "saved") if e["step"] == reached]), 1)

    def test_a_stop_at_the_next_save_and_one_at_a_step_that_has_passed(self):
        recipe = self.long()
        for run, text in (("after", "after-save\n"), ("at", "2")):
            with self.subTest(text):
                job = self.begin(run, "--exit-when-unfinished", 75, recipe=recipe)
                folder = self.folder / run
                (folder / "stop").write_text(text)
                planned = self.until(lambda: self.events(run, "stop_planned"), "the plan", job)[0]
                if run == "after":
                    self.until_step(run, self.last_step(run) + 20, job)
                    (folder / "save").touch()
                self.stopped(job, run, 75)
                self.assertEqual(planned["at"], 2 if run == "at" else "after-save")
                self.assertEqual([name for name in ("stop", "save") if (folder / name).exists()], [])
                self.assertEqual(self.checkpoints(run), [self.last_step(run)])
                self.assertEqual(self.events(run, "end")[0]["exit_code"], 75)

    def test_a_stop_at_a_step_that_lies_ahead_is_at_that_step(self):
        job = self.begin(step=1)
        ranks = job.children().values()
        for pid in ranks:  # the agent looks for the file each second, in which they may make a thousand steps
            os.kill(pid, signal.SIGSTOP)
        at = self.last_step("run") + 800
        (self.folder / "run" / "stop").write_text(str(at))
        self.until(lambda: self.events("run", "stop_planned"), "the plan", job)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        self.stopped(job)
        self.assertEqual(self.last_step("run"), at)

    def test_the_time_limit_stops_the_run_in_time(self):
        recipe = self.long()
        environment = dict(os.environ)
        self.addCleanup(lambda: os.environ.clear() or os.environ.update(environment))
        begin = time.time()
        self.train(self.recipe(name="first", steps=8, tp=1, pp=1, dp=2, sp="false", zero=0), "first")
        limit = int(time.time() + 4 + 3 * (time.time() - begin))  # a start, also on a slow machine, and some steps
        os.environ["SLURM_JOB_END_TIME"] = str(limit)
        job = self.start(recipe, "slurm", "--exit-when-unfinished", 75)
        self.stopped(job, "slurm", 75)
        self.assertLess(self.events("slurm", "stop_requested")[0]["time"], limit + 2)
        self.assertEqual(self.events("slurm", "time_limit")[0]["by"], "SLURM_JOB_END_TIME")
        self.assertTrue(self.events("slurm", "stop_requested")[0]["by"].startswith("SLURM_JOB_END_TIME: "))
        self.assertIn("by SLURM_JOB_END_TIME; the run saves and stops before", job.output())
        os.environ["SLURM_JOB_END_TIME"] = "in an hour"
        begin = time.time()
        job = self.start(recipe, "option", "--time-limit", "1s200ms")
        self.stopped(job, "option")
        self.assertLess(time.time() - begin, 90)
        self.assertEqual(self.events("option", "time_limit")[0]["by"], "--time-limit")
        short = self.recipe(name="short", steps=8, tp=1, pp=1, dp=1, zero=0, sp="false")
        job = self.train(short, "short", "--exit-when-unfinished", 75)  # nothing is left to do: 0
        self.assertIn("SLURM_JOB_END_TIME is `in an hour`, expected seconds of Unix time", job.output())
        os.environ["SLURM_JOB_END_TIME"] = str(int(begin - 100))
        self.assertIn("which is over", self.train(short, "again").output())
        self.assertNotIn("SLURM", self.train(short, "none", "--time-limit", "none").output())
        for option, value in (("--time-limit", "soon"), ("--time-limit", "0"), ("--time-limit", "30min1h"),
                              ("--exit-when-unfinished", "0"), ("--exit-when-unfinished", "126"), ("--on-usr", "die")):
            self.assertIn(option, self.train(short, "refused", f"{option}={value}", code=2).output())

    def test_a_last_save_that_is_refused_has_the_code_of_a_disk_that_failed(self):
        dropped = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        if dropped and (shutil.which(dropped[0]) is None or subprocess.run([*dropped, "true"]).returncode != 0):
            self.skipTest("root's rights cannot be dropped")
        recipe = self.long()
        job = Job([*dropped, self.program][0], [*[*dropped, self.program][1:], "train", recipe, "--run",
                                                self.folder / "run", "--threads", 1], self.folder / "run.out", self.folder)
        self.jobs.append(job)
        self.until_step("run", 3, job)
        folder = self.folder / "run" / "checkpoints"
        folder.chmod(0o555)
        self.addCleanup(folder.chmod, 0o755)
        os.killpg(job.pid, signal.SIGUSR1)
        self.until(lambda: self.events("run", "save_failed"), "the save that fails", job)
        step = self.last_step("run")
        self.until_step("run", step + 3, job)  # which ends nothing
        job.signal(signal.SIGTERM)
        self.finish(job, 74)
        self.assertIn("Permission denied", job.output())
        self.assertEqual(self.events("run", "end")[-1]["exit_code"], 74)
        self.assertEqual(len(self.memory_left(self.folder)), 1)
        folder.chmod(0o755)
        again = self.start(recipe, "run")
        self.until(lambda: len(self.events("run", "start")) == 2, "the next start", again)
        self.assertIn("shared memory", self.events("run", "start")[-1]["from"])
        again.signal(signal.SIGTERM)
        self.finish(again, 0)


if __name__ == "__main__":
    main()
