#!/usr/bin/env python3
"""Kills real processes at random instants and demands that nothing is lost that was promised.

    crashtest.py build/release/cairn --kills 10000            as many as that, however long it takes
    crashtest.py build/release/cairn --seconds 60             what fits into that time, but at least --at-least
    crashtest.py build/release/cairn --kills 50 --seed 7      the draws (victim, aim, delay) of an earlier run

Victims, drawn by chance: one rank; all ranks; the agent; the whole process group; the group and then its shared memory
(a lost machine); `cairn ckpt reshard`, plain or with --compress zstd. A kill waits for a random delay, or aims: at the start of the processes
(restore), at a save (a work folder is there), at its commit (the manifest is written), at retention (a trash folder is
there). What was under way at each kill is counted and printed.

After each kill:
  - every folder named step-N verifies: a half-written checkpoint never looks whole;
  - no acknowledged save is gone, unless `keep` newer ones are there;
  - the run goes on from a step no older than the newest acknowledged save; when memory is left, from no older a step
    than shared memory promises (docs/operations/failures.md, "What survives what"): the last step that all ranks published,
    which is the last one told or the one before (where snapshots are copied, one more before), or a save that was under
    way;
  - when memory is lost, from exactly the newest checkpoint that has its name;
  - every loss and gradient norm equals, bit for bit, that of a run that nobody touched, as does the last checkpoint; what
    is told in metrics.jsonl has no gap;
  - a resharding that was killed leaves its source alone and its target without the step or with the whole of it, and
    started again it ends with the bytes of one that was not killed.

It uses the program and the public files of a run, nothing else. Shared memory is private to the test where the system
allows a mount namespace, so that other runs of the same user cannot clear it away.
"""

import argparse
import collections
import ctypes
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from own_memory import own_shared_memory  # noqa: E402

PATIENCE_S = 180  # of any wait; far beyond what a loaded machine needs, so that a hang fails instead of stalling CI
KEEP = 2

RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 11, stop = T.steps({steps}), precision = "fp32",
  model = T.gpt {{ layers = 2, width = {width}, heads = 4, context = 16, vocab = 257 }},
  tokenizer = T.bytes,
  data = T.megatron {{ prefix = "{prefix}", split = {{ 90, 10 }} }},
  batch = {{ samples = 4, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-2, lr = T.schedule {{ T.warmup {{ over = T.steps(4) }}, T.cosine {{ to = 1e-3 }} }},
                        weight_decay = 0.1, clip = 1.0, zero = {zero} }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp}, sequence_parallel = false }},
  schedule = "1f1b",
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = {save} }} }}, keep = {{ T.last({keep}) }},
                              snapshot = T.every {{ steps = 1 }}, in_flight = {in_flight}, snapshot_by = "{by}" }},
}}
"""

# Small steps, so that a kill falls into a copy or a save as often as into arithmetic; a save at each step or at some,
# one at a time or several beside each other.
SHAPES = [
    dict(name="dp2-every", tp=1, pp=1, dp=2, zero=1, width=64, save=1, steps=400, in_flight=1, by="banks"),
    dict(name="tp2-some", tp=2, pp=1, dp=1, zero=0, width=128, save=20, steps=400, in_flight=1, by="banks"),
    dict(name="dp2-flight", tp=1, pp=1, dp=2, zero=1, width=64, save=1, steps=400, in_flight=3, by="banks"),
    dict(name="pp2-some", tp=1, pp=2, dp=1, zero=0, width=32, save=7, steps=600, in_flight=1, by="banks"),
    dict(name="dp2-large", tp=1, pp=1, dp=2, zero=0, width=256, save=4, steps=120, in_flight=2, by="banks"),  # slow saves
    dict(name="dp2-copied", tp=1, pp=1, dp=2, zero=0, width=128, save=5, steps=400, in_flight=1, by="copy"),
    dict(name="tp2-copied", tp=2, pp=1, dp=1, zero=0, width=256, save=4, steps=120, in_flight=2, by="copy"),
]
VICTIMS = [("rank", 30), ("all ranks", 10), ("agent", 15), ("group", 15), ("machine", 15), ("reshard", 15)]
AIMS = [("any", 45), ("start", 15), ("persist", 15), ("commit", 15), ("retention", 10)]


class Broken(Exception):
    """A promise that was not kept."""


def draw_of(draw, weighted):
    return draw.choices([name for name, _ in weighted], [weight for _, weight in weighted])[0]


def adopt_orphans():
    """Ranks whose agent was killed become this process's children, which can then wait for their end."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def write_tokens(prefix, count, seed=7):
    """A Megatron .bin/.idx pair of one-byte words."""
    draw = random.Random(seed)
    words = [bytes(draw.randrange(97, 123) for _ in range(draw.randrange(2, 7))) for _ in range(40)]
    text = bytearray()
    while len(text) < count:
        text += draw.choice(words) + b" "
    pathlib.Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{count}H", *text[:count]))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    index += struct.pack("<i", count) + struct.pack("<q", 0) + struct.pack("<2q", 0, 1)
    pathlib.Path(f"{prefix}.idx").write_bytes(index)


