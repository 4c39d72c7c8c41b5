"""What ends the ranks of a run over hosts is told with its class and its host, whichever kind it is of: planted here are
signals, a full /dev/shm, lack of memory, a device that the kernel's log calls broken, a lost host, a rank that stands
still, and a host that is slow. A host whose device is broken gives its place to a spare and is let in no more.

CAIRN_DIAGNOSIS_ROUNDS=N plants each fault that a run survives N times (default 1), on hosts by turns;
CAIRN_DIAGNOSIS_PIECE_MB=256 takes memory in pieces so large that the kernel has to kill twice, as a slow machine may."""

import json
import os
import re
import time

from bed import main
from train_test import PROGRAM, RUN, ListedBed

ROUNDS = int(os.environ.get("CAIRN_DIAGNOSIS_ROUNDS", "1"))
PIECE_MB = os.environ.get("CAIRN_DIAGNOSIS_PIECE_MB", "1")
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


# Takes memory until the kernel has killed a process of this host for it: the rank, whatever it has. On a slow machine the
# next piece comes before the rank's memory is free, and then the second choice is this script, not the agent. (With a
# higher score it would be the first: it has most of the memory, and a score of 1000 counts as much as all of it.)
EAT = """import glob
def words(process):
    try:
        return open(process + "/cmdline", "rb").read().replace(b"\\0", b" ")
    except OSError:  # it has ended
        return b""
rank = next(process for process in glob.glob("/proc/[0-9]*") if b" _rank " in words(process))
open(rank + "/oom_score_adj", "w").write("1000")
open("/proc/self/oom_score_adj", "w").write("100")
group = next(line.strip().split(":")[2] for line in open("/proc/self/cgroup") if ":memory:" in line)
def kills():
    return open("/sys/fs/cgroup/memory" + group + "/memory.oom_control").read().split()[-1]
taken, before = [], kills()
while kills() == before and len(taken) < 1000:
    taken.append(b"x" * (PIECE_MB << 20))
"""


