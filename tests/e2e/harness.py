"""Real runs of the built program for the tests of this folder: tiny recipes, real processes, real signals.

The program's path is the first argument of each test. Everything a test makes lies in a folder of its own below the
build tree (a real disk), and no test looks at processes or shared memory that its own runs did not make. With
CAIRN_TEST_HUGE_PAGES in the environment shared memory has huge pages, from and to which checkpoints go in place.
"""

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
import unittest
import unittest.mock

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from own_memory import own_shared_memory, resize_shared_memory  # noqa: E402, F401

# What dead runs have left is told, and removed where it is on disk too, by all other runs of the same user.
OWN_MEMORY = own_shared_memory("2g", "CAIRN_TEST_HUGE_PAGES" in os.environ)
# A machine with a device trains these on its CPUs all the same.
os.environ.setdefault("CAIRN_NVIDIA_ROOT", "/nonexistent")
# What another recipe asks for; why, is changed_test's subject.
JUMP = ("--accept", "optimizer.lr")  # a run behind the end of its schedule is made longer, and that stretches
OTHER_NAME = ("--accept", "name")
PATIENCE_S = 120  # of any wait; far beyond what a loaded machine needs, so that a hang fails instead of stalling CI


def write_tokens(prefix, count, seed=7, vocab=256):
    """A Megatron .bin/.idx pair of one-byte words with some order in them, so that there is something to learn."""
    draw = random.Random(seed)
    words = [bytes(draw.randrange(97, 123) for _ in range(draw.randrange(2, 7))) for _ in range(40)]
    text = bytearray()
    while len(text) < count:
        text += draw.choice(words) + b" "
    write_pair(prefix, [byte % vocab for byte in text[:count]])


def write_pair(prefix, tokens):
    """A Megatron .bin/.idx pair of one document."""
    count = len(tokens)
    pathlib.Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{count}H", *tokens))
    # magic, version, dtype code 8 (uint16), sequences, documents; then lengths, byte offsets, document starts
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    index += struct.pack("<i", count) + struct.pack("<q", 0) + struct.pack("<2q", 0, 1)
    pathlib.Path(f"{prefix}.idx").write_bytes(index)


RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 11, stop = T.steps({steps}), precision = "{precision}",
  model = T.gpt {{ layers = 2, width = 32, heads = 4, context = 32, vocab = 257 }},
  tokenizer = T.bytes,
  data = T.megatron {{ prefix = "{prefix}", split = {{ 90, 10 }} }},
  batch = {{ samples = 8, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-2, lr = T.schedule {{ T.warmup {{ over = T.steps(4) }}, T.cosine {{ to = 1e-3 }} }},
                        weight_decay = 0.1, clip = 1.0, zero = {zero} }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp}, sequence_parallel = {sp} }},
  schedule = "1f1b",
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = {save} }} }}, keep = {{ T.last({keep}) }},
                              snapshot = T.every {{ steps = 1 }} }},
}}
"""


class Job:
    """One `cairn train` in a process group of its own."""

    def __init__(self, program, args, log, cwd):
        self.log_path = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen([program, *map(str, args)], stdout=out, stderr=subprocess.STDOUT, cwd=cwd,
                                            stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self.process.pid

    def children(self):
        """{rank: pid} of the living rank processes."""
        out = {}
        try:
            pids = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return out
        for pid in pids:
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--rank" in words:
                out[int(words[words.index(b"--rank") + 1])] = int(pid)
        return out

    def signal(self, number):
        self.process.send_signal(number)

    def kill_group(self):
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def processes(self):
        """Its living processes: the agent, its ranks and what those have started."""
        out = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if os.getsid(int(folder.name)) == self.pid and state != "Z":
                    out.append(int(folder.name))
            except OSError:
                pass
        return out

    def output(self):
        return pathlib.Path(self.log_path).read_text(errors="replace")


DEVICE_MODEL = "NVIDIA Test Card"


class RunTest(unittest.TestCase):
    program = None

    def setUp(self):
        root = pathlib.Path(self.program).parent / "test-tmp"
        root.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="e2e-", dir=root))
        self.jobs = []
        self.addCleanup(self.clean_up)
        write_tokens(self.folder / "tokens", 6000)

    def clean_up(self):
        for job in self.jobs:
            if job.process.poll() is None:
                job.kill_group()
        for name in self.memory_left(self.folder):
            os.unlink(f"/dev/shm/{name}")
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- starting

    def with_device(self, driver="580.65.06"):
        """The pages of a machine with one NVIDIA device, which the program is shown in place of this machine's."""
        root = self.folder / "machine"
        gpu = root / "proc/driver/nvidia/gpus/0000:01:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {DEVICE_MODEL}\nIRQ:   \t\t 10\n")
        if driver:
            (root / "proc/driver/nvidia/version").write_text(
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
        return unittest.mock.patch.dict(os.environ, CAIRN_NVIDIA_ROOT=str(root))

    def recipe(self, name="small", steps=30, precision="fp32", tp=2, pp=2, dp=2, zero=1, sp="true", save=5, keep=3,
               prefix=None):
        path = self.folder / f"{name}.lua"
        path.write_text(RECIPE.format(name=name, steps=steps, precision=precision, tp=tp, pp=pp, dp=dp, zero=zero, sp=sp,
                                      save=save, keep=keep, prefix=prefix or self.folder / "tokens"))
        return path

    def holds(self, pid):
        """Whether SIGUSR1 can end it no more."""
        try:
            with open(f"/proc/{pid}/status") as status:
                line = next(line for line in status if line.startswith("SigBlk:"))
        except (OSError, StopIteration):
            return False
        return bool(int(line.split()[1], 16) & 1 << (signal.SIGUSR1 - 1))

    def cairn(self, *args, code=0):
        """Another command of the program, in the test's folder; its output in bytes."""
        done = subprocess.run([self.program, *map(str, args)], capture_output=True, cwd=self.folder, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, code, done.stderr.decode())
        return done

    def array(self, run, step, name):
        """A tensor of a checkpoint, as `cairn ckpt cat` gives it."""
        file = self.folder / "array.npy"
        file.write_bytes(self.cairn("ckpt", "cat", self.checkpoint(run, step), name).stdout)
        return numpy.load(file)

    def with_own_mounts(self, script):
        """A shell script in the test's folder, whose mounts nobody else sees."""
        unshare = ["unshare", "-m", "--propagation", "private", "sh", "-c"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            self.skipTest("this machine lets no test mount anything")
        script = f"""set -e
wait_for() {{ n=0; until eval "$1"; do n=$((n + 1)); [ $n -lt 600 ]; sleep 0.1; done; }}
{script}"""
        done = subprocess.run([*unshare, script], cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S)
        said = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
        self.assertEqual(done.returncode, 0, f"{done.stdout}{done.stderr}{said}")
        return said

    def start(self, recipe, run, *extra):
        job = Job(self.program, ["train", recipe, "--run", self.folder / run, "--threads", 1, *extra],
                  self.folder / f"{run}.out", self.folder)
        self.jobs.append(job)
        return job

    def train(self, recipe, run, *extra, code=0):
        job = self.start(recipe, run, *extra)
        self.finish(job, code)
        return job

    def losses_behind_an_import(self, state, recipe, run, samples):
        """The losses of the steps behind step 3 of another trainer's state, which has taken `samples`."""
        (self.folder / run).mkdir()
        self.assertIn("step-00000003", self.cairn("import", state, f"{run}/checkpoints").stdout.decode())
        job = self.train(recipe, run)
        self.assertIn(f"data begins anew: {samples} that another trainer took are not known here", job.output())
        return [line["loss"] for step, line in sorted(self.metrics(run).items())]

    def state_of_jobs(self):
        """What all runs of the test have said, and where the living ones stand: for a wait that has no end."""
        text = ""
        for job in self.jobs:
            text += f"--- {job.log_path.name}: exit code {job.process.poll()}\n{job.output()[-4000:]}\n"
            for pid in job.processes():
                done = subprocess.run([self.program, "_stacks", str(pid)], capture_output=True, text=True,
                                      timeout=PATIENCE_S)
                stacks = json.loads(done.stdout) if done.returncode == 0 and done.stdout else {"problem": done.stderr}
                text += f"process {pid} {stacks.get('problem', '')}\n"
                for thread in stacks.get("threads", []):
                    text += "".join(f"  {line[:110]}\n" for line in [thread["name"], *thread["frames"][:8]])
        return text

    def finish(self, job, code=0):
        try:
            got = job.wait()
        except subprocess.TimeoutExpired:
            self.fail(f"waited {PATIENCE_S} s for the end of {job.log_path.name}\n{self.state_of_jobs()}")
        self.assertEqual(got, code, f"exit code {got}, expected {code}\n{job.output()}")

    def until(self, condition, what, job=None):
        """Waits for `condition()` to become true and returns it."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            if job is not None and job.process.poll() is not None:
                value = condition()
                if value:
                    return value
                self.fail(f"the run ended ({job.process.returncode}) before {what}\n{job.output()}")
            time.sleep(0.002)
        self.fail(f"waited {PATIENCE_S} s for {what}\n{self.state_of_jobs()}")

    def until_step(self, run, step, job):
        return self.until(lambda: self.last_step(run) >= step and self.last_step(run), f"step {step}", job)

    # --- reading

    def last_step(self, run):
        steps = self.metrics(run)
        return max(steps) if steps else 0

    def json_lines(self, run, name):
        """All complete lines. One that a kill has torn is closed by the next start: it does not end as an object does."""
        try:
            text = (self.folder / run / name).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line.endswith("}")]

    def metrics_lines(self, run):
        return self.json_lines(run, "metrics.jsonl")

    def metrics(self, run):
        """{step: line}: of two lines of one step the later one counts."""
        return {line["step"]: line for line in self.metrics_lines(run) if "step" in line}

    def events(self, run, kind=None):
        return [e for e in self.json_lines(run, "events.jsonl") if kind is None or e["event"] == kind]

    def checkpoints(self, run):
        folder = self.folder / run / "checkpoints"
        return sorted(int(p.name[5:]) for p in folder.glob("step-*")) if folder.is_dir() else []

    def checkpoint(self, run, step):
        return self.folder / run / "checkpoints" / f"step-{step:08d}"

    def manifest(self, run, step):
        head, body = (self.checkpoint(run, step) / "manifest.json").read_bytes().split(b"\n", 1)
        self.assertEqual(json.loads(head)["body_bytes"], len(body))
        return json.loads(body)

    def shards(self, run, step):
        """What shards.bin says (docs/format.md), without boxes and hashes."""
        table = (self.checkpoint(run, step) / "shards.bin").read_bytes()
        count = struct.unpack_from("<Q", table, 16)[0]
        keys = ("tensor", "file", "offset", "bytes")
        return [dict(zip(keys, struct.unpack_from("<IIQQ", table, 64 + 32 * i))) for i in range(count)]

    def run_id(self, run):
        return json.loads((self.folder / run / "run.json").read_text())["id"]

    def memory_left(self, folder):
        """Names in /dev/shm that belong to runs below `folder`: a segment holds its run's id in its first page."""
        ids = [json.loads(p.read_text())["id"].encode() for p in pathlib.Path(folder).glob("*/run.json")]
        out = []
        for path in pathlib.Path("/dev/shm").glob("cairn-*"):
            try:
                with open(path, "rb") as f:
                    head = f.read(4096)
            except OSError:
                continue
            if any(name in head for name in ids):
                out.append(path.name)
        return out

    # --- comparing

    def contents(self, run, step):
        """What a checkpoint holds, without what may differ between two runs: names, ids and times."""
        manifest = self.manifest(run, step)
        for key in ("created_unix_ms", "run", "extra"):  # extra: the starts that led to it
            del manifest[key]
        manifest["state"].pop("metrics", None)  # has times in it
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in self.checkpoint(run, step).glob("*.h5")}
        self.assertEqual(sorted(files), sorted(f["name"] for f in manifest["files"]))
        return manifest, files

    def assert_same_training(self, run, reference, steps):
        """Every step once and with the same bits; the same state, sampler and stored bytes at the end."""
        got, wanted = self.metrics(run), self.metrics(reference)
        self.assertEqual(sorted(got), list(range(1, steps + 1)), f"{run}: a step is missing from metrics.jsonl")
        for step in range(1, steps + 1):
            for key in ("loss", "grad_norm", "lr", "samples", "tokens", "source_loss"):
                self.assertEqual(got[step].get(key), wanted[step].get(key), f"{run}: step {step}: {key}")
        mine, other = self.contents(run, steps), self.contents(reference, steps)
        self.assertEqual(mine[0]["state"], other[0]["state"])
        self.assertEqual(mine, other)


class HostsTest(RunTest):
    """Runs over several hosts, which are agents on loopback."""

    def start_host(self, recipe, run, index, hosts, ranks, *extra, name=None):
        names = ",".join(["127.0.0.1", "localhost", *(f"127.0.0.{k}" for k in range(2, hosts))][:hosts])
        job = Job(self.program,
                  ["train", recipe, "--run", self.folder / run, "--threads", 1, "--nproc", ranks, "--hosts", names,
                   "--host-index", index, *extra],
                  self.folder / f"{name or run}-h{index}.out", self.folder)
        self.jobs.append(job)
        return job

    def start_hosts(self, recipe, run, hosts, ranks, *extra):
        return [self.start_host(recipe, run, k, hosts, ranks, *extra) for k in range(hosts)]

    def finish_all(self, jobs, code=0):
        for job in reversed(jobs):
            self.finish(job, code)


def main():
    RunTest.program = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
