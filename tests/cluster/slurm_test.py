"""A real Slurm (slurm-up) over hosts of their own starts the run: what srun says is found, launches that cannot work are
refused with what to change, and a signal to the job saves on all hosts."""

import os
import shutil
import subprocess
import time

import train_test
from bed import HOSTS, main
from train_test import PROGRAM, STEPS, TrainBed


class Slurm(TrainBed):
    def setUp(self):
        if shutil.which("slurmctld") is None:
            (self.fail if os.environ.get("CI") == "true" else self.skipTest)(
                "slurmctld: not installed (tools/setup cluster)")
        super().setUp()
        self.slurm("slurm-up")
        self.addCleanup(self.slurm, "slurm-down")

    def slurm(self, script, *words):
        done = subprocess.run([HOSTS.parent / script, *words], env=self.environment, capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(done.returncode, 0, f"{script}: {done.stdout}{done.stderr}")

    def on_h0(self, *command, seconds=150, code=0):
        done = subprocess.run([HOSTS, "run", "h0", "timeout", str(seconds), *map(str, command)], env=self.environment,
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def train(self, *options):
        return [PROGRAM, "train", "/mnt/shared/recipe.lua", "--run", train_test.RUN, "--threads", "1", "--nproc", "2",
                *options]

    def test_srun_tells_the_hosts_and_the_run_is_that_of_one_host(self):
        said = self.on_h0("srun", "-N4", "--ntasks-per-node=1", "--overcommit", *self.train(), seconds=300)
        self.assertIn("4 hosts x 2 ranks, from Slurm step", said)
        self.assertIn("; this is 2 (h2), leader h0 10.77.0.10:", said)
        self.check_training()

    def test_launches_that_cannot_work_are_refused_with_what_to_change(self):
        for words, told in ((("srun", "-N2", "-n4", "--overcommit"), "one agent a host"),
                            (("salloc", "-N2", "--quiet"), "srun")):
            begin = time.monotonic()
            said = self.on_h0(*words, *self.train(), code=2)
            self.assertLess(time.monotonic() - begin, 60)  # it has waited for nobody
            self.assertIn(told, said)
        self.assertFalse((self.shared_folder / "run").exists())

    def test_a_signal_to_the_job_saves_and_the_next_job_goes_on(self):
        script = self.shared_folder / "job.sh"
        words = " ".join(f"'{word}'" for word in self.train())
        script.write_text(f"#!/bin/bash\nsrun --no-kill --kill-on-bad-exit=0 --wait=0 --overcommit {words}\n")
        submit = ("sbatch", "-N4", "--ntasks-per-node=1", "--no-kill", "--open-mode=append", "-o", "/mnt/shared/job.out",
                  "--parsable", "/mnt/shared/job.sh")
        job = self.on_h0(*submit).strip()
        self.logs[0] = self.shared_folder / "job.out"
        self.until_step(30)
        self.on_h0("scancel", "-s", "TERM", job)
        self.until_done()
        state = self.until(lambda: "COMPLETED" in self.on_h0("scontrol", "show", "job", job), "the end of the job")
        self.assertTrue(state)
        reached = max(self.metrics())
        self.assertLess(reached, STEPS, "stopped too late to prove anything")
        self.assertIn(f"stopped after step {reached}", self.all_logs())
        (self.shared_folder / "run" / "events.jsonl").rename(self.shared_folder / "first.jsonl")
        self.on_h0(*submit)
        self.check_training()
        self.assertEqual([e["step"] for e in self.lines("events.jsonl") if e["event"] == "start"], [reached])


if __name__ == "__main__":
    main()
