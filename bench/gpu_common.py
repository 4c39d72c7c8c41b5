"""What the commands for a GPU share: the programs, the device, and that nothing passes where there is none."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_RUN = 77
MODULE = "libcairn_cuda.so"


class Wrong(Exception):
    """What was to be right, or to run, and is not or did not."""


class Choices:
    """Algorithms of products (`cairn train --tuning`), which decide bits: runs whose bits are compared share a file, to which
    each adds what it has timed."""

    def __init__(self, file):
        self.file = pathlib.Path(file)

    def words(self):
        return ["--tuning", str(self.file)] if self.file.exists() else []

    def keep(self, run):
        """Takes over what a run has: all of the file, and what it lacked."""
        chosen = pathlib.Path(run) / "tuning.json"
        if chosen.exists():
            self.file.write_bytes(chosen.read_bytes())


def find_cairn(command, given):
    """The program that was named, else that of a package or of the preset `cuda`."""
    places = [given] if given else [ROOT / "bin/cairn", ROOT / "build/cuda/cairn"]
    found = next((place.resolve() for place in places if place.exists()), None)
    if found is None:
        sys.exit(f"{command}: no {' nor '.join(map(str, places))}: --cairn names the program")
    return found


def module_of(cairn):
    """The kernels that the program loads; None where there are none."""
    places = [cairn.parent / MODULE, cairn.parent.parent / "lib" / MODULE]
    return next((place for place in places if place.exists()), None)


def is_double(cairn):
    """Whether the program's kernels are those of tests, which no device runs."""
    module = module_of(cairn)
    return module is not None and b"cairn_cuda_is_a_double" in module.read_bytes()


def doctor(cairn):
    """The device, or why there is none."""
    done = subprocess.run([str(cairn), "doctor", "--json"], capture_output=True, text=True, timeout=120)
    try:
        checks = {one["what"]: one for one in json.loads(done.stdout)["checks"]}
    except (ValueError, KeyError):
        return None, f"{cairn} doctor said: {done.stdout}{done.stderr}"
    opened = checks.get("a device opens")
    if opened is not None and opened["verdict"] == "ok":
        return f"{checks['devices']['found']}, driver {checks['NVIDIA driver']['found']}", None
    return None, "; ".join(f"{what}: {one['found']}" for what, one in checks.items()
                           if what in ("devices", "NVIDIA driver", "kernels for CUDA", "cuBLASLt", "a device opens"))


def device_or_leave(cairn):
    """The device in words. Ends with 77 where none can be used."""
    device, why = doctor(cairn)
    if device is None:
        print(f"NOT RUN: no GPU can be used here: {why}")
        sys.exit(NOT_RUN)
    version = subprocess.run([str(cairn), "--version"], capture_output=True, text=True, timeout=60).stdout.strip()
    print(f"on {device}; {version}", flush=True)
    for line in clocks():
        print(line, flush=True)
    return device


def clocks():
    """Clocks and limits as the driver's tool tells them, where it is."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu",
                               "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [f"  {line} (name; SM clock now, at most; memory clock; power limit; temperature)"
            for line in done.stdout.splitlines()] if done.returncode == 0 else []


def leave(device, rehearsal, passed, failed, unit):
    """Says what came of it, and ends: 0, 1, or 77 for a rehearsal in which all is right."""
    if rehearsal:
        print(f"NOT RUN: a rehearsal {rehearsal}, {passed} {unit} right, {failed} wrong")
        sys.exit(1 if failed else NOT_RUN)
    print(f"{'FAIL' if failed else 'PASS'}: {passed} of {passed + failed} {unit} on {device}")
    sys.exit(1 if failed else 0)
