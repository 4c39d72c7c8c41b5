#!/usr/bin/env python3
"""How long until the first step: from exec of `cairn train` to the first finished step, and from SIGKILL of a rank to the
first new one.

  bench/start_time.py [--rounds 5] [--nproc 2] [--before OTHER/build/release/cairn]

Start: from just before exec until metrics.jsonl holds step 1 (looked at every 2 ms). Recovery: as the agent's events.jsonl
tells it, from the signal to the first step beyond the one before it; state in shared memory. Both contain one step, which
is given beside them. The model is recipes/tiny.lua on made-up tokens. With --before, interleaved pairs with another
program and their ratio.
"""
import argparse
import signal
import statistics
import subprocess
import sys
import time

from common import (ROOT, Scratch, add_cairn_option, interleaved, json_lines, load, machine, ratio, spread, steps_of,
                    train_command)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--nproc", type=int, default=2)
parser.add_argument("--before", help="another program, to compare with")
parser.add_argument("--tiny", action="store_true", help="two rounds")
args = parser.parse_args()
if args.tiny:
    args.rounds = 2
LIMIT_S = 60


def measure(scratch: Scratch, program: str) -> dict:
    run = scratch.run_folder("run")
    sets = [f'data=T.token_files{{train="{scratch.tokens(200_000, 256)}"}}', f"batch.samples={4 * args.nproc}",
            "batch.micro=4", "stop=T.steps(30)", "optimizer.lr-", "eval-", "checkpoint.save-",
            "checkpoint.snapshot=T.every{steps=1}"]
    command = train_command(program, ROOT / "recipes/tiny.lua", run, sets, args.nproc,
                            ["--kill", f"{args.nproc - 1}@20"])
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        while not (steps := steps_of(run)):
            if child.poll() is not None or time.monotonic() > begin + LIMIT_S:
                child.send_signal(signal.SIGKILL)
                sys.exit(f"{' '.join(command)}\nno step within {LIMIT_S} s:\n{child.stdout.read()[-3000:]}")
            time.sleep(0.002)
        start = time.monotonic() - begin
        said, _ = child.communicate(timeout=LIMIT_S)
        if child.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {child.returncode}:\n{said[-3000:]}")
    recovered = [event for event in json_lines(run / "events.jsonl") if event["event"] == "recovered"]
    if len(recovered) != 1:
        sys.exit(f"{run}/events.jsonl tells of {len(recovered)} recoveries, expected 1")
    return {"start": start, "first_step": steps[0]["step_ms"] / 1000, "recovery": recovered[0]["seconds"],
            "step": recovered[0]["step_seconds"]}


def tell(rounds: list) -> None:
    print(f"{args.nproc} ranks, {statistics.median(r['step'] for r in rounds) * 1000:.1f} ms a step after a recovery")
    print(f"exec to first finished step: {spread([r['start'] for r in rounds])} s, of it the step "
          f"{spread([r['first_step'] for r in rounds])} s")
    print(f"SIGKILL to first new step:   {spread([r['recovery'] for r in rounds])} s, of it the step "
          f"{spread([r['step'] for r in rounds])} s")


print(machine())
with Scratch(args.scratch) as scratch:
    if args.before:
        before, now = interleaved(args.rounds, args.before, args.cairn, lambda program: measure(scratch, program))
        for name, rounds in (("before", before), ("now", now)):
            print(f"{name}:")
            tell(rounds)
        for key in ("start", "recovery"):
            print(f"{key}, now / before: {ratio([r[key] for r in before], [r[key] for r in now])}")
    else:
        rounds = []
        for number in range(args.rounds):
            rounds.append(measure(scratch, args.cairn))
            print(f"  round {number + 1}: " + ", ".join(f"{key} {value:.3f} s" for key, value in rounds[-1].items()) +
                  f"; load {load()}", flush=True)
        tell(rounds)
