#!/usr/bin/env python3
"""Seconds of a training step of two cairn programs, in interleaved pairs: whether a change costs speed.

  bench/train_pairs.py --before OTHER/build/release/cairn [--cairn build/release/cairn] [--rounds 20] [--steps 3]
                       [--model gpt2 | bytes] [--precision fp32 | bf16]

GPT-2 124M, batch 4 x 512 tokens, or the model of recipes/quickstart.lua, 4 x 128 bytes; one rank on all cores. Each pair
runs both programs, the one that is first in turn; the first step of a process is a warm-up. The last line is the median of
the ratios now / before, with the interval that 95 % of 10,000 resamplings of the pairs fall into.
--tiny: a small shape, seconds in all; says nothing about speed.
"""
import argparse
import os
import statistics
import sys

from common import (ROOT, Scratch, add_cairn_option, interleaved, machine, ratio, run_quietly, spread, steps_of,
                    train_command)

SHAPES = {"gpt2": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "context": 512},
          "bytes": {"layers": 4, "width": 128, "heads": 4, "vocab": 256, "context": 128},
          "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 300, "context": 32}}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.set_defaults(rounds=20)
parser.add_argument("--before", required=True, help="the other program")
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--steps", type=int, default=3, help="counted steps of a run (default: %(default)s)")
parser.add_argument("--model", choices=["gpt2", "bytes"], default="gpt2")
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
shape = SHAPES["tiny" if args.tiny else args.model]


def seconds(scratch: Scratch, program: str) -> float:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, shape["vocab"])}"}}', "batch.samples=4", "batch.micro=4",
            f"stop=T.steps({args.steps + 1})", f"precision={args.precision}", "optimizer.lr-", "eval-", "checkpoint-",
            "log.tensorboard=false"] + [f"model.{name}={value}" for name, value in shape.items()]
    run_quietly(train_command(program, ROOT / "recipes/gpt2_124m.lua", run, sets, more=["--threads", str(args.threads)]))
    steps = steps_of(run)
    if len(steps) != args.steps + 1:
        sys.exit(f"{run}/metrics.jsonl has {len(steps)} steps, expected {args.steps + 1}")
    return statistics.median(step["step_ms"] / 1000 for step in steps[1:])


print(machine())
print(f"{shape}, batch 4, {args.precision}, {args.threads} threads; {args.rounds} pairs of {args.steps} steps\n"
      f"before: {args.before}\nnow:    {args.cairn}", flush=True)
with Scratch(args.scratch) as scratch:
    before, now = interleaved(args.rounds, args.before, args.cairn, lambda program: seconds(scratch, program))
print(f"before {spread(before)} s, now {spread(now)} s a step")
print(f"now / before: {ratio(before, now)}")
