"""What the measuring scripts share: facts of the machine, medians with their spread, runs of cairn."""
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("CAIRN_NVIDIA_ROOT", "/nonexistent")  # a machine with a GPU measures its CPUs too
ISA = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> str:
    """CPU, cores, instruction sets that matter, load, and what was built from which commit."""
    model, flags = "unknown", []
    for line in open("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() == "flags":
            flags = value.split()
    commit = "unknown"
    try:
        commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True,
                                text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    isa = " ".join(flag for flag in ISA if flag in flags) or "none of " + " ".join(ISA)
    return f"{model}, {os.cpu_count()} cores, {isa}; source {commit}; load {load()}"


def load() -> str:
    return open("/proc/loadavg").read().split()[0]


def add_cairn_option(parser) -> None:
    parser.add_argument("--cairn", default=str(ROOT / "build/release/cairn"), help="the program (default: %(default)s)")
    parser.add_argument("--scratch", default=None, help="folder for data and run folders (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")


class Scratch:
    """A folder that is removed at the end."""

    def __init__(self, parent):
        if parent:
            os.makedirs(parent, exist_ok=True)
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="cairn-bench-", dir=parent))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def tokens(self, count: int, vocab: int) -> str:
        """Made-up tokens, little-endian uint16, the same every time."""
        path = self.path / f"tokens-{vocab}.bin"
        if not path.exists():
            state, out = 88172645463325252, bytearray()
            for _ in range(count):
                state ^= state << 13 & (1 << 64) - 1
                state ^= state >> 7
                state ^= state << 17 & (1 << 64) - 1
                out += (state % vocab).to_bytes(2, "little")
            path.write_bytes(out)
        return str(path)

    def run_folder(self, name: str) -> pathlib.Path:
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        return path


def train_command(cairn: str, recipe, run, sets, nproc: int = 1, more=()) -> list:
    command = [cairn, "train", str(recipe), "--nproc", str(nproc), "--run", str(run)]
    for one in sets:
        command += ["--set", one]
    return command + list(more)


def run_quietly(command, **more) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}")


def json_lines(path) -> list:
    """Whole lines alone: the last one may still be on its way."""
    try:
        text = pathlib.Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip()]


def steps_of(run) -> list:
    return [record for record in json_lines(pathlib.Path(run) / "metrics.jsonl") if "loss" in record]


def spread(values, digits: int = 3) -> str:
    """median (smallest to largest)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def interleaved(rounds: int, before: str, now: str, measure) -> tuple:
    """What `measure` says of two programs, in pairs, the one that is first in turn: ([before ..], [now ..])."""
    programs, taken = {"before": before, "now": now}, {"before": [], "now": []}
    for pair in range(rounds):
        for who in list(programs) if pair % 2 == 0 else list(programs)[::-1]:
            taken[who].append(measure(programs[who]))
        pair_of = ", ".join(f"{who} {values[-1]}" for who, values in taken.items())
        print(f"  pair {pair + 1}: {pair_of}; load {load()}", flush=True)
    return taken["before"], taken["now"]


def ratio(before, now) -> str:
    """The median of the ratios now / before of pairs, with the interval that 95 % of 10,000 resamplings fall into."""
    ratios = [after / first for first, after in zip(before, now)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return f"{statistics.median(ratios):.4f}, 95 % within {medians[250]:.4f} to {medians[9749]:.4f}"
