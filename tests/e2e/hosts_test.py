"""One run over several hosts, which are agents on loopback here: the same bits as one host's, through kills of ranks
and agents, stops and resumes. What loopback cannot show (addresses, a host without power, a folder that is not shared)
is tests/cluster's."""

import os
import pathlib
import re
import signal
import time

from harness import HostsTest, Job, main

STEPS = 40
# hosts, ranks of each, recipe, --set: pipelines, tensors and replicas over hosts; with state that ranks of another
# host save (ZeRO-0's replicas, ends of a pipeline, shard groups), and without.
LAYOUTS = {
    "dp over hosts": (2, 2, dict(tp=2, pp=1, dp=2, zero=1), ()),
    "dp over hosts, ZeRO-0": (2, 2, dict(tp=2, pp=1, dp=2, zero=0), ()),
    "pp over hosts": (2, 2, dict(tp=1, pp=2, dp=2, zero=2, sp="false"), ()),
    "pp over hosts, ZeRO-0": (4, 1, dict(tp=1, pp=2, dp=2, zero=0, sp="false"), ()),
    "tp and dp over hosts, ZeRO-3": (4, 1, dict(tp=2, pp=1, dp=2, zero=3), ()),
    "cp over hosts": (2, 1, dict(tp=1, pp=1, dp=1, zero=1, sp="false"), ("mesh.cp=2",)),
}


