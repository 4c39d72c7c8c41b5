"""One run over hosts of their own: the bits of one host's run, through hosts that lose their power, stand still or are cut
off, whichever leads. Agents are started again on a host that has booted, as a scheduler does."""

import json
import os
import pathlib
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from bed import Bed, main  # noqa: E402
from harness import RECIPE, write_tokens  # noqa: E402

PROGRAM = os.path.abspath(sys.argv.pop(1))
STEPS = 200
RUN = "/mnt/shared/run"
PATIENCE_S = 150  # of any wait, far beyond what a busy machine needs


class TrainBed(Bed):
    """A recipe that four hosts of two ranks train, and what comes of it."""

    steps = STEPS
    start_command = (PROGRAM,)
    layout = dict(tp=2, dp=4, sp="true")

    def setUp(self):
        super().setUp()
        self.shared_folder = self.folder / "hosts" / "shared"  # /mnt/shared of the hosts, from here
        write_tokens(self.shared_folder / "tokens", 6000)
        (self.shared_folder / "recipe.lua").write_text(RECIPE.format(
            name="hosts", steps=self.steps, precision="fp32", pp=1, zero=1, save=10, keep=3,
            prefix="/mnt/shared/tokens", **self.layout))
        self.logs = {}

    def start(self, index, run=RUN, *extra):
        self.logs[index] = self.start_on(
            index, *self.start_command, "train", "/mnt/shared/recipe.lua", "--run", run, "--threads", 1, *self.where(),
            "--host-index", index, *extra)
        return self.logs[index]

    def where(self):
        return ("--nproc", 2, "--hosts", "h0,h1,h2,h3")

    def each_agent(self, host, command):
        return self.hosts("run", f"h{host}", "sh", "-c",
                          "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q 'cairn [t]rain ' && "
                          f"{command} ${{p#/proc/}}; done; true")

    def signal_agent(self, host, signal):
        self.each_agent(host, f"kill -{signal}")

    def signal_rank(self, host, signal):
        """All ranks of the host."""
        self.hosts("run", f"h{host}", "sh", "-c",
                   "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q ' [_]rank ' && "
                   f"kill -{signal} ${{p#/proc/}}; done; true")

    def all_logs(self):
        return "".join(f"\n== h{k}\n{log.read_text(errors='replace')[-3000:]}" for k, log in sorted(self.logs.items()))

    def lines(self, name, folder="run"):
        path = self.shared_folder / folder / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def metrics(self, folder="run"):
        return {line["step"]: line for line in self.lines("metrics.jsonl", folder) if "step" in line}

    def until(self, condition, what, seconds=PATIENCE_S):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.02)
        self.fail(f"waited {seconds} s for {what}{self.all_logs()}")

    def until_step(self, step):
        return self.until(lambda: max(self.metrics(), default=0) >= step and max(self.metrics()), f"step {step}")

    def until_done(self, time=1):
        self.until(lambda: len([e for e in self.lines("events.jsonl") if e["event"] == "end"]) >= time, "the end")

    def check_training(self, up="h3", time=1):
        """Against the run of one host, which is made on `up`. `time`: the run's end is the first, the second .."""
        self.until_done(time)
        self.hosts("run", up, PROGRAM, "train", "/mnt/shared/recipe.lua", "--run", "/mnt/shared/one", "--threads", "1")
        got, wanted = self.metrics(), self.metrics("one")
        self.assertEqual(sorted(got), list(range(1, self.steps + 1)))
        for step in wanted:
            for key in ("loss", "grad_norm", "samples"):
                self.assertEqual(got[step][key], wanted[step][key], f"step {step}: {key}")
        diff = self.hosts("run", up, PROGRAM, "ckpt", "diff", "/mnt/shared/one", RUN)
        self.assertIn(", 0 differ", diff)
        for event in self.lines("events.jsonl"):
            if event["event"] == "saved" and event["step"] == self.steps:
                break
        else:
            self.fail(f"step {self.steps} was not saved{self.all_logs()}")



