"""A run that loses hosts and has no spare goes on with fewer (--hosts-min), and with all once they are back: the same
samples, and with deterministic = "layout" the bits of a run that nothing happened to.

CAIRN_RESIZE_ROUNDS=N repeats each measured change N times (default 1) and prints medians."""

import json
import os
import statistics
import subprocess

from bed import main
from train_test import PROGRAM, ListedBed

ROUNDS = int(os.environ.get("CAIRN_RESIZE_ROUNDS", "1"))
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Resize(ListedBed):
    """Four hosts train, of which two are enough."""

    life_s = 900 + 60 * ROUNDS
    cluster = "hosts_min = 2, dead_after = 2, spare_after = 0"
    changes = {'schedule = "1f1b",': 'schedule = "1f1b", deterministic = "layout",'}

    def hosts_of_newest_epoch(self):
        return self.leader_and_members()[1]

    def leader(self):
        return self.leader_and_members()[0]

    def first_step_of(self, starts, what):
        """The first step after start number `starts` (from 0)."""
        self.until(lambda: len(self.events("start")) > starts, f"the start after {what}")
        start = self.events("start")[starts]
        return self.until(lambda: next((line for line in self.lines("metrics.jsonl") if "step" in line
                                        and line["time"] > start["time"] and line["step"] == start["step"] + 1), None),
                          f"a step after {what}")

    def shrink(self, how, host):
        """Seconds from the fault to the first step of those that are left."""
        starts, hosts = len(self.events("start")), set(self.hosts_of_newest_epoch())
        self.hosts(how, f"h{host}")
        began = float((self.folder / "hosts" / f"h{host}" / "killed-at").read_text())
        step = self.first_step_of(starts, f"{how} of h{host}")
        self.assertEqual(set(self.hosts_of_newest_epoch()), hosts - {host})
        self.assertIn(f"{len(hosts) - 1} = tp 1 x dp {len(hosts) - 1}", self.events("start")[starts]["mesh"])
        return step["time"] - began

    def grow(self, host):
        """Seconds from the arrival of a host to the first step with it."""
        starts, hosts = len(self.events("start")), set(self.hosts_of_newest_epoch())
        self.hosts("boot", f"h{host}")
        log = self.start(host)
        self.until(lambda: "a spare: waits" in log.read_text(), f"h{host} as a spare")
        arrived = log.stat().st_mtime
        step = self.first_step_of(starts, f"h{host} has come back")
        self.assertEqual(set(self.hosts_of_newest_epoch()), hosts | {host})
        return step["time"] - arrived

    def and_on(self, steps=15):
        at = self.newest()
        self.until(lambda: self.newest() > at + steps, "more steps")

    def test_fewer_hosts_and_all_again_train_alike(self):
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 25, "step 25")
        took = {"crash": [], "kill": [], "the leader": [], "back": []}
        for _ in range(ROUNDS):
            for what, how in (("crash", "crash"), ("kill", "kill"), ("the leader", "kill")):
                leader = self.leader()
                host = leader if what == "the leader" else next(k for k in self.hosts_of_newest_epoch() if k != leader)
                took[what].append(self.shrink(how, host))
                self.and_on()
                took["back"].append(self.grow(host))
                self.and_on()
        for what, seconds in took.items():
            print(f"{what}: {len(seconds)} x, median {statistics.median(seconds):.2f} s to the first step, worst "
                  f"{max(seconds):.2f} s")
        # Two at once: half of the hosts are enough to go on. The second is silent, so its loss is seen when the size
        # without the first has been found.
        two = [k for k in self.hosts_of_newest_epoch() if k != self.leader()][:2]
        starts = len(self.events("start"))
        for how, host in zip(("freeze", "crash"), two):
            self.hosts(how, f"h{host}")
        self.until(lambda: len(self.hosts_of_newest_epoch()) == 2, "a run of two hosts")
        self.first_step_of(len(self.events("start")) - 1, "two hosts were lost")
        self.assertGreater(len(self.events("start")), starts)
        self.and_on()
        self.stop_and_compare()

    def test_with_replicas_fewer_hosts_lose_no_step(self):
        """Nothing is saved by the clock: what the hosts go on from is in memory alone."""
        self.change_recipe("save = { T.every { steps = 10 } }", "replicate = T.every { steps = 1 }")
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 25, "step 25")
        for how, whom in (("crash", "another"), ("kill", "the leader")):
            leader = self.leader()
            host = leader if whom == "the leader" else next(k for k in self.hosts_of_newest_epoch() if k != leader)
            told, starts = self.newest(), len(self.events("start"))
            seconds = self.shrink(how, host)
            start = self.events("start")[starts]
            print(f"{how} of {whom}: {seconds:.2f} s to the first step, from step {start['step']} of {told} or more")
            # The newest that was copied: the last one, or on a busy machine one shortly before.
            self.assertEqual(start["source"], "disk")
            self.assertGreaterEqual(start["step"], told - (1 if ROUNDS > 1 else 15))
            self.and_on()
        self.stop_and_compare()

    def states(self):
        """The state of each host by index, as `cairn hosts` shows it."""
        done = subprocess.run([PROGRAM, "hosts", self.shared_folder / "run", "--json"], capture_output=True, check=True)
        return [one["state"] for one in json.loads(done.stdout)["hosts"]]

    def test_all_agents_killed_after_a_loss_resume_from_the_memory_of_those_that_were_left(self):
        """Nothing is saved by the clock. A follower is lost, then the leader, whose agent is host 0's."""
        self.change_recipe("save = { T.every { steps = 10 } }", "replicate = T.every { steps = 1 }")
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 25, "step 25")
        for whom in ("another", "the leader"):
            starts = len(self.events("start"))
            leader = self.leader()
            host = 0 if whom == "the leader" else 1
            self.assertEqual(leader, 0)
            self.signal_agent(host, "KILL")
            self.first_step_of(starts, f"loss of {whom}")
            left = self.hosts_of_newest_epoch()
            self.assertEqual(set(left), {0, 1, 2, 3} - {host})
            self.and_on()
            self.assertEqual(self.states()[host], "away")
            for index in sorted(left, key=lambda k: k != self.leader()):  # first: no host changes the size meanwhile
                self.signal_agent(index, "KILL")
            told, starts = self.newest(), len(self.events("start"))
            for index in (3, 2, 1, 0):
                self.start(index)
            self.first_step_of(starts, "all agents were killed")
            start = self.events("start")[starts]
            self.assertEqual(start["world"], 3)
            self.assertGreaterEqual(start["step"], told - 1)
            self.until(lambda: len(self.hosts_of_newest_epoch()) == 4, "all hosts")
            self.and_on()
            self.assertEqual(self.states(), ["training"] * 4)
        self.stop_and_compare()

    def test_a_replica_of_two_hosts_leaves_as_a_whole(self):
        """A pipeline over two hosts: of the three that are left one waits, and takes its place again with the fourth."""
        self.change_recipe("pp = 1, dp = 4", "pp = 2, dp = 2")
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 25, "step 25")
        starts = len(self.events("start"))
        host = next(k for k in self.hosts_of_newest_epoch() if k != self.leader())
        self.hosts("crash", f"h{host}")
        self.first_step_of(starts, f"crash of h{host}")
        self.assertEqual(self.events("start")[starts]["mesh"], "2 = tp 1 x dp 1 x pp 2")
        self.and_on()
        rest = {0, 1, 2, 3} - {host} - set(self.hosts_of_newest_epoch())
        self.assertEqual(len(rest), 1)
        self.assertIn("a spare: waits", self.logs[rest.pop()].read_text())
        starts = len(self.events("start"))
        self.hosts("boot", f"h{host}")
        self.start(host)
        self.first_step_of(starts, f"h{host} has come back")
        self.assertEqual(set(self.hosts_of_newest_epoch()), {0, 1, 2, 3})
        self.and_on()
        self.stop_and_compare()

    def test_a_host_whose_device_is_broken_leaves_without_a_spare(self):
        """A follower, then the leader. Once a host has booted it is let in again."""
        self.start_command = ("env", "CAIRN_KERNEL_LOG=/mnt/local/kmsg", PROGRAM)
        for index in (3, 1, 2, 0):
            (self.folder / "hosts" / f"h{index}" / "local" / "kmsg").touch()
            self.start(index)
        self.until(lambda: self.newest() >= 25, "step 25")
        for whom in ("another", "the leader"):
            leader, hosts, starts = self.leader(), set(self.hosts_of_newest_epoch()), len(self.events("start"))
            host = leader if whom == "the leader" else next(k for k in hosts if k != leader)
            with open(self.folder / "hosts" / f"h{host}" / "local" / "kmsg", "a") as log:
                log.write(XID + "\n")
            self.signal_rank(host, "ABRT")
            self.until(lambda: set(self.hosts_of_newest_epoch()) == hosts - {host}, f"an epoch without h{host}")  # noqa: B023
            self.first_step_of(starts, f"the device of {whom}")
            size = len(hosts) - 1
            self.assertIn(f"{size} = tp 1 x dp {size}", self.events("start")[-1]["mesh"])
            self.assertIn("excluded from the run: a device is broken", self.logs[host].read_text())
            self.and_on()
        self.assertEqual(len(self.events("excluded")), 2)
        (self.folder / "hosts" / f"h{host}" / "local" / "kmsg").write_text("")
        self.grow(host)
        self.and_on()
        self.stop_and_compare()

    def test_a_rank_that_crashes_three_times_costs_its_host_the_place_and_the_run_no_step(self):
        """Nothing is saved by the clock: the hosts resume from memory, and one of them leaves."""
        self.change_recipe("save = { T.every { steps = 10 } }", "save = { T.every { steps = 1000000 } }")
        self.change_recipe("width = 32", "width = 192")  # no hundred steps between two crashes
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 5, "step 5")
        host = next(k for k in self.hosts_of_newest_epoch() if k != self.leader())
        for crashes in (1, 2, 3):
            told = self.newest()
            self.signal_rank(host, "SEGV")
            self.until(lambda: len(self.events("failure")) == crashes, "the failure")  # noqa: B023
            if crashes < 3:
                self.and_on(3)
        starts = len(self.events("start"))
        self.until(lambda: len(self.hosts_of_newest_epoch()) == 3, f"an epoch without h{host}")
        self.until(lambda: self.events("start")[-1]["world"] == 3, "a start of three hosts")
        (excluded,) = self.events("excluded")
        self.assertEqual(excluded["host"], f"h{host}")
        self.assertIn("3 failures of its ranks in 10 min", excluded["reason"])
        start = self.events("start")[-1]
        self.assertEqual(start["source"], "disk", starts)
        self.assertGreaterEqual(start["step"], told)
        self.and_on(3)
        self.stop_and_compare()

    def stop_and_compare(self):
        leader = self.leader()
        self.signal_agent(leader, "TERM")
        self.until_done()
        reached = self.newest()
        self.check_bits(reached, up=leader)
        mesh = {event["mesh"] for event in self.events("start")}
        print(f"{reached} steps with the bits of one host, in {json.dumps(sorted(mesh))}")


if __name__ == "__main__":
    main()
