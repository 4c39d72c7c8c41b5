#!/usr/bin/env python3
"""What optimizer.offload costs and saves: steps with the optimizer state in shared memory and on a disk, interleaved.

  bench/offload_cost.py --folder /mnt/nvme/cairn [--rounds 3] [--steps 10] [--gib 1] [--nproc 2]

Shown: the time of a step and of its update, how fast the update moves state to and from the disk (24 bytes a parameter:
12 read, 12 written), beside a read of the same size by dd with direct I/O, and how much memory the state takes: shared
memory that the run holds, or pages of the file that are in the page cache in the middle of the run.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import threading
import time

from common import ROOT, Scratch, add_cairn_option, load, machine, run_quietly, spread, steps_of, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.set_defaults(rounds=3)
parser.add_argument("--folder", help="on the disk to offload to (default: the scratch folder)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--gib", type=float, default=1.0, help="of Adam state in one bank, by the width")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--nproc", type=int, default=2)
parser.add_argument("--tiny", action="store_true", help="seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps, args.layers, args.gib, args.nproc = 1, 4, 2, 0.001, 1


def resident_mib(folder: pathlib.Path) -> float:
    """Of the segments in a folder: pages in memory, by fincore (util-linux-extra); 0 without it."""
    names = [str(path) for path in folder.glob("cairn-*")]
    if not names or not shutil.which("fincore"):
        return 0.0
    told = subprocess.run(["fincore", "-b", "-n", "-o", "RES", *names], capture_output=True, text=True).stdout
    return sum(int(word) for word in re.findall(r"\d+", told)) / 2**20


class Watch(threading.Thread):
    """The largest residency seen while a run goes on."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.seen, self.over = pathlib.Path(folder), [], threading.Event()

    def run(self):
        while not self.over.wait(0.1):
            self.seen.append(resident_mib(self.folder))

    def steady_mib(self) -> float:  # the first quarter is the start, which writes every page
        tail = sorted(self.seen[len(self.seen) // 4:])
        return tail[len(tail) // 2] if tail else 0.0


def measure(scratch: Scratch, folder) -> dict:
    run = scratch.run_folder("run")
    width = max(64, round((args.gib * 2**30 / 12 / (12 * args.layers)) ** 0.5 / 64) * 64)
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, 1000)}"}}', f"model.layers={args.layers}",
            f"model.width={width}", f"model.heads={width // 64}", "model.context=128", "model.vocab=1000",
            f"batch.samples={args.nproc * 8}", "batch.micro=4", f"stop=T.steps({args.steps})", "optimizer.lr-", "eval-",
            "checkpoint-", "tokenizer-", "log.tensorboard=false", "optimizer.zero=1", "precision=bf16"]
    if folder is not None:
        sets.append(f'optimizer.offload="{folder}"')
    watch = Watch(folder or "/dev/shm")
    watch.start()
    run_quietly(train_command(args.cairn, ROOT / "recipes/tiny.lua", run, sets, args.nproc))
    watch.over.set()
    watch.join()
    steps = steps_of(run)[2:]
    middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
    return {"step": middle([s["step_ms"] for s in steps]), "update": middle([s["split_ms"]["optimizer"] for s in steps]),
            "resident": watch.steady_mib()}


def read_gb_per_s(folder: pathlib.Path, size: int) -> float:
    path = folder / "offload-cost-read"
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={max(1, size >> 22)}", "oflag=direct"],
                   stderr=subprocess.DEVNULL, check=True)
    begin = time.perf_counter()
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"], stderr=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - begin
    path.unlink()
    return max(1, size >> 22) * (1 << 22) / seconds / 1e9


print(machine() + ("" if shutil.which("fincore") else "; no fincore (util-linux-extra): residency unknown"))
with Scratch(args.scratch) as scratch:
    folder = pathlib.Path(args.folder) if args.folder else scratch.path / "offload"
    folder.mkdir(exist_ok=True)
    got = {"memory": [], "disk": []}
    reads = []
    for number in range(args.rounds):
        got["memory"].append(measure(scratch, None))
        got["disk"].append(measure(scratch, folder))
        reads.append(read_gb_per_s(folder, int(args.gib * 2**30)))
        print(f"  round {number + 1}: step {got['memory'][-1]['step']:.0f} ms in memory, {got['disk'][-1]['step']:.0f} on the "
              f"disk; load {load()}", flush=True)
    for way, rounds in got.items():
        print(f"{way}: step {spread([r['step'] for r in rounds], 0)} ms, update {spread([r['update'] for r in rounds], 0)} "
              f"ms, {spread([r['resident'] for r in rounds], 0)} MiB of the segments in memory")
    moved = 2 * args.gib * 2**30
    print(f"the update moves {spread([moved / r['update'] / 1e6 for r in got['disk']], 2)} GB/s to and from the disk; dd reads "
          f"{spread(reads, 2)} GB/s")
