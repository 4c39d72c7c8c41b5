#!/usr/bin/env python3
"""What deterministic = "layout" costs: seconds of a step with it and without, interleaved.

  bench/layout_cost.py [--before PROGRAM] [--rounds 5] [--steps 4] [--dtype bf16] [--only NAME...]
                       [--batch 4] [--tokens 512]

GPT-2 124M, batch 4 x 512 tokens in one micro-batch, two threads in all: one rank of two, or tp or cp = 2 of one each.
The first step of each process is a warm-up and not counted.
"""
import argparse
import statistics
import sys

from common import ROOT, Scratch, add_cairn_option, load, machine, run_quietly, spread, steps_of, train_command

SETTINGS = {  # tp, sequence parallel, cp
    "one rank": (1, False, 1),
    "tp 2": (2, False, 1),
    "tp 2, sequence parallel": (2, True, 1),
    "cp 2": (1, False, 2),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--before", help="another build, measured in turn with this one")
parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
parser.add_argument("--batch", type=int, default=4, help="samples (default: %(default)s)")
parser.add_argument("--tokens", type=int, default=512, help="of a sample (default: %(default)s)")
parser.add_argument("--steps", type=int, default=4, help="counted steps of a process (default: %(default)s)")
parser.add_argument("--only", choices=list(SETTINGS), nargs="+", default=list(SETTINGS), metavar="NAME")
parser.add_argument("--tiny", action="store_true", help="a small shape, seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps = 1, 2
shape = {"layers": 2, "width": 64, "heads": 2, "vocab": 300} if args.tiny else {}
seq = 512 if args.tiny else args.tokens


def seconds(scratch: Scratch, program: str, mode: str, tp: int, scattered: bool, cp: int) -> float:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, shape.get("vocab", 50257))}"}}',
            f"model.context={seq}", f"batch.samples={args.batch}", f"batch.micro={args.batch}", f"stop=T.steps({args.steps + 1})",
            f'precision="{"fp32" if args.dtype == "f32" else "bf16"}"', "optimizer.lr-", "eval-", "checkpoint-",
            "log.tensorboard=false", f'deterministic="{mode}"']
    sets += [f"model.{name}={value}" for name, value in shape.items()]
    if tp > 1:
        sets += [f"mesh.tp={tp}", f"mesh.sequence_parallel={str(scattered).lower()}"]
    if cp > 1:
        sets += [f"mesh.cp={cp}", "optimizer.zero=1"]
    run_quietly(train_command(program, ROOT / "recipes/gpt2_124m.lua", run, sets, nproc=tp * cp,
                              more=["--threads", str(2 // (tp * cp))]))
    steps = steps_of(run)
    if len(steps) != args.steps + 1:
        sys.exit(f"{run}/metrics.jsonl has {len(steps)} steps, expected {args.steps + 1}")
    return statistics.median(step["step_ms"] / 1000 for step in steps[1:])


programs = {"": args.cairn} | ({"before, ": args.before} if args.before else {})
print(machine())
print(f"GPT-2 124M{' (tiny)' if args.tiny else ''}, batch {args.batch} x {seq}, {args.dtype}; {args.rounds} rounds of {args.steps} steps",
      flush=True)
taken = {}
with Scratch(args.scratch) as scratch:
    for number in range(args.rounds):
        for name in args.only:
            for who, program in programs.items():
                for mode in ("run", "layout"):
                    value = seconds(scratch, program, mode, *SETTINGS[name])
                    taken.setdefault((name, who, mode), []).append(value)
                    print(f"  round {number + 1} {who}{name}, {mode}: {value:.3f} s; load {load()}", flush=True)
for name in args.only:
    for who in programs:
        run, layout = taken[name, who, "run"], taken[name, who, "layout"]
        more = statistics.median(b / a - 1 for a, b in zip(run, layout)) * 100
        print(f"{who}{name}: run {spread(run)} s, layout {spread(layout)} s, {more:+.1f} % (median of the rounds)")
