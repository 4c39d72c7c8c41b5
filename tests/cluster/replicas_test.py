"""Copies of each host's bank in another host's memory (checkpoint.replicate): a host that dies loses no step, although the
run has saved none. Bits as of a run that nothing happened to; bytes on the wire as the plan says.

CAIRN_REPLICAS_ROUNDS=N repeats each measured fault N times (default 1) and prints medians; dead_after is 1 s then."""

import json
import os
import statistics

from bed import main
from train_test import PROGRAM, RUN, ListedBed

ROUNDS = int(os.environ.get("CAIRN_REPLICAS_ROUNDS", "1"))


class Replicas(ListedBed):
    """Four hosts train and a fifth waits. Nothing is saved before the end."""

    count = 5
    life_s = 900 + 60 * ROUNDS
    cluster = f"spares = 1, dead_after = {1 if ROUNDS > 1 else 2}"
    faults = (("crash", "another"), ("kill", "another"), ("kill", "leader"))
    source = "memory"  # of what a run goes on from
    most_again = 15    # steps: where copying is slower than a step, those since the last one that was copied
    changes = {"save = { T.every { steps = 10 } }": "replicate = T.every { steps = 1 }"}

    def strike(self, how, host):
        """Seconds to the first new step, and how many steps the run went back. The fault begins when the link is dead."""
        before = len(self.events("start"))
        self.hosts(how, f"h{host}")
        began = float((self.folder / "hosts" / f"h{host}" / "killed-at").read_text())
        self.until(lambda: len(self.events("start")) > before, f"the start after {how} of h{host}")
        start = self.events("start")[-1]
        waited = self.events("epoch")[-1]["time"] - self.events("failure")[-1]["time"]
        self.assertLess(waited, 8, "a spare waits for no host where replicas are kept")
        self.assertEqual(start["source"], self.source, f"{how} h{host}{self.all_logs()}")
        resumed = start["step"]
        first = self.until(
            lambda: next((line for line in self.lines_behind(start["time"]) if line["step"] == resumed + 1), None), "a new step")
        if "CAIRN_REPLICAS_SPLIT" in os.environ:
            for event in self.lines("events.jsonl"):
                if event["time"] > began:
                    print(f"  {event['time'] - began:.2f} {json.dumps(event)[:160]}")
            print(f"  {first['time'] - began:.2f} step {first['step']}", flush=True)
        return first["time"] - began, resumed

    def lines_behind(self, moment):
        path = self.shared_folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines()[-400:]
        return [line for line in map(json.loads, (text for text in lines if text.endswith("}")))
                if "step" in line and line.get("time", 0) > moment]

    def back(self, host):
        self.hosts("boot", f"h{host}")
        log = self.start(host)
        self.until(lambda: "a spare: waits" in log.read_text(), f"h{host} as a spare")
        at = self.newest()
        self.until(lambda: self.newest() > at + 20, "steps")

    def test_a_host_that_dies_loses_no_step(self):
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        self.until(lambda: self.newest() >= 20, "step 20")
        # Memory for the place that the spare may get: it has no name, and is this process's alone.
        self.until(lambda: " /dev/shm/#" in self.hosts("run", "h4", "sh", "-c", "ls -l /proc/[0-9]*/fd 2> /dev/null; true"),
                   "memory that the spare has ready")
        took, lost = {}, {}
        for _ in range(ROUNDS):
            for how, whom in self.faults:
                leader, members = self.leader_and_members()
                host = leader if whom == "leader" else next(k for k in members if k != leader)
                told = self.newest()
                seconds, resumed = self.strike(how, host)
                took.setdefault((how, whom), []).append(seconds)
                # The steps that were told before the fault, at the least.
                lost.setdefault((how, whom), []).append(max(0, told - resumed))
                self.back(host)
        for kind, seconds in took.items():
            print(f"{' '.join(kind)}: {len(seconds)} x, median {statistics.median(seconds):.2f} s to the first new step, "
                  f"worst {max(seconds):.2f} s; at most {max(lost[kind])} steps again")
            self.assertLessEqual(statistics.median(lost[kind]), 1 if ROUNDS > 1 else self.most_again, kind)
        self.signal_agent(self.leader_and_members()[0], "TERM")
        self.until_done()
        reached = self.newest()
        # The start has begun anew once, at its beginning.
        sources = [event["source"] for event in self.events("start")]
        self.assertEqual(sources, ["fresh"] + [self.source] * (len(sources) - 1))
        self.check_bits(reached, up=4)

    def test_bytes_on_the_wire_are_those_of_the_plan(self):
        plan = json.loads(self.hosts("run", "h0", PROGRAM, "plan", "/mnt/shared/recipe.lua", "--world", "4", "--json"))
        wire = plan["replicas"]["wire_bytes"]
        self.assertEqual(plan["replicas"]["every_steps"], 1)
        self.assertGreater(wire, 0)
        for index in (4, 3, 1, 2, 0):
            self.start(index, RUN, "--set", "stop=T.steps(60)")
        self.until_done()
        copies = self.events("replicas")[-1]
        print(f"{copies['steps']} of 60 steps were copied, {copies['bytes']} bytes, {wire} each")
        self.assertGreater(copies["steps"], 3)  # one at a time: as many as the machine has time for
        self.assertEqual(copies["failed"], 0)
        # One more may be under way at the end.
        self.assertGreaterEqual(copies["bytes"], copies["steps"] * wire)
        self.assertLess(copies["bytes"], (copies["steps"] + 1) * wire)
        self.assertEqual(copies["bytes"] % (wire // 4), 0)


class FreeReplicas(Replicas):
    """ZeRO 0: every host keeps the whole state anyway, and puts what its ward saves into memory of its agent. Nothing goes
    over the network, and no step is lost."""

    changes = {**Replicas.changes, "zero = 1": "zero = 0"}
    faults = (("crash", "another"), ("kill", "leader"))
    most_again = 1   # a step is told when its snapshot is published on one host
    source = "disk"  # what ranks keep for those of other hosts comes by way of it

    def test_bytes_on_the_wire_are_those_of_the_plan(self):
        plan = json.loads(self.hosts("run", "h0", PROGRAM, "plan", "/mnt/shared/recipe.lua", "--world", "4", "--json"))
        self.assertIn(1, plan["replicas"]["free_with_ranks_per_host"])
        for index in (4, 3, 1, 2, 0):
            self.start(index, RUN, "--set", "stop=T.steps(60)")
        self.until_done()
        copies = self.events("replicas")[-1]
        self.assertEqual((copies["free"], copies["steps"], copies["bytes"], copies["failed"]), (True, 0, 0, 0))


if __name__ == "__main__":
    main()
