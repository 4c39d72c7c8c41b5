"""Training runs on a GPU that are measured: the models of gpu_all, gpu_step and gpu_day, and PyTorch's side of them."""

import ctypes
import json
import os
import pathlib
import signal
import statistics
import subprocess
import time

from gpu_common import Wrong

WARM_STEPS = 3
NEVER = 1000000  # a step that no run comes to
# Peak of dense bf16 in TFLOP/s, by the makers' data sheets; the first name that is in the card's counts.
PEAKS = [("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989), ("H200", 989), ("GH200", 989), ("B200", 2250),
         ("A100", 312), ("L40S", 362), ("L40", 181), ("RTX 4090", 165)]
GPT, LLAMA = "gpt", "llama"


def model(name, family, layers, width, heads, kv_heads, ffn, context, vocab, samples, bar, aim, seconds, limit_s):
    return dict(name=name, family=family, layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn,
                context=context, vocab=vocab, samples=samples, bar=bar, aim=aim, seconds=seconds, limit_s=limit_s)


# The shapes of bench/gpu/models.cc. seconds: of a window that is measured; limit_s: of all that gpu_all does with it.
MODELS = [model("gpt2-124m", GPT, 12, 768, 12, 12, 3072, 1024, 50257, 16, 0.42, 0.50, 5, 130),
          model("gpt2-1558m", GPT, 48, 1600, 25, 25, 6400, 1024, 50257, 8, 0.48, 0.55, 8, 200),
          model("llama3-8-layers", LLAMA, 8, 4096, 32, 8, 14336, 8192, 128256, 1, 0.58, 0.62, 8, 200)]
TINY = [model("tiny-gpt", GPT, 2, 32, 2, 2, 64, 16, 130, 2, 0, 0, 0.1, 60),
        model("tiny-llama", LLAMA, 2, 32, 2, 1, 48, 16, 130, 2, 0, 0, 0.1, 60)]
# Where no step comes to a snapshot, memory for one copy of the state is all that a start needs (in_flight).
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "gpu-run", seed = 11, stop = T.steps({stop}), precision = "bf16",
  model = T.{family} {{ layers = {layers}, width = {width}, heads = {heads}, kv_heads = {kv_heads}, ffn = {ffn},
                       context = {context}, vocab = {vocab}{more} }},
  data = T.token_files {{ train = "{tokens}" }},
  batch = {{ samples = {samples}, micro = {samples} }},
  optimizer = T.adamw {{ peak_lr = 6e-4, betas = {{ 0.9, 0.95 }}, weight_decay = 0.1, clip = 1.0 }},
  checkpoint = T.checkpoint {{ snapshot_by = "copy", snapshot = T.every {{ steps = {snapshot} }},
                              in_flight = {in_flight} }},
  log = {{ tensorboard = false }},
}}
"""


def recipe_of(of, tokens, snapshot=NEVER, stop=NEVER):
    more = ", rope_theta = 500000" if of["family"] == LLAMA else ""
    return RECIPE.format(tokens=tokens, more=more, snapshot=snapshot, stop=stop, in_flight=int(snapshot != NEVER), **of)


def choose(names, tiny):
    """The models of these names, in their order; all where there are none. Raises Wrong for a name that is no model's."""
    models = TINY if tiny else MODELS
    unknown = [name for name in names if name not in [of["name"] for of in models]]
    if unknown:
        raise Wrong(f"no model {', '.join(unknown)}; there are {', '.join(of['name'] for of in models)}")
    return [of for of in models if not names or of["name"] in names]


def flops_a_token(of):
    """6 N + 6 L S W."""
    head_dim = of["width"] // of["heads"]
    heads = of["heads"] * head_dim
    layer = of["width"] * (heads + 2 * of["kv_heads"] * head_dim) + heads * of["width"]
    layer += (3 if of["family"] == LLAMA else 2) * of["width"] * of["ffn"]
    matrices = of["layers"] * layer + of["vocab"] * of["width"]
    return 6 * matrices + 6 * of["layers"] * of["context"] * heads


def peak_of(device):
    """TFLOP/s of a card by its name; None where it is not known."""
    return next((tflops for name, tflops in PEAKS if name in device), None)


def mfu(of, step_ms, peak):
    return of["samples"] * of["context"] / step_ms * 1e3 * flops_a_token(of) / (peak * 1e12)


def padded(vocab):
    return (vocab + 63) // 64 * 64


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def write_tokens(path, count, vocab):
    """Made-up tokens, little-endian uint16, the same every time."""
    state, out = 88172645463325252, bytearray()
    for _ in range(count):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        out += (state % min(vocab, 65536)).to_bytes(2, "little")
    path.write_bytes(out)


def tokens_of(of, folder):
    path = folder / f"tokens-{of['vocab']}"
    if not path.exists():
        write_tokens(path, 400_000 if of["samples"] * of["context"] > 1000 else 4000, of["vocab"])
    return path


def torch_words(of, tokens, seconds):
    """Arguments of bench/torch_train.py for this model."""
    words = ["--tokens", tokens, "--family", of["family"], "--seconds", seconds, "--vocab", padded(of["vocab"])]
    for name in ("layers", "width", "heads", "kv_heads", "ffn", "context", "samples"):
        words += [f"--{name.replace('_', '-')}", of[name]]
    return [str(word) for word in words]


