"""Hosts and the links between them are measured, alone (cairn check-hosts) and before a run starts (--check start): a slow
host, one whose packets are lost, one with a slow network and a cut between two hosts are named, and nobody where all is
well. Where the machine is busy with something else a check may miss a fault: then it is made again.

CAIRN_CHECK_ROUNDS=N makes N clean checks (default 2)."""

import json
import os

from bed import main
from train_test import PROGRAM, RUN, ListedBed

ROUNDS = int(os.environ.get("CAIRN_CHECK_ROUNDS", "2"))
TRIES = 3


class Check(ListedBed):
    """Four hosts train, two wait."""

    count = 6
    life_s = 900 + 30 * ROUNDS
    cluster = 'spares = 2, dead_after = 5, spare_after = 0, check = "start"'

    def check(self, hosts=4):
        """The result of `cairn check-hosts` on the first hosts, and what each host said."""
        names = ",".join(f"h{k}" for k in range(hosts))
        out = self.folder / "check.json"
        codes = [self.folder / f"check.{k}.code" for k in range(hosts)]
        for code in codes:
            code.unlink(missing_ok=True)
        for k in reversed(range(hosts)):
            command = f"OMP_NUM_THREADS=1 {PROGRAM} check-hosts /mnt/shared --hosts {names} --host-index {k}"
            said_to = f" --json > {out}" if k == 0 else ""
            told = f"echo $? > {codes[k]}.part; mv {codes[k]}.part {codes[k]}"
            self.logs[k] = self.start_on(k, "sh", "-c", f"{command}{said_to}; {told}")
        # All of them: a host that is slow to leave would take part in the next check.
        self.until(lambda: all(code.exists() for code in codes), "the end of the check")
        said = "".join(log.read_text() for log in self.logs.values())
        self.assertFalse((self.shared_folder / "check-hosts").exists())
        result = json.loads(out.read_text() or "{}")
        self.assertIn("findings", result, said)
        self.assertEqual(int(codes[0].read_text()), 69 if result["findings"] else 0)
        return result, said

    def check_finds(self, what, kinds, host, other=None):
        """Once in a few tries at least, and never anybody else."""
        for _ in range(TRIES):
            result, said = self.check()
            for found in result["findings"]:
                self.assertEqual((found.get("host"), found.get("with")), (host, other), f"{what}: {result}{said}")
                self.assertIn(found["kind"], kinds, f"{what}: {result}{said}")
                print(f"  {what}: {found['kind']} {host}, {result['rounds']} rounds, {result['seconds']:.1f} s: "
                      f"{found['why']}", flush=True)
            if result["findings"]:
                return
            print(f"  {what}: not found, {result['rounds']} rounds, {result['seconds']:.1f} s: {result['figures']}", flush=True)
        self.fail(f"{what}: not found in {TRIES} checks: {result}{said}")

    def test_what_is_not_well_is_named_and_nobody_where_all_is(self):
        for _ in range(ROUNDS):
            result, said = self.check()
            self.assertEqual(result["findings"], [], said)
            self.assertEqual([one["host"] for one in result["figures"]], ["h0", "h1", "h2", "h3"])
            for one in result["figures"]:
                self.assertGreater(min(one["matmul_gflops"], one["copy_gb_s"], one["write_mb_s"]), 0)
        print(f"  {ROUNDS} clean checks", flush=True)
        # Where others work too, a fifth of a processor may be what each host gets.
        self.hosts("slow", "h2", "5")
        self.check_finds("slow h2 5", ("slow_host",), "h2")
        self.hosts("slow", "h2", "100000")
        self.hosts("lose", "h2", "20")
        self.check_finds("lose h2 20", ("host",), "h2")
        self.hosts("heal")
        self.hosts("rate", "h2", "10mbit")
        self.check_finds("rate h2 10mbit", ("slow_host", "host"), "h2")
        self.hosts("rate", "h2", "off")
        self.hosts("cut", "h1", "h2")
        self.check_finds("cut h1 h2", ("link",), "h1", "h2")
        self.hosts("heal")

    def test_a_run_begins_without_the_host_that_is_broken(self):
        self.hosts("lose", "h2", "20")
        for index in (5, 4, 3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 5, "step 5")
        self.assertNotIn("h2", self.events("epoch")[-1]["hosts"])
        (check,) = self.events("check")
        self.assertEqual([(one["kind"], one["host"]) for one in check["findings"]], [("host", "h2")])
        self.assertEqual([event["host"] for event in self.events("excluded")], ["h2"])
        # Its connection may break before it is told: then it joins again, and hears it then.
        told = ("this host is excluded from the run: its network: with h", "this run has excluded h2: its network: with h")
        self.until(lambda: any(text in self.logs[2].read_text() for text in told), f"one of {told} from a host whose packets are lost")
        self.assertIn("h2 is broken: its network: with h", self.logs[0].read_text())
        self.hosts("heal")
        self.signal_agent(0, "TERM")
        self.until_done()

    def test_a_run_that_loses_a_host_measures_the_others_before_it_goes_on(self):
        for index in (5, 4, 3, 1, 2, 0):
            self.start(index, RUN, "--check", "after_unknown")
        self.until(lambda: self.newest() >= 5, "step 5")
        self.assertEqual(self.events("check"), [])  # the command's word counts, not the cluster file's
        host = next(k for k in self.leader_and_members()[1] if k != self.leader_and_members()[0])
        self.hosts("kill", f"h{host}")
        at = self.until(lambda: self.events("check") and self.newest(), "a check")
        self.until(lambda: self.newest() > at + 5, f"a step after {at}")
        check = self.events("check")[0]
        members = [f"h{k}" for k in self.leader_and_members()[1]]
        self.assertNotIn(f"h{host}", members)
        self.assertEqual(sorted(one["host"] for one in check["figures"]), sorted(members))
        self.assertEqual(check["findings"], [])
        self.assertEqual(self.events("excluded"), [])
        self.signal_agent(self.leader_and_members()[0], "TERM")
        self.until_done()


if __name__ == "__main__":
    main()
