"""Random faults of a run over hosts: power off, resets, hosts that stand still, cuts in one and both directions, links that
flap, killed agents, at any time and within saves. After each the run goes on by itself; every step that it calls saved
holds; at the end its bits are those of a run that nothing happened to.

CAIRN_FAULTS=A:B takes the faults A to B - 1 of their list (the same in every run; default: a few), CAIRN_FAULTS_SHARED=fuse
a cached folder, CAIRN_FAULTS_STORE=etcd lets an etcd of three further hosts decide who leads; one of them loses its power
in the middle. What each took is printed: seconds from the end of the fault to the third new step."""

import json
import os
import random
import shutil
import statistics
import time

import train_test
from bed import main
from train_test import PROGRAM, RUN, TrainBed

FIRST, END = map(int, os.environ.get("CAIRN_FAULTS", "0:8").split(":"))


STORE = os.environ.get("CAIRN_FAULTS_STORE", "folder")


class Faults(TrainBed):
    count = 7 if STORE == "etcd" else 4
    shared = os.environ.get("CAIRN_FAULTS_SHARED", "bind")
    life_s = 2400
    steps = 1_000_000
    save = 10

    def setUp(self):
        super().setUp()
        store = self.start_etcd() if STORE == "etcd" else "folder"
        (self.shared_folder / "cluster.lua").write_text(
            'return require("cairn").hosts { names = { "h0", "h1", "h2", "h3" }, ranks_per_host = 2, dead_after = 1,\n'
            f'                                store = "{store}" }}\n')
        recipe = self.shared_folder / "recipe.lua"
        recipe.write_text(recipe.read_text().replace("steps = 10 }", f"steps = {self.save} }}", 1))

    def start_etcd(self):
        """On h4, h5 and h6; the address of the store."""
        if shutil.which("etcd") is None:
            self.skipTest("etcd: not installed (tools/setup cluster)")
        members = range(4, 7)
        address = lambda k, port: f"http://10.77.0.{10 + k}:{port}"  # noqa: E731
        every = ",".join(f"m{k}={address(k, 2380)}" for k in members)
        for k in members:
            self.start_on(k, "etcd", "--name", f"m{k}", "--data-dir", "/mnt/local/etcd", "--log-level", "error",
                          "--listen-client-urls", address(k, 2379), "--advertise-client-urls", address(k, 2379),
                          "--listen-peer-urls", address(k, 2380), "--initial-advertise-peer-urls", address(k, 2380),
                          "--initial-cluster", every)
        return "etcd://" + ",".join(f"h{k}:2379" for k in members)

    def where(self):
        return ("--cluster", "/mnt/shared/cluster.lua")

    def newest(self, folder="run"):
        """The last step of metrics.jsonl, read from its end: the file is long."""
        try:
            with open(self.shared_folder / folder / "metrics.jsonl", "rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
                lines = [line for line in f.read().split(b"\n")[:-1] if b'"step"' in line]
            return json.loads(lines[-1])["step"] if lines else 0
        except FileNotFoundError:
            return 0

    def until_newest(self, step):
        return self.until(lambda: self.newest() >= step, f"step {step} (at {self.newest()})")

    def healed(self):
        """Seconds until three new steps are there."""
        begin, first = time.monotonic(), self.newest()
        last = first
        count = 0
        end = begin + train_test.PATIENCE_S
        while count < 3:
            if time.monotonic() > end:
                self.fail(f"no new steps after {first}{self.all_logs()}")
            now = self.newest()
            if now != last:  # it may have gone back
                count += now - last if now > last else 1
                last = now
            time.sleep(0.005)
        return time.monotonic() - begin

    def strike(self, kind, host, draw):
        """Ends with the fault."""
        name, other = f"h{host}", f"h{(host + draw.randrange(1, 4)) % 4}"
        if kind in ("kill", "crash"):
            self.hosts(kind, name)
            time.sleep(draw.uniform(0, 3))
            self.hosts("boot", name)
            self.start(host)
        elif kind == "freeze":
            self.hosts("freeze", name)
            time.sleep(draw.uniform(0.5, 9))
            self.hosts("thaw", name)
        elif kind == "agent":
            self.signal_agent(host, "KILL")
            self.start(host)
        elif kind in ("cut", "cut a pair", "cut one way"):
            words = {"cut": (), "cut a pair": (other,), "cut one way": (other, "one")}[kind]
            self.hosts("cut", name, *words)
            time.sleep(draw.uniform(0.3, 9))
            self.hosts("heal")
        else:
            for _ in range(draw.randrange(2, 6)):
                self.hosts("cut", name)
                time.sleep(draw.uniform(0.1, 1.2))
                self.hosts("heal")
                time.sleep(draw.uniform(0.1, 0.6))

    def check_saved(self):
        """Every step that the run has called saved, and that its retention has left, holds."""
        self.hosts("run", "h3", PROGRAM, "ckpt", "verify", RUN)

    def finish(self, took):
        for kind in sorted(took):
            print(f"  {kind}: {len(took[kind])} x, median {statistics.median(took[kind]):.2f} s, worst {max(took[kind]):.2f} s")
        every = [seconds for one in took.values() for seconds in one]
        print(f"faults {FIRST} to {END - 1} ({self.shared}): median {statistics.median(every):.2f} s, worst {max(every):.2f} s")
        self.signal_agent(2, "TERM")
        self.until_done()
        self.check_saved()
        reached = self.newest()
        epochs = [event["epoch"] for event in self.lines("events.jsonl") if event["event"] == "epoch"]
        print(f"{reached} steps, {len(epochs)} epochs, the store: {STORE}")
        # Each has one leader: told once.
        self.assertEqual(len(epochs), len(set(epochs)))
        files = list((self.shared_folder / "run" / "cluster").glob("epoch-*.json"))
        self.assertEqual(len(files) > 0, STORE == "folder")
        self.start_on(3, PROGRAM, "train", "/mnt/shared/recipe.lua", "--run", "/mnt/shared/one", "--threads", "1")
        self.until(lambda: self.newest("one") > reached, "the run that nothing happens to", 1200)
        self.signal_agent(3, "TERM")
        got, wanted = self.metrics(), self.metrics("one")
        for step in range(1, reached + 1):
            for key in ("loss", "grad_norm", "samples"):
                self.assertEqual(got[step][key], wanted[step][key], f"step {step}: {key}")

    def test_whatever_happens_the_run_goes_on(self):
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until_newest(20)
        took = {}
        kinds = ("kill", "crash", "freeze", "agent", "cut", "cut a pair", "cut one way", "flap")
        for number in range(FIRST, END):
            draw = random.Random(number)
            kind, host = kinds[number % len(kinds)], draw.randrange(4)
            self.until_newest(self.newest() + draw.randrange(5, 25))
            if STORE == "etcd" and number == (FIRST + END) // 2:
                self.hosts("kill", "h6")
            self.strike(kind, host, draw)
            seconds = self.healed()
            took.setdefault(kind, []).append(seconds)
            print(f"{number}: {kind} h{host}: {seconds:.2f} s", flush=True)
            if number % 10 == 9:
                self.check_saved()
        self.finish(took)


class Saves(Faults):
    """Agents, hosts and the leader's killed while a save is under way."""

    save = 2
    test_whatever_happens_the_run_goes_on = None

    def test_no_step_that_is_called_saved_is_lost(self):
        for index in (3, 1, 2, 0):
            self.start(index)
        self.until_newest(20)
        took = {}
        folder = self.shared_folder / "run" / "checkpoints"
        under_way = lambda: any(name.startswith(".tmp-") for name in os.listdir(folder))  # noqa: E731
        for number in range(FIRST, END):
            draw = random.Random(1000 + number)
            kind, host = ("agent", "crash")[number % 2], draw.choice((0, 0, 1, 2, 3))
            self.until(under_way, "a save")
            time.sleep(draw.uniform(0, 0.04))
            self.strike(kind, host, draw)
            seconds = self.healed()
            took.setdefault(f"{kind}, {'leader' if host == 0 else 'another'}", []).append(seconds)
            if number % 10 == 9:
                self.check_saved()
        self.finish(took)


if __name__ == "__main__":
    main()