class Diagnosis(ListedBed):
    """Four hosts train and two wait."""

    count = 6
    life_s = 900 + 100 * ROUNDS
    cluster = "spares = 2, dead_after = 3, spare_after = 40"
    start_command = ("env", "CAIRN_KERNEL_LOG=/mnt/local/kmsg", "CAIRN_TERMINATION_LOG=/mnt/local/termination-log", PROGRAM)

    def setUp(self):
        super().setUp()
        (self.shared_folder / "eat.py").write_text(EAT.replace("PIECE_MB", PIECE_MB))
        self.told = 0  # failures that were looked at
        self.since = time.time()  # before the fault that comes next

    def where(self):
        return (*super().where(), "--set", "restart.deadline=12", "--set", "model.width=192")

    def local(self, host, name):
        """A file of the host's own disk, from here."""
        return self.folder / "hosts" / f"h{host}" / "local" / name

    def start(self, index, run=RUN, *extra):
        for name in ("kmsg", "termination-log"):
            self.local(index, name).touch()
        return super().start(index, run, *extra)

    def run_on(self, host, script):
        self.hosts("run", f"h{host}", "sh", "-c", script)

    def goes_on(self):
        at = self.newest()
        self.until(lambda: self.newest() > at + 12, "new steps")  # a save among them: progress

    def check_failure(self, what, host, kind):
        failures = self.until(lambda: len(self.events("failure")) > self.told and self.events("failure"), what)
        record = json.loads((self.shared_folder / "run" / "failure.json").read_text())
        self.assertEqual((failures[self.told]["class"], failures[self.told]["host"]), (kind, f"h{host}"),
                         f"{what}: {failures[self.told]}{self.all_logs()}")
        if len(failures) == self.told + 1:
            self.assertEqual((record["class"], record["host"]), (kind, f"h{host}"), what)
            self.assertTrue(self.since - 1 <= record["first_seen"] <= time.time() + 1, record)
        self.told = len(failures)
        self.since = time.time()
        print(f"  {what}: {kind} on h{host}", flush=True)
        return record

    # --- faults that a run survives

    def killed(self, host):
        self.signal_rank(host, "KILL")
        self.check_failure("SIGKILL by hand", host, "killed")

    def crash(self, host):
        self.signal_rank(host, "SEGV")
        self.check_failure("SIGSEGV", host, "crash")

    def shm(self, host):
        self.run_on(host, "dd if=/dev/zero of=/dev/shm/filler bs=64k 2> /dev/null; true")
        self.signal_rank(host, "BUS")
        self.check_failure("SIGBUS with a full /dev/shm", host, "shm_full")
        self.run_on(host, "rm /dev/shm/filler")

    def memory(self, host):
        # Of all the host's processes the kernel chooses the rank. Who takes the memory stops at once.
        self.hosts("memory", f"h{host}", "600M")
        self.run_on(host, "/usr/bin/python3 /mnt/shared/eat.py || [ $? = 137 ]")
        self.check_failure("out of memory", host, "out_of_memory")
        self.hosts("memory", f"h{host}", "-1")

    def hang(self, host):
        self.signal_rank(host, "STOP")
        record = self.check_failure("a rank that stands still", host, "hang")
        wait = self.events("wait")[-1]
        report = (self.shared_folder / "run" / "reports" / os.path.basename(record["report"])).read_text()
        ranks = {f"h{k}": place for place, k in enumerate(self.members())}
        self.assertEqual(wait["culprits"], [ranks[f"h{host}"]])
        groups = report[report.index("Training threads, equal ones together"):]
        named = [int(rank) for group in re.findall(r"^  ranks? (.*)$", groups, re.M)
                 for rank in re.findall(r"\d+", re.sub(r"(\d) to (\d)", lambda m: ",".join(
                     map(str, range(int(m[1]), int(m[2]) + 1))), group))]
        self.assertEqual(sorted(named), [0, 1, 2, 3], report)  # those of all hosts

    def trained_s(self):
        """Seconds in steps since ranks started last."""
        begun = self.events("start")[-1]["step"]
        return sum(line["step_ms"] for step, line in self.metrics().items() if step > begun + 8) / 1000

    def slow(self, host):
        self.until(lambda: self.trained_s() > 12, "two windows of steps to compare with")
        self.until(lambda: len(self.events("steps_slow")) == len(self.events("steps_slow_over")), "steps as fast as ever")
        before, slow_before = len(self.events("straggler")), len(self.events("steps_slow"))
        self.hosts("slow", f"h{host}", "10")
        # On a busy machine it may have been slow before; the weightier cause is told then, too.
        found = self.until(lambda: [e for e in self.events("straggler")[before:]
                                    if e["host"] == f"h{host}" and e["cause"] == "throttled"], "the straggler")
        self.assertGreater(found[0]["ratio"], 1.3)
        steps = self.until(lambda: self.events("steps_slow")[slow_before:], "that steps are slow")[0]
        self.assertGreaterEqual(steps["ratio"], 2)
        # Steps can be slow before the host at fault is known; the event "straggler" names it then.
        self.assertIn(steps.get("host"), (None, f"h{host}"), steps)
        self.hosts("slow", f"h{host}", "100000")
        self.until(lambda: len(self.events("steps_slow_over")) > slow_before, "that they no longer are")
        self.assertEqual(len(self.events("steps_slow")), slow_before + 1)
        print(f"  a slow host: {found[0]['ratio']:.1f} x, {found[0]['why']}", flush=True)

    def members(self):
        return [int(name[1]) for name in self.events("epoch")[-1]["hosts"]]

    def test_each_kind_of_fault_is_told_with_its_host(self):
        for index in (5, 4, 3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 20, "step 20")
        kinds = [self.killed, self.crash, self.shm, self.memory, self.hang, self.slow]
        for k in range(ROUNDS * len(kinds)):
            kinds[k % len(kinds)](self.members()[(k + 1 + k // len(kinds)) % 4])
            self.goes_on()
            self.told = len(self.events("failure"))
        self.lost_spare()
        self.lost()
        self.goes_on()
        self.broken_device()

    def lost_spare(self):
        self.hosts("crash", "h5")
        lost = self.until(lambda: self.events("spare_lost"), "the loss of a spare")
        self.assertEqual([event["host"] for event in lost], ["h5"])
        self.hosts("boot", "h5")
        log = self.start(5)
        self.until(lambda: "a spare: waits" in log.read_text(), "h5 as a spare")

    def lost(self):
        self.hosts("crash", "h2")
        self.check_failure("a host that is gone", 2, "host_lost")
        self.hosts("boot", "h2")
        self.start(2)

    def device(self, host, what):
        with open(self.local(host, "kmsg"), "a") as log:
            log.write(XID + "\n")
        self.signal_rank(host, "ABRT")
        return self.check_failure(what, host, "device")

    def broken_device(self):
        """Its host is excluded, also that of the leader, and a spare takes its place. With none left the next one ends the
        run."""
        self.device(3, "a broken device")
        self.until(lambda: 3 not in self.members(), "the spare in its place")
        self.goes_on()
        self.assertIn("this host is excluded from the run: a device is broken", self.logs[3].read_text())
        log = self.start(3)
        self.until(lambda: "this run has excluded h3" in log.read_text(), "that it is not let in again")

        self.device(0, "a broken device of the leader's host")
        self.until(lambda: 0 not in self.members(), "the spare in its place, and another leader")
        self.goes_on()
        self.assertIn("this host led, and is excluded from the run: a device is broken", self.logs[0].read_text())
        self.assertEqual(sorted(self.members()), [1, 2, 4, 5])
        excluded = json.loads((self.shared_folder / "run" / "cluster" / "excluded.json").read_text())["hosts"]
        self.assertEqual([host["name"] for host in excluded], ["h3", "h0"])

        record = self.device(1, "a broken device without a spare")
        self.until_done()
        self.assertFalse(json.loads((self.shared_folder / "run" / "failure.json").read_text())["restarting"])
        self.assertEqual(self.events("end")[-1]["class"], "device")
        self.assertIn(XID, record["message"])
        for host in (1, 2, 4, 5):
            self.until(lambda: "device on h1" in self.local(host, "termination-log").read_text(), f"h{host}'s word")  # noqa: B023
        report = self.hosts("run", "h2", PROGRAM, "report", RUN)
        self.assertRegex(report, "failures       [1-9]")
        told = json.loads(self.hosts("run", "h2", PROGRAM, "report", RUN, "--json"))["failures"]
        for kind, host in (("device", "h0"), ("device", "h1"), ("device", "h3"), ("host_lost", "h2")):
            self.assertIn({"class": kind, "host": host, "times": 1}, told)
        self.assertIn("straggler      h", report)
        self.assertIn("excluded       h3: a device is broken", report)


if __name__ == "__main__":
    main()
