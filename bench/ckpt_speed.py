#!/usr/bin/env python3
"""GB/s of saving and loading a checkpoint against fio (O_DIRECT, 4 MiB blocks, 16 in flight) on the same disk and memcpy,
interleaved in one run.

  bench/ckpt_speed.py --scratch FOLDER_ON_THE_DISK [--rounds 5] [--megabytes 1024] [--files 4]

save hashes on the way; persist has the hashes from a snapshot, as the agent does; both end with every fsync and the
rename. fio writes the same number of bytes into one new file and ends with one fsync. load compares every checksum. Loads and
fio's reads bypass the page cache. fio: Debian package fio; without it, its columns are left out.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys

from common import ROOT, Scratch, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", default=str(ROOT / "build/release/ckpt_speed"))
parser.add_argument("--scratch", default=None, help="folder on the disk to measure (default: a temporary one)")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--megabytes", type=int, default=1024)
parser.add_argument("--files", type=int, default=4)
parser.add_argument("--tiny", action="store_true", help="two rounds of 64 MiB without fio")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes, args.files = 2, 64, 1
has_fio = shutil.which("fio") is not None and not args.tiny


def fio(folder, kind: str) -> float:
    command = ["fio", "--name=x", f"--filename={folder}/fio.bin", f"--rw={kind}", "--bs=4M", "--iodepth=16", "--direct=1",
               "--ioengine=io_uring", f"--size={args.megabytes}M", "--output-format=json"]
    if kind == "write":
        command.append("--end_fsync=1")
        pathlib.Path(folder, "fio.bin").unlink(missing_ok=True)  # new blocks each time, as a new checkpoint needs
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0][kind]
    return job["io_bytes"] / (job["runtime"] / 1000) / 1e9


print(machine())
with Scratch(args.scratch) as scratch:
    with subprocess.Popen([args.program, str(scratch.path), str(args.megabytes), str(args.files)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        ready = child.stdout.readline().split()
        if not ready:
            sys.exit(f"{args.program} ended with {child.wait()}")
        size = int(ready[2])

        def ask(word: str) -> float:
            child.stdin.write(word + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                sys.exit(f"{args.program} ended with {child.wait()} at {word}")
            return size / float(answer) / 1e9

        print(f"{size} bytes in {args.files} file(s), {ready[1]}, {args.rounds} rounds; GB/s", flush=True)
        got = {}
        for number in range(args.rounds):
            round_of = {}
            for name in ["save", "fio write", "persist", "load", "fio read", "copy"]:
                if name.startswith("fio"):
                    if has_fio:
                        round_of[name] = fio(scratch.path, name.split()[1])
                else:
                    round_of[name] = ask(name)
            print(f"  round {number + 1}: " + ", ".join(f"{k} {v:.2f}" for k, v in round_of.items()) + f"; load {load()}",
                  flush=True)
            for name, value in round_of.items():
                got.setdefault(name, []).append(value)
        for name, values in got.items():
            print(f"{name:<10} {spread(values, 2)} GB/s")
        for ours, theirs in [("save", "fio write"), ("persist", "fio write"), ("load", "fio read")]:
            if theirs in got:
                print(f"{ours} / {theirs}: {spread([a / b for a, b in zip(got[ours], got[theirs])], 2)}")
        child.stdin.close()
        if child.wait() != 0:
            sys.exit(f"{args.program} ended with {child.returncode}")
