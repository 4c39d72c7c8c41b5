#!/usr/bin/env python3
"""Time to load a checkpoint into another layout against the time to load it into its own, interleaved in one run.

  bench/layout_load.py --scratch FOLDER_ON_THE_DISK [--rounds 7] [--megabytes 512]

The state of one model is saved under six layouts of four ranks. In each round every layout loads what it saved itself and
what the first one saved (the first: what the second saved), all ranks at once, every checksum compared, past the page
cache. The ratio of a layout is that of the medians; 1.10 is the bar. Takes six times --megabytes of disk.
"""
import argparse
import statistics
import subprocess
import sys

from common import ROOT, Scratch, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", default=str(ROOT / "build/release/layout_load"))
parser.add_argument("--scratch", default=None, help="folder on the disk to measure (default: a temporary one)")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--megabytes", type=int, default=512)
parser.add_argument("--tiny", action="store_true", help="one round of some megabytes")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes = 1, 8

print(machine())
with Scratch(args.scratch) as scratch:
    with subprocess.Popen([args.program, str(scratch.path), str(args.megabytes)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        layouts = []
        while True:
            line = child.stdout.readline()
            if not line:
                sys.exit(f"{args.program} ended with {child.wait()}")
            if line.startswith("ready"):
                break
            layouts.append(line.strip())
        _, size, backend = line.split()

        def ask(source: int, target: int) -> float:
            child.stdin.write(f"{source} {target}\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                sys.exit(f"{args.program} ended with {child.wait()} at {layouts[source]} -> {layouts[target]}")
            return float(answer)

        print(f"{size} bytes, {backend}, {args.rounds} rounds of six layouts, own and other alternating", flush=True)
        own = [[] for _ in layouts]
        other = [[] for _ in layouts]
        for number in range(args.rounds):
            for target in range(len(layouts)):
                source = 1 if target == 0 else 0
                arms = [(own, target), (other, source)]
                for results, origin in arms if (number + target) % 2 == 0 else reversed(arms):
                    results[target].append(ask(origin, target))
            print(f"  round {number + 1}: " + ", ".join(f"{layouts[t]} {own[t][-1]:.3f} / {other[t][-1]:.3f}"
                                                        for t in range(len(layouts))) + f" s; load {load()}", flush=True)
        ratios = []
        for target, name in enumerate(layouts):
            ratios.append(statistics.median(other[target]) / statistics.median(own[target]))
            print(f"{name}: own {spread(own[target])} s, from {layouts[1 if target == 0 else 0]} {spread(other[target])} s, "
                  f"ratio {ratios[-1]:.3f}")
        print(f"other / own over all layouts: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")
        child.stdin.close()