class Lines:
    """JSON lines of a file that grows: each call gives the whole ones that are new. A kill may tear a line; the writer
    that goes on closes it, and what does not parse is no line of ours."""

    def __init__(self, path):
        self.path, self.at, self.torn = path, 0, 0

    def new(self):
        try:
            with open(self.path, "rb") as f:
                f.seek(self.at)
                data = f.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.at += end
        out = []
        for line in data[:end].split(b"\n"):
            if not line:
                continue
            try:
                out.append(json.loads(line))
            except ValueError:
                self.torn += 1
        return out


def payload_hashes(step_dir):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(step_dir.glob("*.h5"))}


class Reference:
    """One run that nobody touches."""

    def __init__(self, test, shape):
        self.shape = shape
        self.recipe = test.folder / f"{shape['name']}.lua"
        self.recipe.write_text(RECIPE.format(prefix=test.folder / "tokens", keep=KEEP, **shape))
        self.ranks = shape["tp"] * shape["pp"] * shape["dp"]
        run = test.folder / f"reference-{shape['name']}"
        test.call(["train", self.recipe, "--run", run, "--threads", 1, "--nproc", self.ranks])
        self.steps = {m["step"]: (m["loss"], m["grad_norm"]) for m in Lines(run / "metrics.jsonl").new() if "loss" in m}
        if sorted(self.steps) != list(range(1, shape["steps"] + 1)):
            raise Broken(f"the reference run {run} lacks steps")
        self.last_step_dir = run / "checkpoints" / f"step-{shape['steps']:08d}"
        self.files = payload_hashes(self.last_step_dir)
        metrics = [m for m in Lines(run / "metrics.jsonl").new() if "loss" in m]
        self.in_snapshot = sum(m["checkpoint_lost_ms"] for m in metrics) / sum(m["step_ms"] for m in metrics)