class ListedBed(TrainBed):
    """Hosts of one rank each, four of which train until they are told to stop, with a cluster file that lists them."""

    steps = 1_000_000
    layout = dict(tp=1, dp=4, sp="false")
    cluster = ""  # more of T.hosts
    changes = {}  # of the recipe's text

    def setUp(self):
        super().setUp()
        names = ", ".join(f'"h{k}"' for k in range(self.count))
        (self.shared_folder / "cluster.lua").write_text(
            f'return require("cairn").hosts {{ names = {{ {names} }}, ranks_per_host = 1, {self.cluster} }}\n')
        for old, new in self.changes.items():
            self.change_recipe(old, new)

    def change_recipe(self, old, new):
        recipe = self.shared_folder / "recipe.lua"
        text = recipe.read_text()
        self.assertEqual(text.count(old), 1, old)
        recipe.write_text(text.replace(old, new))

    def where(self):
        return ("--cluster", "/mnt/shared/cluster.lua")

    def newest(self):
        """The step that was told last, from the file's end: files of long runs are long."""
        path = self.shared_folder / "run" / "metrics.jsonl"
        if not path.exists():
            return 0
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
            lines = [line for line in f.read().split(b"\n")[:-1] if b'"step"' in line]
        return json.loads(lines[-1])["step"] if lines else 0

    def events(self, kind):
        return [event for event in self.lines("events.jsonl") if event["event"] == kind]

    def leader_and_members(self):
        event = self.events("epoch")[-1]
        return int(event["leader"][1]), [int(name[1]) for name in event["hosts"]]

    def check_bits(self, reached, up):
        """Against one host of four ranks, `up`."""
        self.start_on(up, PROGRAM, "train", "/mnt/shared/recipe.lua", "--run", "/mnt/shared/one", "--threads", "1")
        self.until(lambda: max(self.metrics("one"), default=0) > reached, "the run that nothing happens to", 600)
        self.signal_agent(up, "TERM")
        got, wanted = self.metrics(), self.metrics("one")
        for step in range(1, reached + 1):
            for key in ("loss", "grad_norm", "samples", "tokens"):
                self.assertEqual(got[step][key], wanted[step][key], f"step {step}: {key}")