class Hosts(HostsTest):
    def test_any_layout_trains_the_bits_of_one_host_through_kills_of_ranks_on_each(self):
        for name, (hosts, ranks, layout, sets) in LAYOUTS.items():
            with self.subTest(name):
                one, run = f"one-{name}".replace(" ", "-"), f"hosts-{name}".replace(" ", "-")
                recipe = self.recipe(name="layout", steps=STEPS, **layout)
                options = [word for text in sets for word in ("--set", text)]
                self.train(recipe, one, *options)
                last = hosts * ranks - 1
                jobs = self.start_hosts(recipe, run, hosts, ranks, *options, "--kill", f"{last}@9", "--kill", "0@22")
                self.finish_all(jobs)
                self.assertGreaterEqual(len(self.events(run, "recovered")), 2, jobs[0].output())
                self.assert_same_training(run, one, STEPS)
                self.assertEqual(self.memory_left(self.folder), [])
                self.assertEqual(len(self.manifest(run, STEPS)["extra"]["hosts"]), hosts)
                self.cairn("ckpt", "verify", self.folder / run)

    def test_processors_that_differ_use_what_all_have(self):
        recipe = self.recipe(steps=STEPS, tp=1, pp=1, dp=4, sp="false")
        job = self.start(recipe, "one", "--isa", "avx2")
        if job.wait() != 0 and "this machine has" in job.output():
            self.skipTest("a machine without AVX2")
        for low in (0, 1):  # that leads, that follows
            run = f"two-{low}"
            jobs = [self.start_host(recipe, run, k, 2, 2, *(("--isa", "avx2") if k == low else ())) for k in (0, 1)]
            self.finish_all(jobs)
            self.assert_same_training(run, "one", STEPS)
            self.assertEqual(self.events(run, "start")[0]["isa"], "avx2")
        self.train(recipe, "best")
        if self.events("best", "start")[0]["isa"] != "avx2":
            self.assertIn("(avx2): where they differ", jobs[0].output())
            one, best = self.metrics("one"), self.metrics("best")
            self.assertTrue(any(one[step]["loss"] != best[step]["loss"] for step in one))

    def test_a_stop_from_any_host_saves_and_each_resumes_also_alone(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        self.train(recipe, "whole")
        for who in (0, 1):
            run = f"stopped-by-{who}"
            jobs = self.start_hosts(recipe, run, 2, 2)
            self.until_step(run, 20, jobs[0])
            jobs[who].signal(signal.SIGTERM)
            self.finish_all(jobs)
            reached = self.last_step(run)
            self.assertLess(reached, 400, "stopped too late to prove anything")
            self.assertEqual(self.checkpoints(run), [reached])
            self.assertEqual(self.memory_left(self.folder), [])
            if who == 0:
                self.train(recipe, run)  # on one host
            else:
                self.finish_all(self.start_hosts(recipe, run, 2, 2))
            self.assertEqual(self.events(run, "start")[-1]["step"], reached)
            self.assert_same_training(run, "whole", 400)

    def test_an_agent_that_is_killed_comes_back_and_the_run_goes_on_from_the_memory_of_all(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        self.train(recipe, "whole")
        for who in (1, 0):
            run = f"killed-{who}"
            jobs = self.start_hosts(recipe, run, 2, 2)
            reached = self.until_step(run, 30, jobs[0])
            jobs[who].process.kill()
            jobs[who].wait()
            time.sleep(0.3)
            jobs[who] = self.start_host(recipe, run, who, 2, 2)
            self.finish_all(jobs)
            start = self.events(run, "start")[-1]
            self.assertEqual(start["source"], "memory")
            self.assertGreaterEqual(start["step"], reached - 1)  # other ranks may not have had it yet
            self.assert_same_training(run, "whole", 400)
            self.assertEqual(self.memory_left(self.folder), [])

    def test_a_host_whose_leader_is_away_leaves_when_it_is_asked_to_and_keeps_its_memory(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        self.train(recipe, "whole")
        jobs = self.start_hosts(recipe, "run", 2, 2)
        reached = self.until_step("run", 30, jobs[0])
        jobs[0].process.kill()
        jobs[0].wait()
        self.until(lambda: "the leader is away" in jobs[1].output(), "the loss of the leader", jobs[1])
        jobs[1].signal(signal.SIGTERM)
        self.finish(jobs[1], 75)
        self.assertEqual(len(self.memory_left(self.folder)), 2)
        self.finish_all(self.start_hosts(recipe, "run", 2, 2))
        start = self.events("run", "start")[-1]
        self.assertEqual(start["source"], "memory")
        self.assertGreaterEqual(start["step"], reached - 1)
        self.assert_same_training("run", "whole", 400)

    def test_all_agents_killed_at_once_and_one_host_without_memory(self):
        recipe = self.recipe(steps=400, save=10, tp=2, pp=1, dp=2)
        self.train(recipe, "whole")
        for run, names_step in (("newest", False), ("named", True)):
            jobs = self.start_hosts(recipe, run, 2, 2)
            self.until(lambda: self.checkpoints(run), "a checkpoint", jobs[0])
            for job in jobs:
                job.process.kill()
            for job in jobs:
                job.wait()
            left = self.memory_left(self.folder)
            self.assertEqual(len(left), 2)
            os.unlink(f"/dev/shm/{left[0]}")  # as of a host that was booted again
            saved = self.checkpoints(run)[-1]
            self.finish_all(self.start_hosts(recipe, run, 2, 2, *(("--from-step", saved) if names_step else ())))
            start = self.events(run, "start")[-1]
            self.assertEqual((start["source"], start["step"]), ("disk", saved))
            self.assert_same_training(run, "whole", 400)
            self.assertEqual(self.memory_left(self.folder), [])

    def test_what_does_not_fit_together_is_refused_by_name(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        other = self.recipe(name="other", steps=401, save=1000, tp=2, pp=1, dp=2)
        leader = self.start_host(recipe, "run", 0, 2, 2)
        for job, words in (
            (self.start_host(other, "run", 1, 2, 2, name="recipe"), "another recipe: hash"),
            (self.start_host(recipe, "run", 1, 2, 3, "--set", "mesh.dp=0", "--set", "batch.samples=6",
                             name="ranks"), "another"),
        ):
            self.finish(job, 2)
            self.assertIn(words, job.output())
        self.finish(self.start_host(recipe, "else", 1, 2, 2, "--set", "checkpoint.incremental=true", name="incremental"), 2)
        self.assertIsNone(leader.process.poll(), leader.output())
        follower = self.start_host(recipe, "run", 1, 2, 2)
        self.until_step("run", 5, leader)
        leader.signal(signal.SIGTERM)
        self.finish_all([leader, follower])
        self.assertFalse((self.folder / "else").exists())

    @staticmethod
    def ranks_of(text):
        """[0, 1, 2] of "0 to 2", [0, 2] of "0, 2"."""
        ends = [int(word) for word in text.replace(",", "").split() if word != "to"]
        return list(range(ends[0], ends[-1] + 1)) if " to " in text else ends

    def test_a_rank_of_another_host_that_stands_still_is_named_with_its_host(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        jobs = self.start_hosts(recipe, "run", 2, 2, "--set", "restart.deadline=4")
        self.until_step("run", 20, jobs[0])
        stopped = jobs[1].children()[3]
        os.kill(stopped, signal.SIGSTOP)
        wait = self.until(lambda: self.events("run", "wait"), "the report of the wait", jobs[0])[0]
        self.assertEqual(wait["culprits"], [3])
        self.assertEqual(wait["reason"], "is stopped (state T)")
        self.assertIn(f"rank 3 (pid {stopped} on ", pathlib.Path(self.folder / wait["report"]).read_text())
        # Its own host reads its stack, and the report has those of all hosts.
        self.until(lambda: self.events("run", "failure"), "the deadline", jobs[0])
        text = pathlib.Path(self.folder / wait["report"]).read_text()
        groups = re.findall(r"^  ranks? ([\d, to]+)$", text[text.index("Training threads, equal ones together"):], re.M)
        named = [rank for group in groups for rank in self.ranks_of(group)]
        self.assertEqual(sorted(named), [0, 1, 2, 3], text)
        self.assertRegex(text, rf"rank 3 \(pid {stopped} on .*\), state T: .*\n  thread")
        failure = self.events("run", "failure")[0]
        self.assertEqual(failure["class"], "hang")
        self.assertLess(wait["time"], failure["time"])  # at half of the deadline, not at its end
        self.finish_all(jobs)  # at the deadline all are started again
        self.assertIn("rank 3 keeps the others waiting: it is stopped (state T)", jobs[0].output())
        self.assertGreaterEqual(len(self.events("run", "recovered")), 1)

    def test_a_cluster_file_says_hosts_ports_and_times_and_spares_leave_with_the_run(self):
        recipe = self.recipe(steps=STEPS, tp=2, pp=1, dp=2)
        self.train(recipe, "whole")
        (self.folder / "cluster.lua").write_text(
            'local T = require "cairn"\n'
            'return T.hosts { names = { "127.0.0.1", "localhost", "127.0.0.2" }, spares = 1, ranks_per_host = 2,\n'
            '                 ports = { from = 25100, to = 25110 }, dead_after = 2, interface = "lo" }\n')
        jobs = []
        for index in range(3):
            job = Job(self.program,
                      ["train", recipe, "--run", self.folder / "run", "--threads", 1, "--cluster",
                       self.folder / "cluster.lua", "--host-index", index, "--kill", "3@9"],
                      self.folder / f"run-h{index}.out", self.folder)
            self.jobs.append(job)
            jobs.append(job)
        self.finish_all(jobs)
        self.assertIn("2 hosts x 2 ranks and 1 spare, from --hosts; this is 0 (127.0.0.1), leader 127.0.0.1:251",
                      jobs[0].output())
        self.assertIn("a spare: waits to take the place of a host that is lost", jobs[2].output())
        self.assert_same_training("run", "whole", STEPS)
        # Hosts that mesh.dp does not need are spares by themselves.
        more = self.start_hosts(recipe, "more", 3, 2)
        self.finish_all(more)
        self.assertIn("and 1 spare", more[0].output())
        self.assert_same_training("more", "whole", STEPS)

    def test_an_error_that_ends_the_run_ends_it_on_all_hosts_with_one_code(self):
        recipe = self.recipe(steps=400, save=1000, tp=2, pp=1, dp=2)
        jobs = self.start_hosts(recipe, "run", 2, 2, "--set", "restart.max_restarts=0", "--kill", "3@20")
        self.finish_all(jobs, 137)
        self.assertRegex(jobs[1].output(), r"(?s)this host's ranks stopped.*\nfailed: [^\n]*rank 3[^\n]* was killed by signal 9")
        self.assertNotIn("starting again", jobs[1].output())
        # What memory held is on disk all the same, and the next start goes on from it.
        reached = self.checkpoints("run")[-1]
        self.assertGreaterEqual(reached, 19)  # rank 3 may have been killed with step 20 not published yet
        self.assertEqual(self.memory_left(self.folder), [])
        self.finish_all(self.start_hosts(recipe, "run", 2, 2))
        self.assertEqual(self.events("run", "start")[-1]["step"], reached)


if __name__ == "__main__":
    main()
