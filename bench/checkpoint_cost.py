#!/usr/bin/env python3
"""Training time really lost to checkpoints: wall time of steps with snapshots and saves, minus that of the same steps
without, interleaved, for several sizes of the state.

  bench/checkpoint_cost.py [--rounds 5] [--steps 24] [--every 8] [--gib 0.25,0.5,1] [--nproc 4] [--layers 8]

Each round trains the same model on the same tokens four ways: no snapshot but the last step's ("none": updates stay in
one bank), a snapshot every step, one that is copied ("copied": checkpoint.snapshot_by), and one with a save to disk every
--every steps. Wall time is taken between the ends of
the first and the last step as the agent saw them, so that start, warm-up and the save at the end are in none of them.
A copy of the state by memcpy, the price of a snapshot that is copied, is measured beside it (one thread, pages touched).
Also shown: the longest pause of a rank in a save, and what cairn reports as lost (checkpoint_lost_ms).
stall_bench takes the update alone, up to larger sizes.
"""
import argparse
import statistics
import time

from common import ROOT, Scratch, add_cairn_option, json_lines, load, machine, run_quietly, spread, steps_of, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--every", type=int, default=8)
parser.add_argument("--gib", default="0.25,0.5,1", help="sizes of the Adam state, by the width (default: %(default)s)")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--nproc", type=int, default=4)
parser.add_argument("--tiny", action="store_true", help="seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps, args.every, args.layers, args.gib, args.nproc = 1, 6, 2, 2, "0.001", 1

WAYS = {"none": ["checkpoint.snapshot=T.every{steps=1000000}"],
        "snapshot": ["checkpoint.snapshot=T.every{steps=1}"],
        "copied": ["checkpoint.snapshot=T.every{steps=1}", "checkpoint.snapshot_by=copy"],
        "save": ["checkpoint.snapshot=T.every{steps=1}", f"checkpoint.save={{T.every{{steps={args.every}}}}}",
                 "checkpoint.keep={T.last(2)}"]}


def measure(scratch: Scratch, way: str, gib: float) -> dict:
    run = scratch.run_folder("run")
    width = max(64, round((gib * 2**30 / 12 / (12 * args.layers)) ** 0.5 / 64) * 64)
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, 1000)}"}}', f"model.layers={args.layers}",
            f"model.width={width}", f"model.heads={width // 64}", "model.context=32", "model.vocab=1000",
            f"batch.samples={args.nproc}", "batch.micro=1", f"stop=T.steps({args.steps})", "optimizer.lr-", "eval-",
            "checkpoint-", "tokenizer-", "log.tensorboard=false", "optimizer.zero=1"]
    run_quietly(train_command(args.cairn, ROOT / "recipes/tiny.lua", run, sets + WAYS[way], args.nproc))
    steps = steps_of(run)
    saved = [event for event in json_lines(run / "events.jsonl") if event["event"] == "saved"]
    within = [event for event in saved if event["step"] < args.steps]
    return {"wall": steps[-2]["time"] - steps[0]["time"], "saves": len(within),
            "told_ms": statistics.mean(step["checkpoint_lost_ms"] for step in steps[1:-1]),
            "pause_ms": max(event["pause_ms"] for event in saved), "bytes": saved[-1]["bytes"],
            "save_s": statistics.median(event["seconds"] for event in saved)}


def memcpy_ms(size: int) -> float:
    source, target = memoryview(bytearray(b"1") * size), memoryview(bytearray(b"2") * size)
    begin = time.perf_counter()
    target[:] = source
    return (time.perf_counter() - begin) * 1000


print(machine())
sizes = [float(text) for text in args.gib.split(",")]
with Scratch(args.scratch) as scratch:
    rounds = {size: [] for size in sizes}
    for number in range(args.rounds):
        for size in sizes:
            got = {way: measure(scratch, way, size) for way in WAYS}
            got["memcpy_ms"] = memcpy_ms(got["none"]["bytes"])
            rounds[size].append(got)
            print(f"  round {number + 1}, {got['none']['bytes'] / 2**30:.2f} GiB: " +
                  ", ".join(f"{way} {got[way]['wall']:.2f} s" for way in WAYS) +
                  f"; {got['save']['saves']} saves of {got['save']['save_s']:.2f} s in the background; memcpy "
                  f"{got['memcpy_ms']:.0f} ms; load {load()}", flush=True)
    count = args.steps - 2
    for size in sizes:
        got = rounds[size]
        per_snapshot = [(r["snapshot"]["wall"] - r["none"]["wall"]) / count * 1000 for r in got]
        per_save = [(r["save"]["wall"] - r["snapshot"]["wall"]) / max(1, r["save"]["saves"]) * 1000 for r in got]
        print(f"state {got[0]['none']['bytes'] / 2**30:.2f} GiB, {args.nproc} rank(s), step "
              f"{spread([r['none']['wall'] / count * 1000 for r in got], 1)} ms, memcpy of the state "
              f"{spread([r['memcpy_ms'] for r in got], 1)} ms")
        print(f"  lost to a snapshot: {spread(per_snapshot, 2)} ms of wall time, "
              f"{spread([lost / r['memcpy_ms'] * 100 for lost, r in zip(per_snapshot, got)], 0)} % of a memcpy (bar 25)")
        copied = [(r["copied"]["wall"] - r["none"]["wall"]) / count * 1000 for r in got]
        print(f"  lost to a snapshot that is copied: {spread(copied, 2)} ms of wall time, "
              f"{spread([lost / r['memcpy_ms'] * 100 for lost, r in zip(copied, got)], 0)} % of a memcpy; cairn reports "
              f"{spread([r['copied']['told_ms'] for r in got])} ms lost a step")
        print(f"  lost to a write in the background: {spread(per_save, 1)} ms of wall time")
        print(f"  longest pause of a rank in a save: {spread([r['save']['pause_ms'] for r in got])} ms (bar 1); cairn "
              f"reports {spread([r['snapshot']['told_ms'] for r in got])} ms lost a step")
