#!/usr/bin/env python3
"""The offline tools against what the disk and the system can do, interleaved in one run, every arm with a cold page cache:

  reshard   tp=2 -> another layout, against cp of the same files; both end with everything fsynced
  verify    against fio reading the same files (io_uring, O_DIRECT, 4 MiB blocks; of two settings, both with buffers in huge pages,
            the one with the better median)

  bench/ckpt_tools.py --scratch FOLDER_ON_THE_DISK [--rounds 7] [--megabytes 1024] [--memory 256MiB] [--mesh pp=2,dp=2]

Also shown: the peak memory of reshard beyond that of `cairn ckpt ls`, which loads the same program and manifest. The state
is that of a model of the asked-for size after one step of training. Needs three times the state on the disk and four
times in /dev/shm and memory while it is made. fio: Debian package fio; without it, its column is left out.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

from common import Scratch, add_cairn_option, load, machine, run_quietly, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.set_defaults(rounds=7)
parser.add_argument("--megabytes", type=int, default=1024, help="size of the state (default: %(default)s)")
parser.add_argument("--memory", default="256MiB", help="of reshard (default: %(default)s)")
parser.add_argument("--mesh", default="pp=2,dp=2", help="target layout (default: %(default)s)")
parser.add_argument("--tiny", action="store_true", help="two rounds of 8 MiB without fio")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes, args.memory = 2, 8, "16MiB"
has_fio = shutil.which("fio") is not None and not args.tiny

RECIPE = """local T = require "cairn"
return T.recipe {{ name = "bench", seed = 7, stop = T.steps(1),
  model = T.gpt {{ layers = {layers}, width = {width}, heads = {heads}, context = 16, vocab = 257 }},
  tokenizer = T.bytes, data = T.megatron {{ prefix = "{prefix}", split = {{ 90, 10 }} }},
  batch = {{ samples = 2, micro = 1 }}, optimizer = T.adamw {{ peak_lr = 1e-3 }}, mesh = {{ tp = 2 }} }}
"""


def make_source(scratch) -> pathlib.Path:
    layers = 2 if args.tiny else 12
    width = max(128, round((args.megabytes * 2**20 / 12 / (12 * layers)) ** 0.5 / 128) * 128)
    text = scratch.path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    run_quietly([args.cairn, "data", "tokenize", str(text), "--out", str(scratch.path / "t")])
    recipe = scratch.path / "r.lua"
    recipe.write_text(RECIPE.format(layers=layers, width=width, heads=width // 64, prefix=scratch.path / "t"))
    run = scratch.run_folder("source")
    run_quietly([args.cairn, "train", str(recipe), "--nproc", "2", "--run", str(run)])
    (step,) = (run / "checkpoints").glob("step-*")
    return step


def sync_path(path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def forget(folder) -> None:
    """Takes the files out of the page cache."""
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(command):
    """Seconds, peak RSS in bytes, what it printed."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    if child.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {child.returncode}:\n{out[-2000:]}")
    return seconds, usage.ru_maxrss * 1024, out


def copy(step, target) -> float:
    shutil.rmtree(target, ignore_errors=True)
    start = time.monotonic()
    subprocess.run(["cp", "-r", "--reflink=never", str(step), str(target)], check=True)
    for path in sorted(target.iterdir()):
        sync_path(path)
    sync_path(target)
    sync_path(target.parent)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def reshard(step, target):
    shutil.rmtree(target, ignore_errors=True)
    seconds, peak, out = timed([args.cairn, "ckpt", "reshard", step, target, "--mesh", args.mesh, "--memory", args.memory,
                                "--json"])
    shutil.rmtree(target)
    return seconds, peak, json.loads(out)


FIO = [["--iodepth=16"], ["--iodepth=32", "--fixedbufs", "--registerfiles"]]  # the second touches its buffers before its clock starts


def fio(files, setting) -> float:
    total, seconds = 0, 0.0
    command = ["fio", "--output-format=json", "--rw=read", "--bs=4M", "--direct=1", "--mem=malloc", "--ioengine=io_uring",
               "--readonly", "--allow_file_create=0", *setting]
    for path in files:  # one after the other, as verify reads them
        size = path.stat().st_size // 4096 * 4096
        command += [f"--name={path.name}", "--stonewall", f"--filename={path}", f"--size={size}"]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    for job in json.loads(done.stdout[done.stdout.index("{"):])["jobs"]:
        total += job["read"]["io_bytes"]
        seconds += job["read"]["runtime"] / 1000
    return total / seconds / 1e9


print(machine())
with Scratch(args.scratch) as scratch:
    step = make_source(scratch)
    files = sorted(step.glob("*.h5"))
    size = sum(path.stat().st_size for path in step.iterdir())
    print(f"{size / 2**20:.0f} MiB in {len(files)} files, tp=2 -> {args.mesh}, --memory {args.memory}, {args.rounds} rounds",
          flush=True)
    base = max(timed([args.cairn, "ckpt", "ls", step.parent])[1] for _ in range(3))
    got, peaks = {}, []
    for number in range(args.rounds):
        round_of = {}
        # In turn either of a pair comes first: a disk that has just been written to reads slower for a while.
        writers, readers = ["reshard", "cp"], ["verify"] + (["fio 0", "fio 1"] if has_fio else [])
        arms = writers + readers if number % 2 == 0 else writers[::-1] + readers[::-1]
        for name in arms:
            forget(step)
            os.sync()  # a file system may discard removed blocks when it commits, in the time of whoever comes next
            if name == "reshard":
                seconds, peak, told = reshard(step, scratch.path / "target")
                peaks.append(peak - base)
                round_of[name] = size / seconds / 1e9
            elif name == "cp":
                round_of[name] = size / copy(step, scratch.path / "copied") / 1e9
            elif name == "verify":
                told = json.loads(timed([args.cairn, "ckpt", "verify", step, "--json"])[2])
                assert told["whole"]
                round_of[name] = told["bytes"] / told["seconds"] / 1e9
            else:
                round_of[name] = fio(files, FIO[int(name[-1])])
        print(f"  round {number + 1}: " + ", ".join(f"{k} {round_of[k]:.2f}" for k in arms) + f" GB/s; load {load()}",
              flush=True)
        for name, value in round_of.items():
            got.setdefault(name, []).append(value)
    if has_fio:
        got["fio"] = max((got.pop(f"fio {number}") for number in range(len(FIO))), key=statistics.median)
    for name, values in got.items():
        print(f"{name:<8} {spread(values, 2)} GB/s")
    print(f"reshard / cp: {spread([a / b for a, b in zip(got['reshard'], got['cp'])], 2)}")
    if "fio" in got:
        print(f"verify / fio read: {spread([a / b for a, b in zip(got['verify'], got['fio'])], 2)}")
    print(f"reshard: peak memory over ls {statistics.median(peaks) / 2**20:.1f} MiB (at most {max(peaks) / 2**20:.1f}), "
          f"allowed {args.memory}, state {size / 2**20:.0f} MiB")
