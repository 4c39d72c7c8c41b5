"""Agents on hosts of their own (tests/cluster/hosts): they join, and a host that dies, stands still or is cut off is
told in the time that a deadline allows. What loopback cannot show: addresses, a folder that is not shared, a host
without power, which sends no FIN."""

import json
import sys
import time

from bed import Bed, main

AGENT = sys.argv.pop(1)
DEAD_AFTER = 2.0  # of agent_main.cc
SLACK = 15        # of a busy machine


class Join(Bed):
    def start(self, index, *leader, run="/mnt/shared/run", hosts=4):
        return self.start_on(index, AGENT, run, index, hosts, *leader)

    def line(self, log, key, seconds=60):
        """The first line with this key, as soon as there is one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for text in log.read_text().splitlines() if log.exists() else ():
                line = json.loads(text) if text.startswith("{") else {}
                if key in line:
                    return line
            time.sleep(0.02)
        self.fail(f"no {key} in {log.read_text() if log.exists() else 'a log that is not there'}")

    def cluster(self):
        """Logs of four agents that have joined, the leader's first."""
        leader = self.start(0)
        port = self.line(leader, "port")["port"]
        logs = [leader, *(self.start(k, "h0", port) for k in (3, 1, 2))]
        logs[1:] = logs[2], logs[3], logs[1]
        epochs = [self.line(log, "epoch")["epoch"] for log in logs]
        self.assertTrue(all(epoch == epochs[0] for epoch in epochs), epochs)
        return logs, epochs[0]

    def test_four_hosts_join_by_name_and_know_each_others_addresses(self):
        _, epoch = self.cluster()
        self.assertEqual([(m["name"], m["address"]) for m in epoch["members"]],
                         [(f"h{k}", f"10.77.0.{10 + k}") for k in range(4)])
        self.assertEqual(len({m["boot_id"] for m in epoch["members"]}), 4)
        _, again = self.cluster_after_a_kill()
        self.assertEqual(again["epoch"], epoch["epoch"] + 1)

    def cluster_after_a_kill(self):
        for k in range(4):
            self.hosts("boot", f"h{k}")
        return self.cluster()

    def test_a_host_without_power_is_lost_after_the_deadline_and_one_that_resets_at_once(self):
        logs, _ = self.cluster()
        self.hosts("kill", "h2")
        killed = float((self.folder / "hosts" / "h2" / "killed-at").read_text())
        lost = self.line(logs[0], "lost")
        self.assertEqual(lost["lost"], 2)
        self.assertIn("h2: silent for", lost["why"])
        self.assertGreaterEqual(lost["silent_s"], DEAD_AFTER)
        self.assertLess(lost["at"] - killed, DEAD_AFTER + SLACK)
        self.hosts("crash", "h3")
        deadline = time.monotonic() + 60
        while logs[0].read_text().count('"lost"') < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        lost = json.loads(logs[0].read_text().splitlines()[-1])
        self.assertEqual(lost["lost"], 3)
        self.assertNotIn("silent", lost["why"])
        self.assertLess(lost["silent_s"], DEAD_AFTER)

    def test_a_host_that_stands_still_is_lost_and_knows_it_when_it_wakes(self):
        logs, _ = self.cluster()
        self.hosts("freeze", "h1")
        lost = self.line(logs[0], "lost")
        self.assertEqual((lost["lost"], "silent" in lost["why"]), (1, True))
        self.assertNotIn("lost", logs[1].read_text())
        self.hosts("thaw", "h1")
        self.assertEqual(self.line(logs[1], "lost")["lost"], 0)

    def test_a_host_that_is_cut_off_and_the_leader_lose_each_other(self):
        logs, _ = self.cluster()
        self.hosts("cut", "h3")
        self.assertEqual(self.line(logs[0], "lost")["lost"], 3)
        self.assertIn("silent", self.line(logs[3], "lost")["why"])
        self.assertNotIn("lost", logs[1].read_text())

    def test_a_run_folder_that_is_not_shared_is_told(self):
        leader = self.start(0, hosts=2)
        port = self.line(leader, "port")["port"]
        member = self.start(1, "h0", port, run="/mnt/local/run", hosts=2)
        self.assertIn("/mnt/local/run/cluster of h1 is not the folder of h0, which leads: its token is not there",
                      self.line(member, "error")["error"])


class JoinFuse(Join):
    """Each host with a mount of its own, whose caches show names and sizes late: NFS as users have it."""

    shared = "fuse"
    test_a_host_without_power_is_lost_after_the_deadline_and_one_that_resets_at_once = None
    test_a_host_that_stands_still_is_lost_and_knows_it_when_it_wakes = None
    test_a_host_that_is_cut_off_and_the_leader_lose_each_other = None


if __name__ == "__main__":
    main()
