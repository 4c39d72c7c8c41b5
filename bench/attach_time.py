#!/usr/bin/env python3
"""How long a killed rank's successor takes until it can step, by size of the state: attaching to shared memory copies
nothing, so the time should not grow with it.

  bench/attach_time.py [--rounds 5] [--gib 0.5,2,4] [--nproc 4] [--dp 1 [--zero 0] [--shard 0]] [--snapshot-by copy]

The model is almost all vocabulary, so that much state goes with little arithmetic; tp = --nproc / --dp. Replicas that do
not divide all state (--zero 0, --shard below --dp) keep copies of what others save, which are gone with a process. A rank gets SIGKILL in one
of three moments of a step: "within", a third of a step after all finished the one before, while they compute; "update", in
the middle of the time of the update, where weights are overwritten, so that the first step makes them again from the masters
of the step before, a copy beside its forward; and "between", as the first rank tells of a step that others may not have
published, so that the run may go back to the step before, with the same copy. Told: "ready", from a rank's start to the begin
of its first step by the kernel's own clock of 10 ms, the slowest rank; the whole recovery, from the agent's notice to the end
of the first new step without that step; and that step. Sizes and moments are interleaved.
"""
import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

from common import ROOT, Scratch, add_cairn_option, json_lines, load, machine, run_quietly, spread, steps_of, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--gib", default="0.5,2,4", help="sizes of the Adam state (default: %(default)s)")
parser.add_argument("--nproc", type=int, default=4)
parser.add_argument("--dp", type=int, default=1)
parser.add_argument("--zero", type=int, default=0)
parser.add_argument("--shard", type=int, default=0, help="replicas that divide state among them; 0: all")
parser.add_argument("--snapshot-by", default="banks", help="copy: state is private, and a start reads its copy (default: %(default)s)")
parser.add_argument("--moments", default="within,update,between")
parser.add_argument("--tiny", action="store_true", help="seconds in all; says nothing about speed")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.gib, args.nproc = 1, "0.004", 2
WIDTH = 512
STEPS = 100 if args.tiny else 8  # enough that the kill after step 3 comes before the end


def rank_pids(agent: int) -> list:
    """The processes that run ranks, in the order of their start."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            parent = int(entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == agent and b"_rank" in entry.joinpath("cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue  # no process, or no longer one
    return sorted(found)


def moment_in_step(step: dict, moment: str) -> float:
    """Milliseconds from the end of a step like this one to the moment in the next."""
    if moment == "within":
        return step["step_ms"] / 3
    return step["step_ms"] - step["split_ms"]["optimizer"] / 2


def kill_in_step(command: list, run: pathlib.Path, moment: str) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        while job.poll() is None and len(steps_of(run)) < 3:
            time.sleep(0.002)
        if job.poll() is None:
            time.sleep(moment_in_step(steps_of(run)[-1], moment) / 1000)
            os.kill(rank_pids(job.pid)[-1], signal.SIGKILL)
        output = job.communicate()[0]
        if job.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {job.returncode}:\n{output[-3000:]}")


def measure(scratch: Scratch, gib: float, moment: str) -> dict:
    run = scratch.run_folder("run")
    vocab = max(512, int(gib * 2**30 / 12 / WIDTH)) // 64 * 64
    sets = [f'data=T.token_files{{train="{scratch.tokens(20_000, 256)}"}}', "model.layers=1", f"model.width={WIDTH}",
            "model.heads=8", "model.context=8", f"model.vocab={vocab}", f"batch.samples={args.dp}", "batch.micro=1",
            f"mesh.tp={args.nproc // args.dp}", f"mesh.dp={args.dp}", f"optimizer.zero={args.zero}", f"stop=T.steps({STEPS})", "optimizer.lr-", "eval-", "checkpoint-",
            "checkpoint.snapshot=T.every{steps=1}", "tokenizer-",
            f"checkpoint.snapshot_by={args.snapshot_by}", "log.tensorboard=false", *([f"mesh.shard={args.shard}"] if args.shard else [])]
    between = ["--kill", f"{args.nproc - 1}@3"] if moment == "between" else []
    command = train_command(args.cairn, ROOT / "recipes/tiny.lua", run, sets, args.nproc, between)
    if moment == "between":
        run_quietly(command)
    else:
        kill_in_step(command, run, moment)
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
arms = [(size, moment) for size in sizes for moment in args.moments.split(",")]
with Scratch(args.scratch) as scratch:
    got = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm in arms:
            got[arm].append(measure(scratch, *arm))
            one = got[arm][-1]
            print(f"  round {number + 1}: {one['gib']:.2f} GiB, {arm[1]}: ready after "
                  f"{one['ready_ms']:.0f} ms, recovered in {one['recovery_s']:.3f} s and a step of {one['step_s']:.3f} s, "
                  f"from step {one['from_step']}; load {load()}", flush=True)
    for arm in arms:
        rounds = got[arm]
        print(f"{statistics.median(r['gib'] for r in rounds):6.2f} GiB, {arm[1]:7}: ready after "
              f"{spread([r['ready_ms'] for r in rounds], 0)} ms (bar 100); failure to stepping "
              f"{spread([r['recovery_s'] for r in rounds])} s; first step {spread([r['step_s'] for r in rounds])} s")
