#!/usr/bin/env python3
"""Tokens/s of training GPT-2 124M in cairn against the same step in PyTorch on the CPU, interleaved.

  bench/train_speed.py --python PYTHON_WITH_TORCH [--rounds 5] [--steps 2] [--dtype f32 bf16] [--batch 4] [--seq 512]

Each round runs, one after the other, cairn and PyTorch with the same shape, threads and number of steps; the first step
of each process is a warm-up and not counted. Without --python only cairn is measured. --tiny: a small shape, seconds in
all, says nothing about speed.

PyTorch runs in the settings that are best for it here: threads that wait passively, as cairn's do, which matters when
other programs run, and a malloc that keeps freed memory, without which activations are paged in anew at each step.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from common import ROOT, Scratch, add_cairn_option, load, machine, run_quietly, spread, steps_of, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--python", help="a Python that has torch")
parser.add_argument("--steps", type=int, default=2, help="counted steps of a round (default: %(default)s)")
parser.add_argument("--dtype", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
shape = {"layers": 2, "width": 64, "heads": 2, "vocab": 300} if args.tiny else {
    "layers": 12, "width": 768, "heads": 12, "vocab": 50257}
if args.tiny:
    args.batch, args.seq, args.rounds, args.steps = 2, 32, min(args.rounds, 2), 2
tokens_per_step = args.batch * args.seq


def cairn_seconds(scratch: Scratch, dtype: str) -> list:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, shape["vocab"])}"}}', f"model.context={args.seq}",
            f"batch.samples={args.batch}", f"batch.micro={args.batch}", f"stop=T.steps({args.steps + 1})",
            f'precision="{"fp32" if dtype == "f32" else "bf16"}"', "optimizer.lr-", "eval-", "checkpoint-",
            "log.tensorboard=false"] + [f"model.{name}={value}" for name, value in shape.items()]
    run_quietly(train_command(args.cairn, ROOT / "recipes/gpt2_124m.lua", run, sets,
                              more=["--threads", str(args.threads)]))
    steps = steps_of(run)
    if len(steps) != args.steps + 1:
        sys.exit(f"{run}/metrics.jsonl has {len(steps)} steps, expected {args.steps + 1}")
    return [step["step_ms"] / 1000 for step in steps[1:]]


def torch_seconds(scratch: Scratch, dtype: str) -> list:
    command = [args.python, str(pathlib.Path(__file__).with_name("torch_gpt2_step.py")), "--tokens",
               scratch.tokens(200_000, shape["vocab"]), "--dtype", dtype, "--batch", str(args.batch), "--seq",
               str(args.seq), "--steps", str(args.steps), "--threads", str(args.threads)]
    for name, value in shape.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | TORCH_ENV)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    out = json.loads(done.stdout.splitlines()[-1])
    global torch_version
    torch_version = out["torch"]
    return out["seconds"]


TORCH_ENV = {"OMP_WAIT_POLICY": "passive", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184",
             "MALLOC_TOP_PAD_": "67108864"}
torch_version = ""
print(machine())
print(f"GPT-2 {shape}, batch {args.batch} x {args.seq}, {args.threads} threads, {args.rounds} rounds of {args.steps} "
      f"steps each after one warm-up step", flush=True)
with Scratch(args.scratch) as scratch:
    ours = {dtype: [] for dtype in args.dtype}
    theirs = {dtype: [] for dtype in args.dtype}
    for number in range(args.rounds):
        for dtype in args.dtype:
            mine = statistics.median(cairn_seconds(scratch, dtype))
            ours[dtype].append(tokens_per_step / mine)
            text = f"  round {number + 1} {dtype}: cairn {mine:.3f} s a step"
            if args.python:
                other = statistics.median(torch_seconds(scratch, dtype))
                theirs[dtype].append(tokens_per_step / other)
                text += f", torch {other:.3f} s, ratio {other / mine:.2f}"
            print(text + f"; load {load()}", flush=True)
    for dtype in args.dtype:
        print(f"{dtype}: cairn {spread(ours[dtype], 0)} tokens/s")
        if args.python:
            ratios = [a / b for a, b in zip(ours[dtype], theirs[dtype])]
            print(f"{dtype}: torch {torch_version} {spread(theirs[dtype], 0)} tokens/s; cairn/torch {spread(ratios, 2)}")
