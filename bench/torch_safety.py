#!/usr/bin/env python3
"""What torch.save and torch's distributed checkpoints (DCP) lose when the writer is killed, and load silently wrong when
bits flip: the same kills and flips that tests/crash puts cairn through.

    bench/torch_safety.py --python /path/to/python-with-torch

A writer saves the steps 1, 2, 3, ... as fast as it can (every element of every tensor is the step) and tells each save
that has returned; it is killed with SIGKILL after a random time, and the folder is loaded as a person would: the one
name, or the newest. Outcomes of a kill:
  kept      what loads is the last told step or a later one, whole
  fell back the newest does not load, one before it does, and it is the last told (who loads must try them all)
  lost      what was told does not load
  wrong     it loads without an error, and its tensors are of several steps or older than what was told
Outcomes of a flip: refused (an error), harmless (every name and number right), wrong (loads without an error, other
names or numbers), crash (the loading process dies or hangs).
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings

KILLS_DEFAULT, FLIPS_DEFAULT = 200, 2000


def outer(args):
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import common
    print(common.machine())
    sys.exit(subprocess.run([args.python, __file__, "--inner", "--kills", str(args.kills), "--flips", str(args.flips),
                             "--seed", str(args.seed)] + (["--scratch", args.scratch] if args.scratch else []),
                            env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)


def in_child(work, seconds=60):
    """Bytes that work(write) wrote in a process of its own, and how that ended."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        code = 1
        try:
            signal.alarm(seconds)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work(lambda data: os.write(write_end, data))
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    out = b""
    while data := os.read(read_end, 65536):
        out += data
    os.close(read_end)
    return out, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def inner(args):
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed.checkpoint as dcp
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; seed {args.seed}")
    draw = random.Random(args.seed)

    def state(step, elements=1 << 18, tensors=8):
        return {f"layer{i}.weight": torch.full((elements,), float(step)) for i in range(tensors)}

    def step_of(tensors):
        """The step that all tensors are of, or None."""
        values = {float(v) for t in tensors.values() for v in (t.min(), t.max())}
        return int(values.pop()) if len(values) == 1 else None

    def dcp_load(path):
        target = state(-1)
        dcp.load(target, checkpoint_id=path)
        return target

    def careful(step_state, path):
        torch.save(step_state, str(path) + ".tmp")
        with open(str(path) + ".tmp", "rb") as f:
            os.fsync(f.fileno())
        os.replace(str(path) + ".tmp", path)

    ways = {  # name: (save, load, new names)
        "torch.save, one name": (torch.save, lambda p: torch.load(p, weights_only=True), False),
        "torch.save, new names": (torch.save, lambda p: torch.load(p, weights_only=True), True),
        "torch.save, fsync, rename by hand": (careful, lambda p: torch.load(p, weights_only=True), False),
        "DCP, one folder": (lambda s, p: dcp.save(s, checkpoint_id=p), dcp_load, False),
        "DCP, new folders": (lambda s, p: dcp.save(s, checkpoint_id=p), dcp_load, True),
    }
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="torch-safety-", dir=args.scratch))
    try:
        print(f"\n{'kill -9 while saving':36}{'kills':>7}{'kept':>7}{'fell back':>11}{'lost':>7}{'wrong':>7}")
        for name, (save, load, new_names) in ways.items():
            counts = dict(kept=0, back=0, lost=0, wrong=0)
            for _ in range(args.kills):
                folder = scratch / "kill"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()

                def writer(told):
                    signal.alarm(0)
                    step = 0
                    while True:
                        step += 1
                        save(state(step), folder / (f"step-{step:06d}" if new_names else "model"))
                        os.write(told, struct.pack("<q", step))

                read_end, told_end = os.pipe()
                pid = os.fork()
                if pid == 0:
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, 1)
                    os.dup2(null, 2)
                    try:
                        writer(told_end)
                    finally:
                        os._exit(1)
                os.close(told_end)
                first = os.read(read_end, 8)  # the first save has returned: from here on there is something to lose
                time.sleep(draw.random() * 0.15)
                os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code != -signal.SIGKILL:
                    sys.exit(f"{name}: the writer ended with {code}")
                data = first
                while more := os.read(read_end, 65536):
                    data += more
                os.close(read_end)
                told = struct.unpack("<q", data[-8:])[0]

                def look(write):
                    names = sorted((p for p in folder.iterdir() if not p.name.endswith(".tmp")), reverse=True)
                    for place, path in enumerate(names):
                        try:
                            got = step_of(load(path))
                        except BaseException:  # DCP's own is no Exception
                            continue
                        if got is None or (got < told and place == 0):
                            write(b"w")
                        elif got < told:
                            write(b"l")
                        else:
                            write(b"k" if place == 0 else b"b")
                        return
                    write(b"l")

                out, code = in_child(look)
                if code != 0 or len(out) != 1:
                    sys.exit(f"{name}: the process that loads ended with {code} after saying {out}")
                counts[{b"k": "kept", b"b": "back", b"w": "wrong", b"l": "lost"}[out]] += 1
            print(f"{name:36}{args.kills:7}{counts['kept']:7}{counts['back']:11}{counts['lost']:7}{counts['wrong']:7}",
                  flush=True)

        print(f"\n{'one flipped bit':36}{'flips':>7}{'refused':>9}{'harmless':>10}{'wrong':>7}{'crash':>7}")

        def flip_row(name, path, load, where):
            original = path.read_bytes()
            counts = dict(r=0, h=0, w=0, c=0)
            places = [None] + [where(original) for _ in range(args.flips)]  # undamaged first: it must be right
            at = 0
            while at < len(places):
                def try_them(write, at=at):
                    for place in places[at:at + 200]:
                        signal.alarm(20)
                        damaged = bytearray(original)
                        if place is not None:
                            damaged[place // 8] ^= 1 << (place % 8)
                        path.write_bytes(damaged)
                        try:
                            loaded = load()
                        except BaseException:  # DCP's own is no Exception
                            write(b"r")
                            continue
                        right = sorted(loaded) == sorted(truth) and all(
                            torch.is_tensor(loaded[k]) and loaded[k].dtype == truth[k].dtype and
                            loaded[k].shape == truth[k].shape and
                            loaded[k].numpy().tobytes() == truth[k].numpy().tobytes() for k in truth)
                        write(b"h" if right else b"w")
                out, code = in_child(try_them, seconds=200)
                if at == 0:
                    first = out.decode()[:1]
                for letter in out.decode():
                    counts[letter] += 1
                at += len(out)
                if code != 0 and at < len(places) and len(out) < 200:
                    counts["c"] += 1
                    at += 1
            path.write_bytes(original)
            if first != "h":
                sys.exit(f"{name}: undamaged, it does not load as it was saved ({first})")
            counts["h"] -= 1
            print(f"{name:36}{args.flips:7}{counts['r']:9}{counts['h']:10}{counts['w']:7}{counts['c']:7}", flush=True)

        truth = {f"layer{i}.weight": torch.arange(4096, dtype=torch.float32) + i for i in range(8)}
        single = scratch / "flip.pt"
        torch.save(truth, single)
        payload = [b for i in range(8) for b in [single.read_bytes().find(truth[f"layer{i}.weight"].numpy().tobytes())]]
        assert min(payload) > 0
        size = len(single.read_bytes())
        inside = lambda byte: any(p <= byte < p + 16384 for p in payload)

        def in_payload(_):
            return (draw.choice(payload) + draw.randrange(16384)) * 8 + draw.randrange(8)

        def outside(_):
            while inside(byte := draw.randrange(size)):
                pass
            return byte * 8 + draw.randrange(8)

        load_single = lambda: torch.load(single, weights_only=True)
        flip_row("torch.save, payload", single, load_single, in_payload)
        flip_row("torch.save, all but payload", single, load_single, outside)

        folder = scratch / "flip-dcp"
        dcp.save(truth, checkpoint_id=folder)

        def load_folder():
            target = {k: torch.zeros_like(v) for k, v in truth.items()}
            dcp.load(target, checkpoint_id=folder)
            return target

        data_file = next(folder.glob("*.distcp"))
        whole = data_file.read_bytes()
        starts = [whole.find(truth[f"layer{i}.weight"].numpy().tobytes()) for i in range(8)]
        assert min(starts) >= 0
        flip_row("DCP, payload", data_file, load_folder,
                 lambda _: (draw.choice(starts) + draw.randrange(16384)) * 8 + draw.randrange(8))
        flip_row("DCP, .metadata", folder / ".metadata", load_folder, lambda b: draw.randrange(len(b) * 8))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch (default: this one)")
    parser.add_argument("--kills", type=int, default=KILLS_DEFAULT, help="of each way (default: %(default)s)")
    parser.add_argument("--flips", type=int, default=FLIPS_DEFAULT, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", default=None, help="folder for what is written (default: a temporary one)")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    inner(args) if args.inner else outer(args)


if __name__ == "__main__":
    main()