class Train(TrainBed):
    def test_hosts_that_lose_their_power_and_are_booted_again(self):
        for index in (3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        for index, off_s in ((2, 4), (0, 0.3)):  # one that follows, for longer than dead_after, and the leader's
            self.hosts("kill", f"h{index}")
            time.sleep(off_s)
            self.hosts("boot", f"h{index}")
            self.start(index)
            first = self.until_step(first + 30)
        self.check_training()
        starts = [e for e in self.lines("events.jsonl") if e["event"] == "start"]
        # The dead host's memory is gone. (A busy machine may lose a host besides, whose memory is not.)
        self.assertEqual([e["source"] for e in starts if e["source"] != "memory"], ["fresh", "disk", "disk"])
        self.assertIn("silent for", self.all_logs())

    def test_a_host_that_stands_still_or_is_cut_off_is_waited_for_and_goes_on_with_its_memory(self):
        for index in (3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        for away, back in ((("freeze", "h1"), ("thaw", "h1")), (("cut", "h3"), ("heal", "h3")),
                           (("freeze", "h0"), ("thaw", "h0"))):
            before = len([e for e in self.lines("events.jsonl") if e["event"] == "start"])
            told = self.told_of_losses()
            self.hosts(*away)
            self.until(lambda: self.told_of_losses() > told, f"somebody to notice {away}")  # noqa: B023
            reached = max(self.metrics())
            self.hosts(*back)
            first = self.until_step(max(first, reached) + 20)
            starts = [e for e in self.lines("events.jsonl") if e["event"] == "start"]
            self.assertGreater(len(starts), before, f"{away} was not noticed{self.all_logs()}")
            self.assertEqual(starts[-1]["source"], "memory")
        self.check_training()

    def told_of_losses(self):
        """By the leader, and by those that have lost it."""
        return (len([e for e in self.lines("events.jsonl") if e["event"] == "failure"]) +
                sum(log.read_text().count("the leader is away") for log in self.logs.values()))

    def test_each_host_is_asked_for_the_memory_of_its_own_ranks(self):
        """64 MiB of /dev/shm a host, for a run that needs 130 or 510 in all."""
        for index in (3, 1, 2, 0):
            self.start(index, RUN, "--set", "model.width=320", "--set", "stop=T.steps(8)")
        self.until_done()
        self.assertEqual(max(self.metrics()), 8)
        for index in (2, 0):  # one that follows is refused without a leader
            log = self.start(index, "/mnt/shared/large", "--set", "model.width=640", "--set", "stop=T.steps(8)")
            self.until(lambda: "Nothing was started" in log.read_text(), "the refusal")  # noqa: B023
            self.assertIn("/dev/shm", log.read_text())
        self.assertFalse((self.shared_folder / "large").exists())

    def test_a_trace_of_hosts_whose_clocks_differ_is_on_one_clock(self):
        ahead_s = (5000, 0, 10000, 15000)  # of this machine's: it may have been up for less, and no clock is negative
        for index in (3, 1, 2, 0):
            self.logs[index] = self.start_on(
                index, "unshare", "--time", "--fork", "--monotonic", ahead_s[index], PROGRAM, "train",
                "/mnt/shared/recipe.lua", "--run", RUN, "--threads", 1, *self.where(), "--host-index", index, "--set",
                "stop=T.steps(30)", "--trace", "steps=20..24")
        self.until_done()
        events = json.loads((self.shared_folder / "run" / "trace" / "trace.json").read_text())["traceEvents"]
        ends = {}  # of the same collective on all ranks
        for event in events:
            if event["ph"] == "X" and event["name"] == "broadcast" and "step order" in event["args"].values():
                ends.setdefault(event["pid"], []).append(event["ts"] + event["dur"])
        self.assertEqual(sorted(ends), list(range(8)))
        apart_ms = [(max(at) - min(at)) / 1e3 for at in zip(*ends.values(), strict=True)]
        print(f"ends of a broadcast: {min(apart_ms):.2f} to {max(apart_ms):.2f} ms apart")
        # A wrong clock is so in all of them; a rank that had to wait for its processor in one.
        self.assertLess(min(apart_ms), 50)

    def test_a_run_folder_that_is_not_shared_is_told(self):
        for index in (0, 1, 2):
            self.start(index)
        log = self.start(3, run="/mnt/local/run")
        self.until(lambda: "its token is not there" in log.read_text(), "the error")


class Spares(TrainBed):
    """Four hosts train, a fifth waits; whoever is lost, leader or not, the run goes on without a person."""

    count = 5
    steps = 500
    layout = dict(tp=1, dp=4, sp="false")

    def setUp(self):
        super().setUp()
        (self.shared_folder / "cluster.lua").write_text(
            'return require("cairn").hosts { names = { "h0", "h1", "h2", "h3", "h4" }, spares = 1, ranks_per_host = 1,\n'
            '                                dead_after = 2, spare_after = 1 }\n')

    def where(self):
        return ("--cluster", "/mnt/shared/cluster.lua")

    def epochs(self):
        """(leader, hosts by their place) of each epoch."""
        out = []
        for path in sorted((self.shared_folder / "run" / "cluster").glob("epoch-*.json")):
            epoch = json.loads(path.read_text())
            names = [member["name"] for member in epoch["members"]]
            out.append((names[epoch["leader"]], names))
        return out

    def until_epoch(self, hosts):
        """Who leads it."""
        return self.until(lambda: self.epochs() and self.epochs()[-1][1] == hosts and self.epochs()[-1][0],
                          f"an epoch with {hosts}")

    def test_a_spare_takes_the_place_of_whoever_is_lost_and_another_host_leads(self):
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        self.hosts("kill", "h2")
        self.assertEqual(self.until_epoch(["h0", "h1", "h4", "h3"]), "h0")
        first = self.until_step(first + 30)
        self.hosts("boot", "h2")
        log = self.start(2)
        self.until(lambda: "a spare: waits" in log.read_text(), "h2 as a spare")
        self.hosts("kill", "h0")
        leader = self.until_epoch(["h2", "h1", "h4", "h3"])
        self.assertIn(leader, ("h1", "h4", "h3"))
        first = self.until_step(first + 30)
        self.hosts("boot", "h0")
        log = self.start(0)
        self.until(lambda: "a spare: waits" in log.read_text(), "h0 as a spare")
        self.hosts("kill", leader)
        self.until_epoch([{leader: "h0"}.get(name, name) for name in ("h2", "h1", "h4", "h3")])
        self.check_training(up="h0")
        sources = [event["source"] for event in self.lines("events.jsonl") if event["event"] == "start"]
        # Three places have lost their memory. (On a slow disk nothing may be saved yet, and the run begins anew.)
        self.assertEqual(len([source for source in sources if source != "memory"]), 4)

    def memory_on(self, host):
        return self.hosts("run", f"h{host}", "sh", "-c", "ls /dev/shm | grep '^cairn-' || true").split()

    def test_memory_of_an_agent_that_died_alone_goes_when_the_run_has_gone_on_without_it(self):
        """The host lives, and its agent is started again: once within `spare_after`, once when a spare has its place."""
        cluster = self.shared_folder / "cluster.lua"
        cluster.write_text(cluster.read_text().replace("spare_after = 1", "spare_after = 8"))
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        self.signal_agent(3, "KILL")
        self.start(3)
        first = self.until_step(first + 30)
        self.assertIn("took over the snapshot memory", self.logs[3].read_text())
        self.assertEqual(self.epochs()[-1][1], ["h0", "h1", "h2", "h3"])
        self.signal_agent(2, "KILL")
        self.until_epoch(["h0", "h1", "h4", "h3"])
        (left,) = self.memory_on(2)
        log = self.start(2)
        self.until(lambda: "a spare: waits" in log.read_text(), "h2 as a spare")
        self.assertIn(f"removed /dev/shm/{left} of this run's dead agent", log.read_text())
        self.assertEqual(self.memory_on(2), [])
        first = self.until_step(first + 30)
        # In another place it has memory of that one, and nothing besides.
        self.hosts("kill", "h1")
        self.until_epoch(["h0", "h2", "h4", "h3"])
        self.until_step(first + 30)
        self.assertEqual(len(self.memory_on(2)), 1)
        self.check_training(up="h0")

    def test_a_leader_that_stood_still_and_comes_back_commits_nothing_and_becomes_a_spare(self):
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        self.hosts("freeze", "h0")
        leader = self.until_epoch(["h4", "h1", "h2", "h3"])
        self.until_step(first + 20)
        self.hosts("thaw", "h0")
        self.until(lambda: "a spare: waits" in self.logs[0].read_text(), "h0 as a spare")
        self.assertIn(f"the run is led by {leader} (", self.logs[0].read_text())
        # What is asked of another leader than the first: a save at once, and a stop.
        self.signal_agent(int(leader[1]), "USR1")
        self.until(lambda: [e for e in self.lines("events.jsonl") if e["event"] == "saved" and e["asked"]], "the save")
        self.signal_agent(2, "TERM")
        self.until_done()
        self.assertLess(max(self.metrics()), self.steps)
        self.until(lambda: not any(self.each_agent(k, "echo") for k in range(self.count)), "the end of all agents")
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        self.check_training(time=2)
        self.hosts("run", "h3", PROGRAM, "ckpt", "verify", RUN)


    def in_order(self):
        """Each line of a step follows the one before, or the step from where the run resumed."""
        last = 0
        for line in self.lines("metrics.jsonl"):
            if "resumed_at" in line:
                last = line["resumed_at"]
            elif "step" in line:
                self.assertEqual(line["step"], last + 1)
                last = line["step"]

    def test_an_agent_that_stood_still_and_leads_no_more_writes_nothing_and_its_loss_is_recorded(self):
        """Its ranks continue for a while, and what they have said meanwhile waits for it."""
        for index in (4, 3, 1, 2, 0):
            self.start(index)
        first = self.until_step(20)
        self.signal_agent(0, "STOP")
        self.until_epoch(["h4", "h1", "h2", "h3"])
        self.until_step(first + 20)
        self.signal_agent(0, "CONT")
        self.until(lambda: "a spare: waits" in self.logs[0].read_text(), "h0 as a spare")
        self.until_done()
        self.in_order()
        failures = [event for event in self.lines("events.jsonl") if event["event"] == "failure"]
        self.assertEqual([(event["host"], event["class"]) for event in failures], [("h0", "host_lost")])
        record = json.loads((self.shared_folder / "run" / "failure.json").read_text())
        self.assertEqual((record["host"], record["class"]), ("h0", "host_lost"))

    def test_a_leader_that_begins_last_has_a_spare_stand_in_for_a_host_that_never_comes(self):
        cluster = self.shared_folder / "cluster.lua"
        cluster.write_text(cluster.read_text().replace("spare_after = 1", "spare_after = 1, join_timeout = 8"))
        logs = [self.start(index) for index in (2, 3, 4)]
        self.until(lambda: all("still waits: " in log.read_text() for log in logs), "hosts that wait for their leader")
        self.start(0)
        self.until_epoch(["h0", "h4", "h2", "h3"])
        self.until_step(20)


class StoreAway(TrainBed):
    """Two hosts train, and an etcd on a third one keeps who leads."""

    count = 3
    steps = 1_000_000
    layout = dict(tp=1, dp=2, sp="false")

    def setUp(self):
        super().setUp()
        if shutil.which("etcd") is None:
            self.skipTest("etcd: not installed (tools/setup cluster)")
        self.start_on(2, "etcd", "--data-dir", "/mnt/local/etcd", "--log-level", "error", "--listen-client-urls",
                      "http://0.0.0.0:2379", "--advertise-client-urls", "http://h2:2379")
        (self.shared_folder / "cluster.lua").write_text(
            'return require("cairn").hosts { names = { "h0", "h1" }, ranks_per_host = 1, store = "etcd://h2:2379" }\n')

    def where(self):
        return ("--cluster", "/mnt/shared/cluster.lua")

    def test_ranks_that_fail_while_the_store_is_away_start_again_once_it_answers(self):
        for index in (1, 0):
            self.start(index)
        self.until_step(20)
        self.hosts("freeze", "h2")
        self.signal_rank(1, "KILL")
        self.until(lambda: "is not known, and is asked again" in self.logs[0].read_text(), "the leader's question")
        reached = max(self.metrics())
        self.hosts("thaw", "h2")
        self.until_step(reached + 10)
        self.assertEqual({event["source"] for event in self.lines("events.jsonl") if event["event"] == "start"},
                         {"fresh", "memory"})


class TrainFuse(Train):
    """Each host with a mount of its own, whose caches show names and sizes late: NFS as users have it."""

    shared = "fuse"
    test_a_host_that_stands_still_or_is_cut_off_is_waited_for_and_goes_on_with_its_memory = None
    test_a_run_folder_that_is_not_shared_is_told = None
    test_a_trace_of_hosts_whose_clocks_differ_is_on_one_clock = None
    test_each_host_is_asked_for_the_memory_of_its_own_ranks = None


if __name__ == "__main__":
    main()
