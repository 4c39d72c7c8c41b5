#!/usr/bin/env python3
"""Saving and loading a checkpoint against fio on the same disk, and against torch.save and torch DCP, interleaved.

  bench/ckpt_speed.py --scratch FOLDER_ON_THE_DISK [--rounds 7] [--megabytes 2048] [--files 4] [--small 20000]
                      [--python PYTHON_WITH_TORCH] [--arms save,load,small]

Arms of a round; of ours and fio's each comes first in turn. Each save is under a new step number and ends with every fsync and
the rename. Memory that payload passes through is kept from save to save and from load to load, as in a run, and as fio's has been
touched before its clock starts; `cold load` is the first of a process:
  save, fio write   hashes on the way, HDF5 structure known from the save before (as in a run)
  persist           the same, and the sums of the update compared in that pass, as the agent does
  over, fio over    persist into the files of a removed checkpoint, as in a run once its retention removes any; fio into
                    the file that it has written before
  load, fio read    every checksum compared; neither uses the page cache; fio reads the same files, for where a file lies
                    on a disk is worth a tenth of its speed
  unverified        the same load without comparing
  small, small over, small load   the same in --small tensors (1 GiB)
  pair              two saves in flight at once
  columns, sparse   the second quarter of the columns, with and without verification: bytes read per byte wanted
  torch_save, dcp_save, dcp2_save, torch_load, dcp_load   with --python; the same bytes, equal durability (torch_checkpoint.py)
Removal of older checkpoints is timed apart; before each arm comes a sync, for a file system that discards removed blocks does it
when it commits, in the time of whoever comes next. fio: of two settings, both with buffers in huge pages, the one with the better median;
4 MiB, O_DIRECT, io_uring, one file with its space reserved, new but for `fio over`, one fsync. Debian package fio; without it its columns are
left out. Ratios are of the same round; the table has median, smallest and largest.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from common import ROOT, Scratch, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", default=str(ROOT / "build/release/ckpt_speed"))
parser.add_argument("--scratch", default=None, help="folder on the disk to measure (default: a temporary one)")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--megabytes", type=int, default=2048)
parser.add_argument("--files", type=int, default=4)
parser.add_argument("--small", type=int, default=20000, help="tensors of the arm of many small ones; 0: leave it out")
parser.add_argument("--columns", type=int, default=1024, help="float32 columns of the large tensors (default: %(default)s)")
parser.add_argument("--python", default=None, help="an interpreter that has torch; without it, its arms are left out")
parser.add_argument("--arms", default="save,persist,over,load,unverified,small,pair,columns,copy", help="of those: which (all)")
parser.add_argument("--tiny", action="store_true", help="two rounds of 64 MiB without fio")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes, args.files, args.small = 2, 64, 1, 500
small_megabytes = 64 if args.tiny else 1024
arms = args.arms.split(",")
if "small" not in arms:
    args.small = 0
has_fio = shutil.which("fio") is not None and not args.tiny
FIO = [["--iodepth=16"], ["--iodepth=32", "--fixedbufs", "--registerfiles"]]


def fio(folder, kind: str, megabytes: int, name: str, over: bool = False) -> None:
    """Notes GB/s of each of fio's settings under `name` and the setting's number. `over`: into the file of the time before.
    Reads: the newest checkpoint in `folder`, its files one after the other, but for their last pages."""
    for number, setting in enumerate(FIO):
        command = ["fio", "--name=x", f"--rw={kind}", "--bs=4M", "--direct=1", "--mem=malloc", "--ioengine=io_uring",
                   f"--size={megabytes}M", "--output-format=json", *setting]
        if kind == "read":
            files = sorted(max(pathlib.Path(folder).glob("step-*")).glob("*.h5"))
            command += [f"--filename={':'.join(map(str, files))}", "--file_service_type=sequential", "--readonly",
                        f"--filesize={megabytes // len(files)}M"]
        else:
            command += [f"--filename={folder}/fio.bin", "--end_fsync=1"]
            if over:
                command.append("--overwrite=1")
            else:
                pathlib.Path(folder, "fio.bin").unlink(missing_ok=True)  # new blocks each time, as a new checkpoint needs
        environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
        os.sync()
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0][kind]
        note(f"{name} {number}", job["io_bytes"] / (job["runtime"] / 1000) / 1e9)


def settle(name: str) -> None:
    """Keeps of fio's settings the one with the better median: the better of two in each round would be luck as well."""
    columns = [got.pop(f"{name} {number}") for number in range(len(FIO)) if f"{name} {number}" in got]
    if columns:
        got[name] = max(columns, key=statistics.median)


class Child:
    """A program that answers a word with a line of JSON."""

    def __init__(self, *command):
        self.command = [str(word) for word in command]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.hello = self.answer("start")

    def answer(self, word: str) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self.command)}\nended with {self.process.wait()} at {word}")
        return json.loads(line)

    def ask(self, word: str) -> dict:
        os.sync()
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answer(word)

    def quit(self) -> None:
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit(f"{' '.join(self.command)}\nended with {self.process.returncode}")


got: dict = {}


def note(name: str, value: float) -> None:
    got.setdefault(name, []).append(value)


def rate(name: str, answer: dict) -> None:
    note(name, answer["bytes"] / answer["seconds"] / 1e9)
    note(name + " core-s/GB", answer["cpu_s"] / answer["bytes"] * 1e9)
    if answer.get("extra_memory", -1) >= 0:
        note(name + " extra MiB", answer["extra_memory"] / 2**20)


