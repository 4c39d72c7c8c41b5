#!/usr/bin/env python3
"""What saving in the background takes from a training: one busy process per core, with and without a saver beside them.

  bench/persist_interference.py --scratch FOLDER_ON_THE_DISK [--rounds 9] [--megabytes 512]

Each round has two spells of 4 seconds, in turn without and with a thread that saves and removes checkpoints all the time at
the priority of the agent's own for large states (nice 19, lowest I/O priority). The busy processes do products of small matrices and passes over
memory. Prints steps of both kinds, their ratio, and how fast the saver was.
"""
import argparse
import json
import os
import subprocess
import sys

from common import ROOT, Scratch, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", default=str(ROOT / "build/release/ckpt_speed"))
parser.add_argument("--scratch", default=None)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--megabytes", type=int, default=512)
parser.add_argument("--files", type=int, default=4)
parser.add_argument("--tiny", action="store_true", help="one round of 64 MiB")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes, args.files = 1, 64, 1


def start(folder, megabytes, files):
    child = subprocess.Popen([args.program, str(folder), str(megabytes), str(files)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, bufsize=1)
    if not child.stdout.readline():
        sys.exit(f"{args.program} ended with {child.wait()}")
    return child


def tell(child, word) -> None:
    child.stdin.write(word + "\n")
    child.stdin.flush()


def answer(child) -> dict:
    line = child.stdout.readline()
    if not line:
        sys.exit(f"{args.program} ended with {child.wait()}")
    return json.loads(line)


print(machine())
with Scratch(args.scratch) as scratch:
    saver = start(scratch.path / "saver", args.megabytes, args.files)
    ranks = [start(scratch.path / f"rank-{i}", 64, 1) for i in range(os.cpu_count() or 1)]
    tell(saver, "save"), answer(saver)
    ratios, speeds = [], []
    for number in range(args.rounds):
        steps = {}
        for with_saves in ([False, True] if number % 2 == 0 else [True, False]):
            if with_saves:
                tell(saver, "beside")
            for rank in ranks:
                tell(rank, "train")
            steps[with_saves] = sum(answer(rank)["steps"] for rank in ranks)
            if with_saves:
                done = answer(saver)
                speeds.append(done["bytes"] / done["seconds"] / 1e9)
        ratios.append(steps[True] / steps[False])
        print(f"  round {number + 1}: {steps[False]} steps alone, {steps[True]} beside saves ({speeds[-1]:.2f} GB/s): "
              f"{ratios[-1]:.3f}; load {load()}", flush=True)
    print(f"beside saves / alone: {spread(ratios)}")
    print(f"the saves meanwhile: {spread(speeds, 2)} GB/s")
    for child in [saver, *ranks]:
        tell(child, "quit")
        if child.wait() != 0:
            sys.exit(f"{args.program} ended with {child.returncode}")
