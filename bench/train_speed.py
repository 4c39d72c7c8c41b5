#!/usr/bin/env python3
"""Seconds of a training step in cairn, against the same step in PyTorch and llm.c on the same CPU, interleaved.

  bench/train_speed.py [--torch PYTHON[:compile]]... [--llmc FOLDER] [--model gpt2|small] [--dtype f32 bf16]
                       [--threads 1 2] [--rounds 5] [--steps 2] [--busy]

Models: gpt2 is GPT-2 124M, batch 4 x 512 tokens; small is nanoGPT's Shakespeare size on bytes, 6 layers of 384, batch
12 x 256. Each round runs every program once for each dtype and number of threads, one after the other, with the same
tokens, shape and optimizer; the first step of each process (two of a compiled one) is a warm-up and not counted.

--torch may be given several times: a Python that has torch; with :compile the model goes through torch.compile. PyTorch
runs in the settings that are best for it: threads that wait passively, the OpenMP flavour of OpenBLAS where the
distribution has it, AVX-512 kernels, and a malloc that keeps freed memory, without which activations are paged in anew
at each step.
--llmc: a checkout of llm.c; its CPU program is built and run with random weights (float32 only, one round, one step).
--busy: cairn once more with an endless loop on one of the cores.
--tiny: a small shape, seconds in all; says nothing about speed.

The last lines give for each setting cairn's share of the machine's peak, as kernel_bench measures it between the rounds
(multiply-adds in registers, all the threads at once), and how many times as long the others take. FLOPs of a step: 6 N +
12 L C T a token, N without the positions (as Kaplan et al. 2020 count, attention in full).
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from common import ROOT, Scratch, add_cairn_option, load, machine, run_quietly, spread, steps_of, train_command
from llmc_step import llmc_seconds

SHAPES = {
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "batch": 4, "seq": 512},
    "small": {"layers": 6, "width": 384, "heads": 6, "vocab": 256, "batch": 12, "seq": 256},
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 300, "batch": 2, "seq": 32},
}
TORCH_ENV = {"OMP_WAIT_POLICY": "passive", "ATEN_CPU_CAPABILITY": "avx512", "MALLOC_MMAP_MAX_": "0",
             "LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu/openblas-openmp", "MALLOC_TOP_PAD_": "67108864",
             "MALLOC_TRIM_THRESHOLD_": "17179869184"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--torch", action="append", default=[], metavar="PYTHON[:compile]")
parser.add_argument("--llmc", metavar="FOLDER")
parser.add_argument("--bench", default=str(ROOT / "build/release/kernel_bench"),
                    help="for the peak (default: %(default)s)")
parser.add_argument("--model", choices=["gpt2", "small"], default="gpt2")
parser.add_argument("--dtype", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
parser.add_argument("--threads", nargs="+", type=int, default=[os.cpu_count()])
parser.add_argument("--steps", type=int, default=2, help="counted steps of a round (default: %(default)s)")
parser.add_argument("--batch", type=int)
parser.add_argument("--seq", type=int)
parser.add_argument("--busy", action="store_true")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps = 1, 2
shape = dict(SHAPES["tiny" if args.tiny else args.model])
batch, seq = args.batch or shape["batch"], args.seq or shape["seq"]
del shape["batch"], shape["seq"]
parameters = 12 * shape["layers"] * shape["width"] ** 2 + shape["vocab"] * shape["width"]  # matrices
flops = (6 * parameters + 12 * shape["layers"] * shape["width"] * seq) * batch * seq


def cairn_seconds(scratch: Scratch, dtype: str, threads: int) -> float:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, shape["vocab"])}"}}', f"model.context={seq}",
            f"batch.samples={batch}", f"batch.micro={batch}", f"stop=T.steps({args.steps + 1})",
            f'precision="{"fp32" if dtype == "f32" else "bf16"}"', "optimizer.lr-", "eval-", "checkpoint-",
            "log.tensorboard=false"] + [f"model.{name}={value}" for name, value in shape.items()]
    run_quietly(train_command(args.cairn, ROOT / "recipes/gpt2_124m.lua", run, sets, more=["--threads", str(threads)]))
    steps = steps_of(run)
    if len(steps) != args.steps + 1:
        sys.exit(f"{run}/metrics.jsonl has {len(steps)} steps, expected {args.steps + 1}")
    return statistics.median(step["step_ms"] / 1000 for step in steps[1:])


def torch_seconds(scratch: Scratch, torch: str, dtype: str, threads: int) -> float:
    python, _, compiled = torch.partition(":")
    command = [python, str(pathlib.Path(__file__).with_name("torch_gpt2_step.py")), "--tokens",
               scratch.tokens(200_000, shape["vocab"]), "--dtype", dtype, "--batch", str(batch), "--seq", str(seq),
               "--steps", str(args.steps), "--threads", str(threads)] + (["--compile"] if compiled else [])
    for name, value in shape.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | TORCH_ENV)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    out = json.loads(done.stdout.splitlines()[-1])
    versions[torch] = f"PyTorch {out['torch']}{' compiled' if compiled else ''}"
    return statistics.median(out["seconds"])


def peak_gflops(dtype: str, threads: int) -> float:
    """Of multiply-adds in registers, the best of a few; 0 where the processor has no instruction for the dtype."""
    done = subprocess.run([args.bench, "--rounds=3", f"--only=peak {dtype}"], capture_output=True, text=True, check=True,
                          env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"})
    found = re.search(rf"^peak {dtype} .*\.\. ([\d.]+)\]", done.stdout, re.M)
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def one_core_taken():
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


versions = {}
print(machine())
print(f"{args.model} {shape}, batch {batch} x {seq}, {flops / 1e9:.0f} GFLOP a step; {args.rounds} rounds of {args.steps} "
      f"steps", flush=True)
seconds = {}  # (dtype, threads, who) -> of each round
peaks = {}
with Scratch(args.scratch) as scratch:
    for number in range(args.rounds):
        for dtype in args.dtype:
            for threads in args.threads:
                def keep(who, value):
                    seconds.setdefault((dtype, threads, who), []).append(value)
                    print(f"  round {number + 1} {dtype} {threads} threads: {versions.get(who, who)} {value:.3f} s; "
                          f"load {load()}", flush=True)

                peaks.setdefault((dtype, threads), []).append(peak_gflops(dtype, threads))
                keep("cairn", cairn_seconds(scratch, dtype, threads))
                if args.busy:
                    with one_core_taken():
                        keep("cairn beside a busy loop", cairn_seconds(scratch, dtype, threads))
                for torch in args.torch:
                    keep(torch, torch_seconds(scratch, torch, dtype, threads))
                if args.llmc and number == 0 and dtype == args.dtype[-1]:
                    keep("llm.c (float32)", llmc_seconds(scratch.path / "llmc", args.llmc, batch, seq, threads))

for dtype in args.dtype:
    for threads in args.threads:
        ours = seconds[dtype, threads, "cairn"]
        rate, peak = flops / statistics.median(ours) * 1e-9, max(peaks[dtype, threads])
        print(f"{dtype}, {threads} threads: cairn {spread(ours)} s, {batch * seq / statistics.median(ours):.0f} tokens/s, "
              f"{rate:.0f} GFLOP/s" + (f", {100 * rate / peak:.1f} % of the peak {peak:.0f}" if peak > 0 else ""))
        for (other_dtype, other_threads, who), theirs in seconds.items():
            if (other_dtype, other_threads) != (dtype, threads) or who == "cairn":
                continue
            ratios = [b / a for a, b in zip(ours, theirs)]
            print(f"  {versions.get(who, who)}: {spread(theirs)} s, {spread(ratios, 2)} times as long")
    if len(args.threads) > 1:
        few, many = min(args.threads), max(args.threads)
        ratios = [a / b for a, b in zip(seconds[dtype, few, "cairn"], seconds[dtype, many, "cairn"])]
        print(f"{dtype}: {many} threads are {spread(ratios, 2)} times as fast as {few}")
