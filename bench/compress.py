#!/usr/bin/env python3
"""What zstd after splitting byte planes brings and costs, on a state that was really trained, and whether it pays.

  bench/compress.py [--scratch FOLDER_ON_THE_DISK] [--rounds 7] [--steps 400] [--python PYTHON_WITH_HDF5PLUGIN]

Trains a byte-level GPT of 6.8 M parameters on this repository's own text for --steps steps (masters and both moments
are what is coded), then
  kinds   one core, in memory, 1 MiB chunks, by kind and zstd setting: ratio, GB/s of payload coded and undone
  disk    the whole state, --copies times, saved (every fsync, the commit) and loaded (verified), raw and coded in turn
  pays    from these: below which disk speed a coded save or load is faster than a raw one, for each core given
  h5py    with --python: h5py and hdf5plugin read every coded dataset, compared with the raw checkpoint's
"""
import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys

from common import ROOT, Scratch, add_cairn_option, load, machine, run_quietly, spread, train_command

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.set_defaults(rounds=7)
parser.add_argument("--program", default=str(ROOT / "build/release/compress"))
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--copies", type=int, default=8, help="of the state, one file each, in the arms on disk")
parser.add_argument("--threads", type=int, default=0, help="that code (default: as many as there are cores, at most 4)")
parser.add_argument("--python", default=None, help="an interpreter that has h5py and hdf5plugin")
parser.add_argument("--tiny", action="store_true", help="a few steps of a small model, two rounds")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.steps, args.copies = 2, 3, 1

H5PY = """
import sys, h5py, hdf5plugin, numpy, pathlib
raw, coded = (pathlib.Path(p) for p in sys.argv[1:])
count = filtered = 0
for path in sorted(coded.glob("*.h5")):
    with h5py.File(path) as a, h5py.File(raw / path.name) as b:
        names = []
        a.visititems(lambda name, thing: names.append(name) if isinstance(thing, h5py.Dataset) else None)
        for name in names:
            count += 1
            filtered += a[name].chunks is not None
            assert a[name][()].tobytes() == b[name][()].tobytes(), name
print(f"h5py {h5py.__version__} and hdf5plugin {hdf5plugin.version} read {count} datasets, {filtered} of them coded: "
      "the same bytes as the raw checkpoint's")
"""


def text_tokens(folder) -> str:
    """This repository's text as bytes, each a little-endian uint16."""
    out = bytearray()
    for pattern in ("*.md", "*.h", "*.cc", "*.py", "*.lua"):
        for path in sorted(ROOT.rglob(pattern)):
            if "build" not in path.relative_to(ROOT).parts:
                out += path.read_bytes()
    wide = bytearray(2 * len(out))
    wide[::2] = out
    path = folder / "text.bin"
    path.write_bytes(wide)
    return str(path)


def lines_of(*words) -> list:
    done = subprocess.run([args.program, *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{args.program} {' '.join(map(str, words))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


print(machine())
with Scratch(args.scratch) as scratch:
    shape = "layers = 2, width = 32, heads = 2, context = 32" if args.tiny else \
        "layers = 8, width = 256, heads = 4, context = 128"
    recipe = scratch.path / "compress.lua"
    recipe.write_text(f"""local T = require "cairn"
return T.recipe {{ name = "compress", seed = 1, stop = T.steps({args.steps}),
  model = T.gpt {{ {shape}, vocab = 256 }}, tokenizer = T.bytes,
  data = T.token_files {{ train = "{text_tokens(scratch.path)}" }},
  batch = {{ samples = 8, micro = 8 }},
  optimizer = T.adamw {{ peak_lr = 1e-3, lr = T.schedule {{ T.warmup {{ over = T.steps(1) }} }}, clip = 1.0 }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = {args.steps} }} }} }},
}}
""")
    run = scratch.run_folder("run")
    run_quietly(train_command(args.cairn, recipe, run, []))
    (step,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    size = sum(path.stat().st_size for path in step.glob("*.h5"))
    print(f"trained {args.steps} steps; state {size / 1e6:.0f} MB; load {load()}", flush=True)

    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in lines_of("kinds", step, args.rounds, 64):
        for number in ("ratio", "encode", "decode"):
            found[line["kind"], line["effort"]][number].append(line[number])
    print("one core: kind, zstd setting: ratio; GB/s coded; GB/s undone: median (smallest to largest)")
    for (kind, effort), numbers in found.items():
        print(f"  {kind:12} {effort:8} {statistics.median(numbers['ratio']):6.3f}   {spread(numbers['encode'], 2)}   "
              f"{spread(numbers['decode'], 2)}")
    print("  pays on a disk slower than, per core that codes (save) or undoes (load); where it does, at most ratio x:")
    for (kind, effort), numbers in found.items():
        if effort != "huffman":
            continue
        ratio, encode, decode = (statistics.median(numbers[n]) for n in ("ratio", "encode", "decode"))
        # A raw save takes 1/disk a byte. A coded one overlaps coding and writing: the slower of 1/encode, 1/(ratio*disk).
        print(f"  {kind:12} save {encode:5.2f} GB/s, load {decode:5.2f} GB/s, x{ratio:.2f}")

    arms = collections.defaultdict(list)
    target = scratch.path / "disk"
    for line in lines_of("disk", step, target, args.rounds, args.threads, args.copies):
        arms[line["coded"]].append(line)
        print(f"  round {line['round'] + 1}: {'coded' if line['coded'] else 'raw  '} save {line['save']:.2f} GB/s, "
              f"load {line['load']:.2f} GB/s, files {line['file_bytes'] / 1e6:.0f} MB; load {load()}")
    print(f"disk, {arms[True][0]['payload'] / 1e6:.0f} MB, {args.threads or min(4, os.cpu_count())} threads:")
    for what in ("save", "load"):
        ratio = [c[what] / r[what] for c, r in zip(arms[True], arms[False])]
        print(f"  {what}: raw {spread([r[what] for r in arms[False]], 2)} GB/s, coded "
              f"{spread([c[what] for c in arms[True]], 2)} GB/s, coded/raw {spread(ratio, 2)}")
    print(f"  files: coded/raw {arms[True][0]['file_bytes'] / arms[False][0]['file_bytes']:.3f}")

    if args.python:
        cold = scratch.run_folder("cold")
        run_quietly([args.cairn, "ckpt", "reshard", str(step), str(cold), "--mesh", "tp=1", "--compress", "zstd"])
        coded = cold / "checkpoints" / step.name
        done = subprocess.run([args.python, "-c", H5PY, str(step), str(coded)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"h5py: {done.stderr[-2000:]}")
        sizes = [sum(p.stat().st_size for p in folder.glob("*.h5")) for folder in (step, coded)]
        print(f"{done.stdout.strip()}; {sizes[0] / 1e6:.1f} MB raw, {sizes[1] / 1e6:.1f} MB coded")