class Run:
    """A run that is killed again and again until it has done all its steps."""

    def __init__(self, test, reference, number):
        self.test, self.reference = test, reference
        # By turns on a disk, with io_uring and slow syncs, and in memory, where more kills fit into the time.
        self.path = (test.memory if test.memory and number % 4 else test.folder) / f"run-{number}"
        self.checkpoints = self.path / "checkpoints"
        self.log = test.folder / f"run-{number}.out"
        self.metrics, self.events = Lines(self.path / "metrics.jsonl"), Lines(self.path / "events.jsonl")
        self.job = None
        self.step = 0  # the last one told
        self.told = set()
        self.acknowledged = []
        self.starts = 0
        self.moved = False  # a step since the last start
        self.in_memory = 0  # told since shared memory began, so in it
        self.whole = {}  # step -> inode of manifests that verified

    # --- processes

    def launch(self):
        with open(self.log, "ab") as out:
            self.job = subprocess.Popen(
                [self.test.program, "train", self.reference.recipe, "--run", self.path, "--threads", "1", "--nproc",
                 str(self.reference.ranks), "--set", "restart.max_restarts=1000000", "--set", "restart.backoff=0"],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.test.folder,
                start_new_session=True)
        self.moved = False

    def ranks(self):
        out = []
        try:
            pids = pathlib.Path(f"/proc/{self.job.pid}/task/{self.job.pid}/children").read_text().split()
        except OSError:
            return out
        for pid in pids:
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"_rank" in words:
                out.append(int(pid))
        return out

    def bury(self):
        """Waits until agent and ranks are gone (the ranks get the agent's death as a signal)."""
        self.job.wait(PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if os.waitpid(-self.job.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)
            except ChildProcessError:
                break
        else:
            raise Broken("ranks outlive their agent")
        self.job = None

    # --- what the public files say

    def look(self):
        """Takes in new events and metrics, comparing each step with the reference."""
        for event in self.events.new():
            kind = event["event"]
            if kind == "saved":
                self.acknowledged.append(event["step"])
                self.test.saves += 1
                self.test.over += event["reused_files"] > 0
            elif kind == "start":
                self.starts += 1
                self.moved = False
                self.start_event = event
            elif kind == "save_failed":
                raise Broken(f"a save failed: {event}")
        for line in self.metrics.new():
            if "resumed_at" in line:
                self.step = line["resumed_at"]
                continue
            if "loss" not in line:
                continue
            got, wanted = (line["loss"], line["grad_norm"]), self.reference.steps[line["step"]]
            if got != wanted:
                raise Broken(f"step {line['step']}: loss and gradient norm {got}, undisturbed {wanted}")
            self.step = line["step"]
            self.told.add(self.step)
            self.in_memory = max(self.in_memory, self.step)
            self.moved = True

    def names(self):
        try:
            return os.listdir(self.checkpoints)
        except FileNotFoundError:
            return []

    def on_disk(self):
        return sorted(int(name[5:]) for name in self.names() if name.startswith("step-"))

    def phase(self):
        """What is under way, as the folder tells."""
        names = self.names()
        if any(name.startswith(".trash-") for name in names):
            return "retention"
        for name in names:
            if name.startswith(".tmp-"):
                there = os.path.exists(self.checkpoints / name / "manifest.json")
                return "commit" if there else "persist"
        return "step" if self.moved else "start"

    def saves_under_way(self):
        return sum(name.startswith(".tmp-") for name in self.names())

    def check_disk(self):
        """While nobody writes."""
        steps = self.on_disk()
        for step in steps:
            folder = self.checkpoints / f"step-{step:08d}"
            try:
                mark = os.stat(folder / "manifest.json").st_ino
            except FileNotFoundError:
                raise Broken(f"{folder} has no manifest")
            if self.whole.get(step) == mark:
                continue
            done = self.test.call(["ckpt", "verify", folder], check=False)
            if done.returncode != 0:
                raise Broken(f"{folder} looks like a checkpoint and is none:\n{done.stdout}")
            self.whole[step] = mark
        for step in set(self.acknowledged):
            if step not in steps and sum(other > step for other in steps) < KEEP:
                raise Broken(f"the save of step {step} was acknowledged and is gone; there are {steps}")

    def clock(self, what):
        now = time.monotonic()
        self.test.spent[what] += now - self.test.mark
        self.test.mark = now

    # --- one kill

    def wait_for(self, condition, seconds=PATIENCE_S):
        """Until `condition()` or the end of the run; whether the condition came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.job.poll() is not None:
                return bool(condition())
            time.sleep(0.0005)
        return False

    def take_aim(self, aim, delay_s):
        if aim == "start":
            time.sleep(delay_s * 2)
            return
        if not self.wait_for(lambda: (self.look(), self.moved)[1]) and self.job.poll() is None:
            raise Broken(f"no step within {PATIENCE_S} s\n{self.tail()}")
        if aim == "any":
            time.sleep(delay_s)
            return
        # Not every disk is slow enough to be seen at it: then the kill comes anyway.
        self.wait_for(lambda: self.phase() == aim, seconds=0.3)
        time.sleep(delay_s / 50)

    def tail(self):
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def finished(self):
        """The run is over although nobody killed it."""
        code = self.job.wait()
        self.job = None
        if code != 0:
            raise Broken(f"the run ended with {code}\n{self.tail()}")
        self.look()
        self.check_disk()
        missing = set(self.reference.steps) - self.told
        if missing:
            raise Broken(f"{self.path}: steps {sorted(missing)[:10]} were never told")
        last = self.checkpoints / self.reference.last_step_dir.name
        if payload_hashes(last) != self.reference.files:
            raise Broken(f"{last} differs from the undisturbed run's")

    def kill(self, victim, aim, delay_s):
        """Returns (phase, steps lost) or None when the run was over before."""
        if self.job is None:
            self.launch()
        self.take_aim(aim, delay_s)
        self.look()
        if self.job.poll() is not None:
            self.finished()
            return None
        told, starts, phase = self.in_memory, self.starts, self.phase()
        self.clock("aim")
        if victim in ("rank", "all ranks"):
            pids = []
            if not self.wait_for(lambda: pids.extend(self.ranks()) or pids):
                self.finished()
                return None
            for pid in pids if victim == "all ranks" else [self.test.draw.choice(pids)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            # A new generation; or the victim had done its work already and the run ends.
            if not self.wait_for(lambda: (self.look(), self.starts > starts)[1]):
                if self.job.poll() is None:
                    raise Broken(f"no new start within {PATIENCE_S} s\n{self.tail()}")
                self.finished()
                return None
            return phase, self.check_start(told, memory=True)
        if victim == "agent":
            os.kill(self.job.pid, signal.SIGKILL)
        else:
            os.killpg(self.job.pid, signal.SIGKILL)
        self.bury()
        self.clock("bury")
        self.look()
        told = self.in_memory
        if (left := self.phase()) in ("persist", "commit", "retention"):
            phase = left  # exactly: nobody has cleared it away
        self.test.in_flight[self.saves_under_way()] += 1
        self.check_disk()
        self.clock("verify")
        memory = victim != "machine"
        if not memory:
            for name in self.test.memory_of(self):
                os.unlink(f"/dev/shm/{name}")
        elif not self.test.private and not self.test.memory_of(self):
            memory = False  # another run of this user has cleared it away
        newest = max(self.on_disk(), default=0)
        starts = self.starts
        self.launch()
        if not self.wait_for(lambda: (self.look(), self.starts > starts)[1]):
            if self.job.poll() is None:
                raise Broken(f"no start within {PATIENCE_S} s\n{self.tail()}")
            self.finished()  # everything was done
            return phase, 0
        if memory:
            return phase, self.check_start(told, memory=True)
        resumed = self.start_event["step"]
        self.in_memory = resumed
        if resumed != newest or "shared memory" in self.start_event["from"]:
            raise Broken(f"without memory it went on from {self.start_event}, the newest on disk was {newest}")
        if untold := set(range(1, resumed + 1)) - self.told:
            raise Broken(f"step {resumed} is on disk, steps {sorted(untold)} are not in metrics.jsonl")
        return phase, 0

    def check_start(self, told, memory):
        resumed, acknowledged = self.start_event["step"], max(self.acknowledged, default=0)
        if resumed < min(acknowledged, told):
            raise Broken(f"it went on from {self.start_event}; step {acknowledged} was acknowledged before")
        # The ranks may not all have published the step that one of them has told, and have copied the one before that.
        promised = told - (2 if self.reference.shape["by"] == "copy" else 1)
        lost = max(0, promised - resumed)
        if lost and (self.test.exact or resumed < min(promised, acknowledged)):
            raise Broken(f"it went on from {self.start_event}; step {told} was told before")
        self.in_memory = resumed
        return lost

    def close(self):
        if self.job is not None and self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)
            self.bury()


class Reshards:
    """Kills of `cairn ckpt reshard`: two layouts of the state that a reference run has ended with."""

    def __init__(self, test, reference):
        self.test, self.source, self.number = test, reference.last_step_dir, 0
        self.source_files = payload_hashes(self.source)
        self.meshes = []
        for mesh, how in (("tp=2,dp=2", []), ("tp=4", ["--memory", "8MiB"]), ("pp=2", []), ("tp=2,dp=2", ["--compress", "zstd"])):
            whole = test.folder / f"reshard-{len(self.meshes)}"
            begin = time.monotonic()
            test.call(["ckpt", "reshard", self.source, whole, "--mesh", mesh, *how])
            seconds = time.monotonic() - begin
            self.meshes.append((["--mesh", mesh, *how], seconds, payload_hashes(whole / "checkpoints" / self.source.name)))

    def kill(self, aim, part):
        how, seconds, files = self.test.draw.choice(self.meshes)
        if self.number == 0 or self.test.draw.random() < 0.3:  # else over what the last kill has left
            self.number += 1
            shutil.rmtree(self.target(), ignore_errors=True)
        target = self.target()
        checkpoints = target / "checkpoints"
        step = checkpoints / self.source.name
        command = [self.test.program, "ckpt", "reshard", str(self.source), str(target), *how, "--overwrite"]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        end = time.monotonic() + seconds * 1.2
        if aim in ("persist", "commit"):
            while time.monotonic() < end and job.poll() is None:
                work = list(checkpoints.glob(".tmp-*"))
                if work and (aim == "persist" or (work[0] / "manifest.json").exists()):
                    break
            time.sleep(part * seconds / 20)
        else:
            time.sleep(part * seconds * 1.1)
        job.kill()
        job.wait()
        job.stderr.close()
        if job.returncode not in (0, -signal.SIGKILL):
            raise Broken(f"{command} ended with {job.returncode}")
        work = list(checkpoints.glob(".tmp-*"))
        if job.returncode == 0:
            phase = "done"
        elif any((w / "manifest.json").exists() for w in work):
            phase = "commit"
        else:
            phase = "write" if work else "plan"
        if payload_hashes(self.source) != self.source_files:
            raise Broken(f"resharding changed its source {self.source}")
        if step.exists():
            done = self.test.call(["ckpt", "verify", step], check=False)
            if done.returncode != 0:
                raise Broken(f"{step} looks like a checkpoint and is none:\n{done.stdout}")
        elif job.returncode == 0:
            raise Broken(f"{command} was done, but {step} is not there")
        if self.test.draw.random() < 0.2:
            self.test.call(command[1:])  # clears away what the kills have left
            if payload_hashes(step) != files:
                raise Broken(f"{step}, started again, differs from a resharding that was not killed")
            if left := [w.name for w in checkpoints.iterdir() if w.name.startswith(".")]:
                raise Broken(f"{checkpoints}: started again, it left {left}")
        return phase

    def target(self):
        return self.test.folder / "resharded"


class CrashTest:
    def __init__(self, args):
        self.program = os.path.abspath(args.program)
        self.args, self.exact = args, not args.lenient
        self.draw = random.Random(args.seed)
        self.private = own_shared_memory("1g", args.pages == "huge" or (args.pages is None and args.seed % 2 == 0))
        adopt_orphans()
        root = pathlib.Path(self.program).parent / "test-tmp"
        root.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="crash-", dir=root))
        self.memory = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm")) if self.private else None  # goes with the namespace
        write_tokens(self.folder / "tokens", 6000)
        self.phases = collections.defaultdict(collections.Counter)
        self.in_flight = collections.Counter()
        self.saves = self.over = 0  # told; of them those over files of removed checkpoints
        self.lost = collections.Counter()
        self.spent = collections.Counter()
        self.kills = self.runs = self.done = 0
        self.now = "before the first"
        self.run = None

    def call(self, words, check=True):
        done = subprocess.run([self.program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, text=True, errors="replace", timeout=4 * PATIENCE_S)
        if check and done.returncode != 0:
            raise Broken(f"cairn {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}")
        return done

    def memory_of(self, run):
        """Names in /dev/shm that hold this run's id in their first page."""
        try:
            run_id = json.loads((run.path / "run.json").read_text())["id"].encode()
        except (OSError, ValueError):
            return []
        out = []
        for path in pathlib.Path("/dev/shm").glob("cairn-*"):
            try:
                with open(path, "rb") as f:
                    if run_id in f.read(4096):
                        out.append(path.name)
            except OSError:
                pass
        return out

    def enough(self):
        if self.args.kills is not None:
            return self.kills >= self.args.kills
        return self.kills >= self.args.at_least and time.monotonic() - self.begin > self.args.seconds

    def go(self):
        references = [Reference(self, shape) for shape in SHAPES]
        reshards = Reshards(self, references[0])
        self.begin = time.monotonic()
        in_snapshot = 0  # expected number of kills that fell into one: nothing public tells of a single kill
        while not self.enough():
            self.now = victim, aim, part = draw_of(self.draw, VICTIMS), draw_of(self.draw, AIMS), self.draw.random()
            if victim == "reshard":
                phase = reshards.kill(aim, part)
            else:
                if self.run is None:
                    self.runs += 1
                    self.run = Run(self, references[(self.runs + self.args.seed) % len(references)], self.runs)
                self.mark = time.monotonic()
                share = self.run.reference.in_snapshot
                result = self.run.kill(victim, aim, part * 0.05)
                self.run.clock("restart")
                if result is None or self.run.job is None:  # all steps done: the next run
                    self.done += 1
                    shutil.rmtree(self.run.path)
                    self.run = None
                if result is None:
                    continue
                phase, lost = result
                self.lost[lost] += 1
                in_snapshot += share if phase != "start" else 0
            self.kills += 1
            self.phases[victim][phase] += 1
        took = time.monotonic() - self.begin
        # The last run is left in peace, and must end as if nothing had been.
        if self.run is not None:
            if self.run.job is None:
                self.run.launch()
            self.run.job.wait(4 * PATIENCE_S)
            self.run.finished()
            self.done += 1
            self.run = None
        print(f"{self.kills} kills in {took:.0f} s ({self.kills / took:.1f}/s), seed {self.args.seed}; {self.done} runs "
              f"ended bit-equal to their undisturbed twins; shared memory {'private' if self.private else 'common'}")
        columns = sorted({phase for counts in self.phases.values() for phase in counts})
        print("under way at the kill: " + "".join(f"{c:>11}" for c in columns))
        for victim, counts in sorted(self.phases.items()):
            print(f"  {victim:<21}" + "".join(f"{counts[c]:>11}" for c in columns))
        print("saves under way when the agent died: " +
              ", ".join(f"{saves}: {count} times" for saves, count in sorted(self.in_flight.items())))
        print(f"saves told: {self.saves}, over files of removed checkpoints: {self.over}")
        print("seconds spent: " + ", ".join(f"{what} {spent:.1f}" for what, spent in self.spent.items()))
        shares = ", ".join(f"{r.shape['name']} {100 * r.in_snapshot:.1f} %" for r in references)
        print(f"share of a step's time in which training waits for its snapshot: {shares}; by that, about "
              f"{in_snapshot:.1f} kills fell into one")
        print("steps lost beyond what may be: " +
              ", ".join(f"{lost}: {count} times" for lost, count in sorted(self.lost.items())))

    def close(self, keep):
        if self.run is not None:
            self.run.close()
        for path in self.folder.glob("*/run.json"):
            run = type("Gone", (), {"path": path.parent})
            for name in self.memory_of(run):
                os.unlink(f"/dev/shm/{name}")
        if keep:
            print(f"left to look at: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, help="exactly so many, whatever the time")
    parser.add_argument("--seconds", type=float, default=60, help="time for kills (default: %(default)s)")
    parser.add_argument("--at-least", type=int, default=40, help="kills, also on a slow machine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--pages", choices=("huge", "small"), help="of shared memory (default: by the seed, half of them huge)")
    parser.add_argument("--lenient", action="store_true",
                        help="without this, memory must give back the last step also while a save is under way")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    test = CrashTest(args)
    failed = True
    try:
        test.go()
        failed = False
    except Broken as problem:
        print(f"BROKEN after {test.kills} kills (seed {args.seed}, victim, aim, part: {test.now}): {problem}")
    finally:
        test.close(failed)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
