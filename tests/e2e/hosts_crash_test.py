"""Deaths of hosts at random instants: agents, ranks and whole hosts are killed, memory is lost, a person stops the run or
goes back in it. Each run ends all the same, with the bits of one that nobody touched.

Draws as many runs as fit into CAIRN_CRASH_SECONDS (60), by CAIRN_CRASH_SEED. What was done to a run is told where it
fails. tests/crash/crashtest.py does the same to one host.
"""

import os
import random
import signal
import time

from harness import HostsTest, main

STEPS = 300
LAYOUTS = (  # hosts, ranks of each, recipe
    (2, 2, dict(tp=2, pp=1, dp=2, zero=1)),
    (2, 2, dict(tp=2, pp=1, dp=2, zero=0)),
    (2, 2, dict(tp=1, pp=2, dp=2, zero=1, sp="false")),
    (4, 1, dict(tp=1, pp=1, dp=4, zero=3, sp="false")),
)


class HostsCrash(HostsTest):
    def killed(self, job):
        job.process.kill()
        job.wait()

    def wait_a_while(self, draw, jobs):
        """False: the run has ended."""
        until = time.monotonic() + draw.uniform(0, 1.6)
        while time.monotonic() < until:
            if any(job.process.poll() is not None for job in jobs):
                return False
            time.sleep(0.003)
        return True

    def one_run(self, draw, run):
        hosts, ranks, layout = draw.choice(LAYOUTS)
        save = draw.choice((3, 10, 1000))
        name = "-".join(str(layout[key]) for key in ("tp", "pp", "dp", "zero")) + f"-{save}"
        recipe = self.recipe(name=name, steps=STEPS, save=save, **layout)
        if not (self.folder / f"whole-{name}").exists():
            self.train(recipe, f"whole-{name}")
        jobs = self.start_hosts(recipe, run, hosts, ranks)
        self.told = [run, name]
        for _ in range(draw.randrange(1, 5)):
            if not self.wait_a_while(draw, jobs):
                break
            death = draw.choice(("all agents", "all agents", "all hosts", "one agent", "one rank", "stop"))
            self.told.append(death)
            if death == "one agent":
                who = draw.randrange(hosts)
                self.killed(jobs[who])
                time.sleep(draw.uniform(0, 0.5))
                jobs[who] = self.start_host(recipe, run, who, hosts, ranks)
                continue
            if death == "one rank":
                for pid in jobs[draw.randrange(hosts)].children().values():
                    os.kill(pid, signal.SIGKILL)
                    break
                continue
            for job in draw.sample(jobs, len(jobs)):
                if death == "stop":
                    job.signal(signal.SIGTERM)
                elif death == "all hosts":
                    job.kill_group()
                else:
                    self.killed(job)
            for job in jobs:
                job.wait()
            memory, saved, options = self.memory_left(self.folder), self.checkpoints(run), ()
            if memory and draw.random() < 0.4:
                self.told.append("memory lost")
                os.unlink(f"/dev/shm/{draw.choice(memory)}")
            if saved and draw.random() < 0.25:
                options = ("--from-step", draw.choice(saved))
                self.told.append(" ".join(map(str, options)))
            starts = len(self.events(run, "start"))
            jobs = self.start_hosts(recipe, run, hosts, ranks, *options)
            begins = lambda: self.events(run, "start")[starts:] or jobs[0].process.poll() is not None  # noqa: E731
            begun = self.until(begins, "the next start", jobs[0])
            if begun is True:
                break  # it had its last step, and only its end was cut off
            step = begun[0]["step"]
            if options:
                self.assertEqual(step, options[1])
            elif saved:
                self.assertGreaterEqual(step, saved[-1])
        self.finish_all(jobs)
        self.assert_same_training(run, f"whole-{name}", STEPS)
        self.assertEqual(self.memory_left(self.folder), [])
        self.jobs.clear()

    def test_runs_end_with_the_bits_of_one_that_nobody_touched_whoever_dies(self):
        seed = int(os.environ.get("CAIRN_CRASH_SEED", random.randrange(1 << 30)))
        draw = random.Random(seed)
        until = time.monotonic() + float(os.environ.get("CAIRN_CRASH_SECONDS", 60))
        runs = 0
        while time.monotonic() < until:
            runs += 1
            try:
                self.one_run(draw, f"run-{runs}")
            except AssertionError as failure:
                raise AssertionError(f"seed {seed}: {', '.join(self.told)}: {failure}") from failure
        print(f"{runs} runs, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
