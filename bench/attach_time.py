#!/usr/bin/env python3
"""How long a killed rank's successor takes until it can step, by size of the state: attaching to shared memory copies
nothing, so the time should not grow with it.

  bench/attach_time.py [--rounds 5] [--gib 0.5,2,4] [--nproc 4]

The model is almost all vocabulary, so that much state goes with little arithmetic; tp = --nproc. A rank is killed after a
step (SIGKILL) while all compute the next one. Told: "ready", from a rank's start to the begin of its first step by the
kernel's own clock of 10 ms, the slowest rank; and the whole recovery, from the signal to the end of the first new step
without that step. Sizes are interleaved.
"""
import argparse
import statistics
import sys

from common import ROOT, Scratch, add_cairn_option, json_lines, load, machine, run_quietly, spread, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--gib", default="0.5,2,4", help="sizes of the Adam state (default: %(default)s)")
parser.add_argument("--nproc", type=int, default=4)
parser.add_argument("--tiny", action="store_true", help="seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.gib, args.nproc = 1, "0.004", 2
WIDTH = 512
STEPS = 100 if args.tiny else 8  # enough that the kill after step 3 comes before the end


def measure(scratch: Scratch, gib: float) -> dict:
    run = scratch.run_folder("run")
    vocab = max(512, int(gib * 2**30 / 12 / WIDTH)) // 64 * 64
    sets = [f'data=T.token_files{{train="{scratch.tokens(20_000, 256)}"}}', "model.layers=1", f"model.width={WIDTH}",
            "model.heads=8", "model.context=8", f"model.vocab={vocab}", "batch.samples=1", "batch.micro=1",
            f"mesh.tp={args.nproc}", f"stop=T.steps({STEPS})", "optimizer.lr-", "eval-", "checkpoint-",
            "checkpoint.snapshot=T.every{steps=1}", "tokenizer-",
            "log.tensorboard=false"]
    run_quietly(train_command(args.cairn, ROOT / "recipes/tiny.lua", run, sets, args.nproc,
                              ["--kill", f"{args.nproc - 1}@3"]))
    events = json_lines(run / "events.jsonl")
    ready = [e["ms"] for e in events if e["event"] == "ready" and e["from"] == "memory"]
    recovered = [e for e in events if e["event"] == "recovered"]
    if len(ready) != args.nproc or len(recovered) != 1:
        sys.exit(f"{run}/events.jsonl: {len(ready)} ranks became ready from memory, {len(recovered)} recoveries")
    step = [e["step"] for e in events if e["event"] == "start"][-1]
    return {"ready_ms": max(ready), "recovery_s": recovered[0]["seconds"] - recovered[0]["step_seconds"],
            "step_s": recovered[0]["step_seconds"], "from_step": step,
            "gib": [e for e in events if e["event"] == "saved"][-1]["bytes"] / 2**30}


print(machine())
sizes = [float(text) for text in args.gib.split(",")]
with Scratch(args.scratch) as scratch:
    got = {size: [] for size in sizes}
    for number in range(args.rounds):
        for size in sizes:
            got[size].append(measure(scratch, size))
            one = got[size][-1]
            print(f"  round {number + 1}: {one['gib']:.2f} GiB: ready after {one['ready_ms']:.0f} ms, recovered in "
                  f"{one['recovery_s']:.3f} s and a step of {one['step_s']:.3f} s, from step {one['from_step']}; "
                  f"load {load()}", flush=True)
    for size in sizes:
        rounds = got[size]
        print(f"{statistics.median(r['gib'] for r in rounds):6.2f} GiB: ready after "
              f"{spread([r['ready_ms'] for r in rounds], 0)} ms (bar 100); SIGKILL to stepping "
              f"{spread([r['recovery_s'] for r in rounds])} s")