def has_torch(python):
    """Whether this Python has PyTorch, which is not loaded for it."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        return subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def die_with_parent():
    """In a child: nothing trains on when this program is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def children_of(pid):
    """Processes that any of its threads has started."""
    out = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            out += [int(word) for word in path.read_text().split()]
        except OSError:
            pass
    return out


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def remove_memory_of(agent_pid):
    """Removes the segments in /dev/shm that a killed agent has left."""
    for segment in pathlib.Path("/dev/shm").glob(f"cairn-{os.getuid()}-*-{agent_pid}-*"):
        segment.unlink(missing_ok=True)


class Runs:
    """Runs of `cairn` in `folder`. `end`: when the time is over, by time.monotonic()."""

    def __init__(self, cairn, folder, end):
        self.cairn, self.folder, self.end = cairn, folder, end
        self.runs = 0
        self.words = []
        self.choices = None  # Choices that runs share

    def words_now(self):
        return [*self.words, *(self.choices.words() if self.choices else [])]

    def left(self):
        left = self.end - time.monotonic()
        if left <= 0:
            raise Wrong("the time is over")
        return left

    def begin(self, of, words, **recipe):
        """The agent of a new run, its folder, its log."""
        self.runs += 1
        run, path = self.folder / f"run-{self.runs}", self.folder / f"run-{self.runs}.lua"
        path.write_text(recipe_of(of, tokens_of(of, self.folder), **recipe))
        log = open(self.folder / f"run-{self.runs}.log", "w+")
        command = [self.cairn, "train", path, "--run", run, "--device", "cuda", *words]
        agent = subprocess.Popen([str(word) for word in command], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                                 stderr=log, start_new_session=True, preexec_fn=die_with_parent)
        return agent, run, log

    @staticmethod
    def text_of(log):
        log.seek(0)
        return log.read()

    def train(self, of, seconds=0, snapshot=NEVER, least_steps=WARM_STEPS + 5, words=()):
        """Trains `least_steps` steps or more, for `seconds` behind the first ones, then ends the run at once.
        {"steps": metrics behind the first ones, "all": of all steps, "first_step_s": from exec to step 1, "memory": text}"""
        begin = time.monotonic()
        agent, run, log = self.begin(of, words, snapshot=snapshot)
        ranks, first, warm, steps = [], None, None, []
        with log:
            try:
                while warm is None or time.monotonic() < warm + seconds or len(steps) < least_steps:
                    steps = self.steps_of(run)
                    now = time.monotonic()
                    if steps and first is None:
                        first = now - begin
                    if len(steps) >= WARM_STEPS and warm is None:
                        warm = now
                    if agent.poll() is not None:
                        raise Wrong(f"cairn ended with {agent.returncode}:\n{self.text_of(log)[-3000:]}")
                    self.left()
                    ranks = children_of(agent.pid) or ranks
                    time.sleep(0.002 if first is None else 0.05)
                memory = self.memory_in_use()
            finally:
                self.end_at_once(agent, ranks)
        self.check_device(run)
        if self.choices:
            self.choices.keep(run)
        return {"steps": steps[WARM_STEPS:], "all": steps, "first_step_s": first, "memory": memory}

    def train_to_end(self, of, steps, words=()):
        """A run of `steps` steps that ends by itself: what it printed, its folder."""
        agent, run, log = self.begin(of, words, stop=steps)
        ranks = []
        with log:
            try:
                while agent.poll() is None:
                    self.left()
                    ranks = children_of(agent.pid) or ranks
                    time.sleep(0.05)
            finally:
                self.end_at_once(agent, ranks)
            text = self.text_of(log)
        if agent.returncode != 0:
            raise Wrong(f"cairn ended with {agent.returncode}:\n{text[-3000:]}")
        self.check_device(run)
        if self.choices:
            self.choices.keep(run)
        return text, run

    @staticmethod
    def check_device(run):
        if (run / "device").read_text() != "cuda":
            raise Wrong(f"{run} was to train on CUDA and did not")

    @staticmethod
    def steps_of(run):
        try:
            text = (run / "metrics.jsonl").read_text()
        except OSError:
            return []
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "loss" in line]

    @staticmethod
    def end_at_once(agent, ranks):
        """Without a checkpoint, which takes the disk's time; its shared memory goes too."""
        for pid in [agent.pid] * (agent.poll() is None) + [rank for rank in ranks if not gone(rank)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        agent.wait()
        end = time.monotonic() + 20
        while any(not gone(pid) for pid in ranks) and time.monotonic() < end:
            time.sleep(0.01)
        remove_memory_of(agent.pid)

    @staticmethod
    def memory_in_use():
        try:
            done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"], capture_output=True,
                                  text=True, timeout=10)
            return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"


def snapshot_cost(steps, every):
    """Milliseconds that a snapshot costs, and a quiet step takes: of rounds of steps that each begin with a snapshot,
    what they take beyond as many quiet steps, those of their second halves; and the number of rounds."""
    by_step = {step["step"]: step["step_ms"] for step in steps}
    rounds = [[by_step[first + k] for k in range(every)] for first in by_step
              if first % every == 1 and all(first + k in by_step for k in range(every))]
    if not rounds:
        raise Wrong(f"no round of {every} steps in {len(by_step)}")
    quiet = statistics.median(ms for one in rounds for ms in one[every // 2:])
    return statistics.median(sum(one) - every * quiet for one in rounds), quiet, len(rounds)
