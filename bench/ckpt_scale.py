#!/usr/bin/env python3
"""Whether the arithmetic of checkpoints holds at the size of real systems: planning for 1,024 ranks, opening a manifest of a
million chunks, and the whole Adam states of BLOOM-176B and MT-NLG-530B under their own layouts as sparse files.

  bench/ckpt_scale.py --scratch FOLDER [--rounds 7] [--models bloom-176b,mt-nlg-530b]

The scratch folder needs some 1 GB for BLOOM (HDF5's structure and the shard table are real), 3 GB for MT-NLG, and a file
system with holes and large files (ext4, xfs). BLOOM takes about 2 minutes of one core, MT-NLG about 6; --models ''
leaves both out. Plan and open are timed within one process each, on one core, nothing else in it.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys

from common import ROOT, Scratch, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", default=str(ROOT / "build/release/ckpt_scale"))
parser.add_argument("--scratch", default=None, help="folder for the files (default: a temporary one)")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--models", default="bloom-176b,mt-nlg-530b")
parser.add_argument("--tiny", action="store_true", help="one round, and a small model in the place of the large ones")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.models = 1, "tiny"


def ask(*words) -> dict:
    done = subprocess.run([args.program, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"ckpt_scale {' '.join(map(str, words))} ended with {done.returncode}")
    return json.loads(done.stdout)


def print_plan(width: int) -> None:
    rounds = [ask("plan", width) for _ in range(args.rounds)]
    one = rounds[0]
    print(f"plan and validate, {one['tensors']} tensors x {one['ranks']} ranks, {one['shards']} shards: "
          f"{spread([r['plan_s'] + r['validate_s'] for r in rounds])} s "
          f"(plan {spread([r['plan_s'] for r in rounds])}, validate {spread([r['validate_s'] for r in rounds])}; "
          f"one rank alone {spread([r['one_rank_s'] * 1e3 for r in rounds])} ms)", flush=True)


def print_open(folder, width: int, chunk_bytes: int) -> None:
    one = ask("open", folder / "open", width, chunk_bytes, args.rounds)
    print(f"open a manifest of {one['chunks']} chunks in {one['shards']} shards of {one['tensors']} tensors "
          f"({one['manifest_bytes'] + one['table_bytes']} bytes, from the page cache): "
          f"{spread([s * 1e3 for s in one['open_s']], 1)} ms", flush=True)


print(machine())
with Scratch(args.scratch) as scratch:
    path = pathlib.Path(scratch.path)
    print_plan(2048)
    print_open(path, 2048, 36 << 10)
    if not args.tiny:  # shards as many as chunks: more than the bars ask for, and slower
        print_plan(12288)
        print_open(path, 12288, 4 << 20)
    for model in filter(None, args.models.split(",")):
        one = ask("sparse", model, path / model)
        ratio = one["file_bytes"] / one["payload_bytes"]
        print(f"{model}: {one['parameters']} parameters, {one['layout']}: {one['payload_bytes']} bytes of state in "
              f"{one['files']} files, as planned ({one['planned_bytes']}); {one['file_bytes']} bytes of files "
              f"({ratio:.5f} of the state), {one['shards']} shards, {one['chunks']} chunks; "
              f"planned in {one['plan_s']:.2f} s, laid out and committed in {one['save_s']:.1f} s, opened in "
              f"{one['open_s']:.2f} s, {one['read_back_bytes']} bytes read back and verified; "
              f"{one['disk_bytes']} bytes on disk", flush=True)
        shutil.rmtree(path / model)
print(f"load at the end {load()}")
