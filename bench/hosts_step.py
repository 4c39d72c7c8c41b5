#!/usr/bin/env python3
"""A training step over four hosts of two ranks against the same eight ranks on one host, and the bytes that hosts send.

  bench/hosts_step.py [--replicas] [--apart] [--rounds 5] [--steps 5]          (needs root: hosts are namespaces, tests/cluster/hosts)

The same recipe (tp 2 within a host, dp 4 across, ZeRO-1; steps of a second and more) by turns on one host and on four, on
the same cores. The first step of a run is a warm-up. Bytes: what the network interfaces of the hosts have sent between two
steps, against the plan's traffic: of a reduction or a gathering over n hosts each member sends (n - 1) / n of the whole.
Network headers, signs of life and the exact sums of a step come on top.
--replicas: four hosts with a copy of each step in another host's memory (checkpoint.replicate) against four without.
--apart: ranks have the first core of the machine, agents, which copy, the other cores: as on a host with cores to spare.
--tiny: a small shape, seconds in all; says nothing about speed.
"""
import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time

from common import ROOT, add_cairn_option, machine, spread, steps_of

HOSTS = ROOT / "tests/cluster/hosts"
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "hosts", stop = T.steps({steps}), precision = "fp32", log = T.log {{ tensorboard = false }},
  model = T.gpt {{ layers = {layers}, width = {width}, heads = 8, context = {context}, vocab = 300 }},
  data = T.token_files {{ train = "{tokens}" }},
  batch = {{ samples = {samples}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-3, zero = 1 }}, {more}
  mesh = T.mesh {{ tp = 2, pp = 1, dp = 4, sequence_parallel = true }},
}}
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--steps", type=int, default=5, help="counted steps of a run (default: %(default)s)")
parser.add_argument("--replicas", action="store_true")
parser.add_argument("--apart", action="store_true")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
cores = sorted(os.sched_getaffinity(0))
if args.apart and len(cores) < 2:
    print("skipped: --apart needs two cores")
    sys.exit(77)
if os.geteuid() != 0:
    print("skipped: hosts of their own need root")
    sys.exit(77)
shape = {"layers": 2, "width": 64, "context": 64, "samples": 8} if args.tiny else {
    "layers": 4, "width": 512, "context": 256, "samples": 16}


def plan_bytes(recipe) -> float:
    """That all hosts together send in a step."""
    said = subprocess.run([args.cairn, "plan", recipe, "--json"], capture_output=True, text=True, check=True)
    out = 0.0
    for stage in json.loads(said.stdout)["stages"]:
        for group in stage["rank_traffic"]:
            if group["group"] != "dp":
                continue  # tp stays in a host; the world's few bytes are counted as what comes on top
            others = group["ranks"] - 1
            out += (2 * others / group["ranks"] * group["all_reduce"]["bytes"] +
                    others / group["ranks"] * group["reduce_scatter"]["bytes"] + others * group["all_gather"]["bytes"])
    return 8 * out


def has_ended(pid) -> bool:
    """It may stay as a zombie, where nobody asks for its exit status."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children(pid) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(word) for word in f.read().split()]


def bind(pid, to):
    """All threads that it has; later ones have the cores of the thread that begins them."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), to)


def agent_of(pid) -> int:
    """The program below the shell that entered the host."""
    while open(f"/proc/{pid}/comm").read().strip() != "cairn":
        pid, = children(pid)
    return pid


def part(pids):
    """Binds the ranks, which are an agent's children, to the first core and agents to the others. Returns the ranks' number."""
    ranks = 0
    for agent in map(agent_of, pids):
        bind(agent, cores[1:])
        for rank in children(agent):
            bind(rank, cores[:1])
            ranks += 1
    return ranks


