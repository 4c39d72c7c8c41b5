#!/usr/bin/env python3
"""How near `cairn plan` comes to the step time of this machine: each layout is calibrated, planned, then trained.

    bench/plan_time.py                       layouts of a small and a middle model
    bench/plan_time.py --steps 12 --only 124m
The bar is 10 %. A calibration is of other sizes than what is planned where a line says so: "from" so many layers and
samples. Run it on a quiet machine; --only takes a part, to fit a short quiet time.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import common

BYTE = dict(layers=6, width=384, heads=6, context=256, vocab=256)
DEEP = dict(BYTE, layers=12)
MIDDLE = dict(layers=8, width=512, heads=8, context=256, vocab=8192)  # 30 million parameters
GPT2 = dict(layers=12, width=768, heads=12, context=512, vocab=50257)
# name, model, precision, batch, micro, mesh, other fields, world, layers and samples of the calibration
CASES = [
    ("byte 1 rank", BYTE, "bf16", 12, 12, {}, "", 1, None),
    ("byte fp32", BYTE, "fp32", 12, 12, {}, "", 1, None),
    ("byte dp 2", BYTE, "bf16", 12, 6, dict(dp=2), "", 2, None),
    ("byte tp 2", BYTE, "bf16", 12, 12, dict(tp=2), "", 2, None),
    ("byte pp 2", BYTE, "bf16", 24, 3, dict(pp=2), "", 2, None),
    ("byte zb-h1", BYTE, "bf16", 24, 3, dict(pp=2), "schedule = 'zb-h1', ", 2, None),
    ("byte zero 3", BYTE, "bf16", 24, 3, dict(dp=2), "optimizer = { zero = 3 }, ", 2, None),
    ("byte recompute", BYTE, "bf16", 12, 12, {}, "recompute = { mode = 'full' }, ", 1, None),
    ("deep 1 rank", DEEP, "bf16", 24, 6, {}, "", 1, (6, 12)),
    ("deep dp 2", DEEP, "bf16", 48, 6, dict(dp=2), "", 2, (6, 24)),
    ("deep pp 2", DEEP, "bf16", 48, 3, dict(pp=2), "", 2, (6, 24)),
    ("deep 4 ranks", DEEP, "bf16", 24, 3, dict(tp=2, dp=2), "", 4, (6, 12)),
    ("30m 1 rank", MIDDLE, "bf16", 16, 8, {}, "", 1, None),
    ("30m dp 2", MIDDLE, "bf16", 32, 8, dict(dp=2), "", 2, None),
    ("30m tp 2", MIDDLE, "bf16", 16, 8, dict(tp=2), "", 2, None),
    ("30m pp 2", MIDDLE, "bf16", 16, 4, dict(pp=2), "", 2, None),
    ("124m 1 rank", GPT2, "bf16", 4, 4, {}, "", 1, (6, 4)),
    ("124m dp 2", GPT2, "bf16", 4, 2, dict(dp=2), "", 2, (6, 4)),
    ("124m 4 ranks", GPT2, "bf16", 4, 1, dict(tp=2, dp=2), "", 4, (6, 4)),
]

RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "plan-time", seed = 1, stop = T.steps({steps}), precision = "{precision}",
  model = T.gpt {{ {model} }},
  data = T.token_files {{ train = "{tokens}", dtype = "uint16" }},
  batch = {{ samples = {batch}, micro = {micro} }},
  optimizer = T.adamw {{ peak_lr = 1e-4, clip = 1.0, zero = 1 }},
  mesh = T.mesh {{ {mesh} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100000 }} }} }},
}}:with {{ {more} }}
"""


def table(fields):
    return ", ".join(f"{k} = {v}" for k, v in fields.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_cairn_option(parser)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    print(common.machine())
    print(f"{'layout':<16}{'from':>10}{'planned':>10}{'measured':>10}{'error':>8}   parts")
    worst, taken = 0, 0.0
    with common.Scratch(args.scratch) as scratch:
        env = dict(os.environ, CAIRN_CALIBRATION=str(scratch.path / "calibration.json"))
        for number, (name, model, precision, batch, micro, mesh, more, world, other) in enumerate(CASES):
            if args.only not in name:
                continue
            recipe = scratch.path / f"case{number}.lua"
            recipe.write_text(RECIPE.format(steps=args.steps, precision=precision, model=table(model), batch=batch,
                                            tokens=scratch.tokens(1 << 20, model["vocab"]), micro=micro, mesh=table(mesh),
                                            more=more))
            plan = [args.cairn, "plan", recipe, "--world", str(world), "--json"]
            sizes = ["--set", f"model.layers={other[0]}", "--set", f"batch.samples={other[1]}"] if other else []
            began = time.monotonic()
            subprocess.run(plan + sizes + ["--calibrate"], capture_output=True, env=env, check=True)
            taken = max(taken, time.monotonic() - began)
            planned = json.loads(subprocess.run(plan, capture_output=True, text=True, env=env, check=True).stdout)
            planned = planned["step_time"]
            run = scratch.run_folder("run")
            subprocess.run([args.cairn, "train", recipe, "--nproc", str(world), "--run", run], capture_output=True,
                           env=env, check=True)
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            measured = statistics.median(s["step_ms"] for s in steps[3:] if "step_ms" in s)
            error = planned["ms"] / measured - 1
            worst = max(worst, abs(error))
            parts = " ".join(f"{k} {v:.1f}" for k, v in planned["parts_ms"].items() if v > 0)
            split = {k: statistics.median(s["split_ms"][k] for s in steps[3:]) for k in steps[-1]["split_ms"]}
            took = " ".join(f"{k} {v:.1f}" for k, v in split.items() if v > 0.05)
            origin = f"{other[0]}L x {other[1]}" if other else "same"
            print(f"{name:<16}{origin:>10}{planned['ms']:>10.1f}{measured:>10.1f}{100 * error:>+7.1f}%   {parts}   took: {took}",
                  flush=True)
    print(f"largest error {100 * worst:.1f} %; the bar is 10 %; the longest calibration took {taken:.1f} s")


if __name__ == "__main__":
    main()
