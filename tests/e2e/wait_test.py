"""Ranks that keep others waiting: found, named first, with the stacks of all, before anybody gives up."""

import contextlib
import os
import pathlib
import re
import signal
import time

from harness import RunTest, main

DEADLINE_S = 6


class Wait(RunTest):
    run_name = "run"

    def long_run(self, **layout):
        recipe = self.recipe(name="long", steps=1000000, save=1000000, **layout)
        job = self.start(recipe, self.run_name, "--set", f"restart.deadline={DEADLINE_S}")
        self.until_step(self.run_name, 3, job)
        return job

    def stop_and_read(self, job, rank):
        """Stops the rank; the report of the wait, and that of the failure that follows."""
        before = len(self.events(self.run_name, "wait")), len(self.events(self.run_name, "failure"))
        pid = job.children()[rank]
        os.kill(pid, signal.SIGSTOP)
        wait = self.until(lambda: self.events(self.run_name, "wait")[before[0]:], "the wait to be told", job)[0]
        self.assertEqual(wait["culprits"], [rank])
        self.assertIn("is stopped (state T)", wait["reason"])
        self.assertLess(wait["waited_ms"], 1000 * DEADLINE_S * 10)
        failure = self.until(lambda: self.events(self.run_name, "failure")[before[1]:], "the failure", job)[0]
        self.assertRegex(failure["message"], f"^rank {rank} .*stopped")
        self.assertEqual(failure["report"], wait["report"])  # one report, completed
        return pid, pathlib.Path(wait["report"]).read_text()

    def check_report(self, report, rank, pid, world):
        heads = re.findall(r"^rank (\d+) \(pid \d+\), state (.): (.*)$", report, re.M)
        self.assertEqual([int(h[0]) for h in heads][0], rank, report)
        self.assertEqual(sorted(int(h[0]) for h in heads), list(range(world)))
        self.assertEqual(heads[0][1], "T")
        waiting = [h for h in heads[1:] if re.match("in |.*; beside it in ", h[2])]  # its own thread, or the other one
        self.assertTrue(waiting, report)
        for head in waiting:
            self.assertRegex(head[2], r"in (tp|dp|pp|pp back|world|embedding)\[[\d,]+\]\.\w+\(.+\), entered \d+ ms ago")
            self.assertRegex(head[2], r", at step \d+ \(.+\)")
        if "no stacks: attaching is refused" in report:
            self.skipTest("tracing is not permitted here")
        # Of every rank, with functions of ours by name. The culprit cannot leave; on a machine that stands still between
        # the reading and the deadline, others may have left, and the report says so.
        parts = re.split(r"\nrank \d+ \(pid \d+\), state ", report)[1:]
        for number, part in enumerate(parts):
            if number == 0 or "no stacks: its maps cannot be read" not in part:
                self.assertIn("#0 ", part)
                self.assertIn("cairn::", part)
        left = sum("no stacks:" in part for part in parts)
        print(f"stacks of {world - left} of {world} ranks")
        self.assertIn("is stopped (state T)", report)

    def test_a_rank_that_is_stopped_in_each_kind_of_group(self):
        for layout in (dict(tp=2, pp=1, dp=1), dict(tp=1, pp=2, dp=1, sp="false"), dict(tp=1, pp=1, dp=2, sp="false")):
            with self.subTest(**layout):
                self.run_name = "-".join(f"{k}{v}" for k, v in layout.items())
                job = self.long_run(**layout)
                pid, report = self.stop_and_read(job, 1)
                self.check_report(report, 1, pid, 2)
                job.signal(signal.SIGKILL)
                job.wait()

    def test_behind_a_chain_of_waits_the_stopped_rank_is_found_and_the_run_goes_on(self):
        job = self.long_run()
        at = self.last_step(self.run_name)
        pid, report = self.stop_and_read(job, 5)
        self.check_report(report, 5, pid, 8)
        self.until_step(self.run_name, at + 3, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)

    def test_a_slow_rank_is_told_and_nothing_fails(self):
        job = self.long_run(tp=1, pp=1, dp=2, sp="false")
        pid = job.children()[1]
        os.kill(pid, signal.SIGSTOP)
        wait = self.until(lambda: self.events(self.run_name, "wait"), "the wait to be told", job)[0]
        os.kill(pid, signal.SIGCONT)
        self.assertEqual(wait["culprits"], [1])
        at = self.last_step(self.run_name)
        try:
            self.until(lambda: self.events(self.run_name, "wait_over"), "the end of the wait", job)
        except AssertionError:
            if self.events(self.run_name, "failure"):
                self.skipTest("this machine stood still past the deadline")
            raise
        self.until_step(self.run_name, at + 3, job)
        self.assertIn("stacks of all ranks:", job.output())
        job.signal(signal.SIGTERM)
        self.finish(job, 0)

    def test_a_wait_that_is_over_while_its_stacks_are_read_is_not_blamed_for_the_next(self):
        recipe = self.recipe(name="long", steps=1000000, save=1000000, tp=1, pp=1, dp=4, sp="false")
        job = self.start(recipe, self.run_name, "--set", f"restart.deadline={DEADLINE_S}")
        late = self.until(lambda: job.children().get(2), "rank 2", job)
        os.kill(late, signal.SIGSTOP)

        def reader():
            for pid in pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if b"_stacks" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
            return None

        os.kill(self.until(reader, "the stacks to be read", job), signal.SIGSTOP)  # slow: the agent has patience
        os.kill(late, signal.SIGCONT)
        self.until_step(self.run_name, 3, job)
        if self.events(self.run_name, "failure"):
            self.skipTest("this machine stood still past the deadline")
        os.kill(job.children()[0], signal.SIGSTOP)
        failure = self.until(lambda: self.events(self.run_name, "failure"), "the deadline", job)[0]
        self.assertRegex(failure["message"], "^rank 0 .*stopped")
        job.kill_group()

    def test_the_report_of_a_killed_rank_says_where_all_were(self):
        job = self.long_run(tp=2, pp=1, dp=2)
        at = self.last_step(self.run_name)
        begin = time.monotonic()
        os.kill(job.children()[2], signal.SIGKILL)
        failure = self.until(lambda: self.events(self.run_name, "failure"), "the failure", job)[0]
        self.assertRegex(failure["message"], "^rank 2 .* was killed by signal 9")
        report = pathlib.Path(failure["report"]).read_text()
        heads = re.findall(r"^rank (\d+) \(pid \d+\), state", report, re.M)
        self.assertEqual(heads[0], "2")
        self.assertEqual(len(heads), 4)
        self.assertIn(failure["message"], report)
        print(f"killed rank: reported after {time.monotonic() - begin:.2f} s")
        self.until_step(self.run_name, at + 3, job)
        job.signal(signal.SIGTERM)
        self.finish(job, 0)

    def test_a_report_that_cannot_be_written_is_told_with_the_reason_and_never_named(self):
        (self.folder / self.run_name).mkdir()
        (self.folder / self.run_name / "reports").write_text("no folder\n")
        job = self.long_run(tp=1, pp=1, dp=2, sp="false")
        os.kill(job.children()[1], signal.SIGSTOP)
        wait = self.until(lambda: self.events(self.run_name, "wait"), "the wait to be told", job)[0]
        failure = self.until(lambda: self.events(self.run_name, "failure"), "the failure", job)[0]
        job.kill_group()
        self.assertEqual((wait["report"], failure["report"]), ("", ""))
        told = [line for line in job.output().splitlines() if "report could not be written" in line]
        self.assertEqual(len(told), 1, job.output())
        self.assertRegex(told[0], "warning: .*run/reports: (Not a directory|File exists)")
        self.assertNotIn("reports/step-", job.output())
        self.assertNotIn("stacks of all ranks:", job.output())


if __name__ == "__main__":
    main()
