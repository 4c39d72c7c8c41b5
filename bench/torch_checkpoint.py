#!/usr/bin/env python3
"""Saves and loads a state with torch.save and torch.distributed.checkpoint, on command, for ckpt_speed.py.

  torch_checkpoint.py DIR MEGABYTES TENSORS

Each word on stdin is done once and answered with a line of JSON (seconds, CPU seconds of all threads, bytes):
  torch_save  one file, fsync, rename, fsync of the directory
  dcp_save    one process, the writer as it comes (one thread, its own fsync of the files), then fsync of the directory
              and its parent
  dcp2_save   the same with two threads
  torch_load  torch.load of that file, from the disk: the page cache is told to forget it before the clock starts
  dcp_load    into tensors that are there, likewise
  remove      what is there
torch.save writes no checksums that a load would compare; both do what a careful user would add: durability as above.
"""
import json
import os
import pathlib
import resource
import shutil
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

folder, megabytes, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
each = (megabytes << 20) // 4 // count
generator = torch.Generator().manual_seed(1)
noise = torch.rand(1 << 22, generator=generator)
state = {}
for t in range(count):
    state[f"layers.{t}.weight"] = noise.repeat(each // noise.numel() + 1)[:each].clone()
size = sum(t.numel() * 4 for t in state.values())
torch.set_num_threads(os.cpu_count() or 1)


def sync_dir(path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def forget(path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def torch_save() -> None:
    temporary = folder / "state.pt.tmp"
    with open(temporary, "wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    os.rename(temporary, folder / "state.pt")
    sync_dir(folder)


def dcp_save(**how) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", **how), no_dist=True)
    sync_dir(folder / "dcp")
    sync_dir(folder)


def dcp_load() -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)


def remove() -> None:
    shutil.rmtree(folder)
    folder.mkdir()


print(json.dumps({"torch": torch.__version__, "bytes": size}), flush=True)
for word in map(str.strip, sys.stdin):
    if word == "quit":
        break
    if word == "torch_load":
        forget(folder / "state.pt")
    if word == "dcp_load":
        forget(folder / "dcp")
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if word == "torch_load":
        loaded = torch.load(folder / "state.pt", weights_only=True)
        first = next(iter(state))
        assert torch.equal(loaded[first][:16], state[first][:16])
        seconds = time.monotonic() - begin
        del loaded
    else:
        {"torch_save": torch_save, "dcp_save": dcp_save, "dcp2_save": lambda: dcp_save(thread_count=2), "dcp_load": dcp_load,
         "remove": remove}[word]()
        seconds = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "cpu_s": cpu, "bytes": size}), flush=True)