def ratio(ours: str, theirs: str) -> None:
    if ours in got and theirs in got:
        print(f"{ours} / {theirs}: {spread([a / b for a, b in zip(got[ours], got[theirs])], 3)}")


print(machine())
with Scratch(args.scratch) as scratch:
    large = Child(args.program, scratch.path / "large", args.megabytes, args.files, args.megabytes // 64, args.columns)
    small = Child(args.program, scratch.path / "small", small_megabytes, args.files, args.small) if args.small else None
    torch = None
    if args.python:
        torch = Child(args.python, ROOT / "bench/torch_checkpoint.py", scratch.path / "torch", args.megabytes,
                      args.megabytes // 64)
    print(f"{large.hello['bytes']} bytes in {args.files} file(s), {large.hello['backend']}, state in {'huge' if large.hello['huge_pages'] else '4 KiB'} pages, {args.rounds} rounds; GB/s", flush=True)
    first = large.ask("first")
    print(f"first save, HDF5 structure made by libhdf5: {first['seconds']:.3f} s, of it {first['layout_s']:.3f} s for that")
    cold = large.ask("load_cold")
    print(f"cold load: {cold['bytes'] / cold['seconds'] / 1e9:.2f} GB/s", flush=True)
    large.ask("save"), large.ask("load"), large.ask("remove")  # warm: memory of buffers, directory
    if small:
        first = small.ask("first")
        print(f"the same with {args.small} tensors: {first['seconds']:.3f} s, of it {first['layout_s']:.3f} s", flush=True)
        small.ask("save"), small.ask("remove")
    for number in range(args.rounds):

        def in_turn(child, folder, words, kind, megabytes, column):
            """Each arm is first, second and so on in as many rounds as the others: place in the round counts on a disk."""

            def ours(name, word):
                if kind == "write":
                    child.ask("remove")  # as fio does: beside at most one older file, in blocks just freed
                if name.endswith("over"):
                    child.ask("save")
                    child.ask("retire")
                answer = child.ask(word)
                if name.endswith("over") and answer["reused"] == 0:
                    if number == 0:
                        print(f"  left out: {name}, this file system's files are not written over", flush=True)
                    return
                rate(name, answer)

            def fios():
                fio(scratch.path if kind == "write" else folder, kind, megabytes, column)
                if any(name.endswith("over") for name in words):
                    fio(scratch.path, kind, megabytes, column.replace("write", "over"), over=True)

            sides = [lambda name=name, word=word: ours(name, word) for name, word in words.items()]
            if has_fio:
                sides.append(fios)
            first = number % len(sides)
            for side in sides[first:] + sides[:first]:
                side()

        saves = {"save": "save", "persist": "persist", "over": "persist"}
        saves = {name: word for name, word in saves.items() if name == "save" or name in arms}
        in_turn(large, scratch.path / "large", saves, "write", args.megabytes, "fio write")
        if "load" in arms:
            in_turn(large, scratch.path / "large", {"load": "load"}, "read", args.megabytes, "fio read")
        if "unverified" in arms:
            rate("unverified", large.ask("unverified"))
        if torch:
            rate("torch_save", torch.ask("torch_save"))
            rate("torch_load", torch.ask("torch_load"))
            torch.ask("remove")
            rate("dcp_save", torch.ask("dcp_save"))
            torch.ask("remove")
            rate("dcp2_save", torch.ask("dcp2_save"))
            rate("dcp_load", torch.ask("dcp_load"))
            torch.ask("remove")
        answer = large.ask("remove")
        note("removal, s/GB", answer["seconds"] / large.hello["bytes"] * 1e9)
        if small:
            saves = {"small": "save"} | ({"small over": "persist"} if "over" in arms else {})
            in_turn(small, scratch.path / "small", saves, "write", small_megabytes, "fio write, small")
            in_turn(small, scratch.path / "small", {"small load": "load"}, "read", small_megabytes, "fio read, small")
            small.ask("remove")
        if "pair" in arms:
            answer = large.ask("pair")
            rate("pair", answer)
            if answer["newest"] % 1 or answer["newest"] < 1:
                sys.exit(f"of two saves at once, {answer} is not a step")
        for word in ("columns", "sparse") if "columns" in arms else ():
            answer = large.ask(word)
            rate(word, answer)
            note(word + " read/wanted", answer["read"] / answer["wanted"])
        if "copy" in arms:
            note("memcpy", (lambda a: a["bytes"] / a["seconds"] / 1e9)(large.ask("copy")))
        large.ask("remove")
        print(f"  round {number + 1}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in got.items() if " core-s" not in k and
                                                     "extra" not in k) + f"; load average {load()}", flush=True)
    for name in ("fio write", "fio over", "fio read", "fio write, small", "fio over, small", "fio read, small"):
        settle(name)
    for name, values in got.items():
        print(f"{name:<26} {spread(values, 3)}")
    for ours, theirs in [("save", "fio write"), ("persist", "fio write"), ("over", "fio write"), ("over", "fio over"),
                         ("small", "fio write, small"), ("small over", "fio write, small"), ("small over", "fio over, small"),
                         ("pair", "fio write"), ("load", "fio read"),
                         ("small load", "fio read, small"), ("load", "unverified"), ("save", "torch_save"), ("save", "dcp_save"),
                         ("save", "dcp2_save"), ("over", "torch_save"), ("over", "dcp_save"), ("over", "dcp2_save"),
                         ("fio write", "dcp_save"), ("fio write", "dcp2_save"),
                         ("load", "torch_load"), ("load", "dcp_load"), ("fio read", "torch_load")]:
        ratio(ours, theirs)
    for child in filter(None, (large, small, torch)):
        child.quit()
