#!/usr/bin/env python3
"""Training time really lost to a checkpoint: wall time of steps with snapshots and saves, minus that of the same steps
without, interleaved.

  bench/checkpoint_cost.py [--rounds 5] [--steps 24] [--every 4] [--width 512] [--layers 8] [--nproc 1]

Each round trains the same model on the same tokens three ways: no checkpoint, a snapshot to shared memory every --every
steps, and a save to disk every --every steps. Wall time is taken between the ends of the first and the last step as the
agent saw them, so that start, warm-up and the save at the end are in none of them. Also shown: what cairn itself
reports as lost (checkpoint_lost_ms), which does not contain what the background write takes from the training.
"""
import argparse
import statistics

from common import ROOT, Scratch, add_cairn_option, json_lines, load, machine, run_quietly, spread, steps_of, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--nproc", type=int, default=1)
parser.add_argument("--tiny", action="store_true", help="seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps, args.every, args.layers, args.width = 2, 6, 2, 2, 64

WAYS = {"none": [], "snapshot": [f"checkpoint.snapshot=T.every{{steps={args.every}}}"],
        "save": [f"checkpoint.save={{T.every{{steps={args.every}}}}}", "checkpoint.keep={T.last(2)}"]}


def measure(scratch: Scratch, way: str) -> dict:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, 1000)}"}}', f"model.layers={args.layers}",
            f"model.width={args.width}", f"model.heads={max(2, args.width // 64)}", "model.context=128",
            "model.vocab=1000", f"batch.samples={4 * args.nproc}", "batch.micro=4", f"stop=T.steps({args.steps})",
            "optimizer.lr-", "eval-", "checkpoint-", "tokenizer-", "log.tensorboard=false", f"optimizer.zero=1"]
    run_quietly(train_command(args.cairn, ROOT / "recipes/tiny.lua", run, sets + WAYS[way], args.nproc))
    steps = steps_of(run)
    counted = [step for step in steps[1:] if step["checkpoint_lost_ms"] > 0 and step["step"] < args.steps]
    saved = [event for event in json_lines(run / "events.jsonl") if event["event"] == "saved"]
    return {"wall": steps[-2]["time"] - steps[0]["time"], "checkpoints": len(counted),
            "told_ms": sum(step["checkpoint_lost_ms"] for step in counted), "bytes": saved[-1]["bytes"],
            "save_s": statistics.median(event["seconds"] for event in saved)}


print(machine())
with Scratch(args.scratch) as scratch:
    walls = {way: [] for way in WAYS}
    lost = {way: [] for way in WAYS if way != "none"}
    told = {way: [] for way in WAYS if way != "none"}
    for number in range(args.rounds):
        got = {way: measure(scratch, way) for way in WAYS}
        for way in WAYS:
            walls[way].append(got[way]["wall"])
            if way != "none":
                count = max(1, got[way]["checkpoints"])
                lost[way].append((got[way]["wall"] - got["none"]["wall"]) / count * 1000)
                told[way].append(got[way]["told_ms"] / count)
        print(f"  round {number + 1}: " + ", ".join(f"{way} {got[way]['wall']:.2f} s" for way in WAYS) +
              f"; a save takes {got['save']['save_s']:.2f} s in the background; load {load()}", flush=True)
    step_ms = [wall / (args.steps - 2) * 1000 for wall in walls["none"]]
    print(f"state {got['none']['bytes'] / 1e6:.0f} MB, {args.nproc} rank(s), step {spread(step_ms, 1)} ms, "
          f"{got['save']['checkpoints']} checkpoints a run")
    for way in lost:
        print(f"lost to a {way}: {spread(lost[way], 1)} ms of wall time; as cairn reports it {spread(told[way], 2)} ms")