class Bed:
    def __init__(self, folder):
        self.env = {**os.environ, "CLUSTER": secrets.token_hex(4), "CLUSTER_DIR": f"{folder}/hosts"}
        self.shared = f"{folder}/hosts/shared"
        self.folder = folder
        self("up", "4", "--life", "3000", "--shm", "2g")

    def __call__(self, *words) -> str:
        done = subprocess.run([HOSTS, *map(str, words)], env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"hosts {' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done.stdout

    def sent(self) -> int:
        return sum(int(self("run", f"h{k}", "cat", "/sys/class/net/eth0/statistics/tx_bytes")) for k in range(4))

    def wait_for_agents(self, pids, seconds=60):
        """One that is still there has the first port, and costs the next run time."""
        deadline = time.monotonic() + seconds
        while not all(map(has_ended, pids)):
            if time.monotonic() >= deadline:
                sys.exit(f"agents of a complete run are still there after {seconds} s")
            time.sleep(0.05)

    def train(self, run, hosts, recipe):
        """Seconds of the counted steps; bytes that all hosts have sent a step. Returns when all processes have ended."""
        words = [args.cairn, "train", f"/mnt/shared/{recipe}.lua", "--run", f"/mnt/shared/{run}", "--threads", "1"]
        if hosts == 1:
            self("run", "h0", *words)
        else:
            names = ",".join(f"h{k}" for k in range(hosts))
            pids = [int(self("start", f"h{k}", f"{self.folder}/h{k}.log", *words, "--nproc", 8 // hosts, "--hosts", names,
                             "--host-index", k)) for k in reversed(range(hosts))]
            seen, parted = [], not args.apart
            while len(steps_of(f"{self.shared}/{run}")) <= args.steps:
                if all(map(has_ended, pids)) and len(steps_of(f"{self.shared}/{run}")) <= args.steps:
                    with open(f"{self.folder}/h0.log") as f:
                        sys.exit(f"{run} ended before its last step:\n{f.read()}")
                count = len(steps_of(f"{self.shared}/{run}"))
                if count > 0 and not parted:  # in the step that is a warm-up, or the one behind it
                    if (ranks := part(pids)) != 8:
                        sys.exit(f"agents below {pids} have {ranks} children, expected 8 ranks")
                    parted = True
                if count > 0 and (not seen or seen[-1][0] < count <= args.steps):
                    seen.append((count, self.sent()))
                time.sleep(0.02)
            self.wait_for_agents(pids)
        steps = [step["step_ms"] / 1000 for step in steps_of(f"{self.shared}/{run}")[1:]]
        if hosts == 1:
            return steps, 0
        (first, before), (last, after) = seen[0], seen[-1]
        return steps, (after - before) / max(1, last - first)


print(machine())
print(f"{shape}, 8 ranks: tp 2 x dp 4, ZeRO-1, a thread each; {args.rounds} rounds of {args.steps} steps", flush=True)
if args.scratch:
    os.makedirs(args.scratch, exist_ok=True)
with tempfile.TemporaryDirectory(prefix="cairn-bench-", dir=args.scratch) as folder:
    bed = Bed(folder)
    try:
        state = 88172645463325252
        tokens = bytearray()
        for _ in range(200_000):
            state ^= state << 13 & (1 << 64) - 1
            state ^= state >> 7
            state ^= state << 17 & (1 << 64) - 1
            tokens += (state % 257).to_bytes(2, "little")
        with open(f"{bed.shared}/tokens.bin", "wb") as f:
            f.write(tokens)
        def write_recipe(path, data="/mnt/shared/tokens.bin", more=""):
            with open(path, "w") as f:
                f.write(RECIPE.format(steps=args.steps + 1, tokens=data, more=more, **shape))

        write_recipe(f"{bed.shared}/recipe.lua")
        write_recipe(f"{bed.shared}/copied.lua", more="checkpoint = T.checkpoint { replicate = T.every { steps = 1 } },")
        write_recipe(f"{folder}/recipe.lua", data=f"{bed.shared}/tokens.bin")
        planned = plan_bytes(f"{folder}/recipe.lua")
        # Name, hosts, recipe.
        kinds = ([("without", 4, "recipe"), ("with copies", 4, "copied")] if args.replicas else
                 [("one host", 1, "recipe"), ("four hosts", 4, "recipe")])
        times, ratios, sent = {name: [] for name, *_ in kinds}, [], []
        for number in range(args.rounds):
            for name, hosts, recipe in kinds if number % 2 == 0 else kinds[::-1]:
                run = f"run-{number}-{name.replace(' ', '-')}"
                steps, bytes_a_step = bed.train(run, hosts, recipe)
                times[name].append(statistics.median(steps))
                if name == "four hosts":
                    sent.append(bytes_a_step)
                if recipe == "copied":
                    copies = [event for event in map(json.loads, open(f"{bed.shared}/{run}/events.jsonl"))
                              if event["event"] == "replicas"][-1]
                    print(f"  {copies['steps']} of {args.steps + 1} steps were copied, {copies['bytes'] / 1e6:.1f} MB", flush=True)
            (first, first_s), (second, second_s) = [(name, times[name][-1]) for name, *_ in kinds]
            ratios.append(second_s / first_s)
            print(f"  round {number + 1}: {first} {first_s:.3f} s, {second} {second_s:.3f} s, {ratios[-1]:.3f}", flush=True)
    finally:
        bed("down")
print(", ".join(f"{name} {spread(seconds)} s" for name, seconds in times.items()) + " a step; "
      f"{kinds[1][0]} / {kinds[0][0]}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
if sent:
    print(f"sent a step by all hosts: {statistics.median(sent) / 1e6:.2f} MB, by plan {planned / 1e6:.2f} MB: "
          f"{statistics.median(sent) / planned:.3f}")
