"""Reads the metrics and the events of a run."""

import json
import math
import pathlib

import numpy

from .errors import CairnError, Damaged


def _lines(run, name):
    path = pathlib.Path(run) / name
    if not path.is_file():
        raise CairnError(f"{path} is missing: is {run} the folder of a run?")
    raw = path.read_bytes()
    out = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):  # what follows the last end of line is still being written
        try:
            out.append(json.loads(line))
        except ValueError as error:
            raise Damaged(f"{path}:{number}: {error}") from None
    return out


def _flat(value, prefix=""):
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from _flat(entry, f"{prefix}{key}/")
        elif isinstance(entry, (int, float)):
            yield prefix + key, float(entry)


def metrics(run):
    """The numbers of metrics.jsonl: name to a float64 array of one entry a step, NaN where a step lacks it.

    "step" has the steps, int64, ascending. Where a resume computed steps again, the last lines count. Numbers in objects have
    names like "split_ms/forward".
    """
    last = {}
    for line in _lines(run, "metrics.jsonl"):
        if "resumed_at" in line:
            last = {step: numbers for step, numbers in last.items() if step <= line["resumed_at"]}
        elif "step" in line:
            last[line["step"]] = dict(_flat(line))
    steps = sorted(last)
    names = dict.fromkeys(name for step in steps for name in last[step])
    out = {name: numpy.array([last[step].get(name, math.nan) for step in steps]) for name in names}
    return {**out, "step": numpy.array(steps, numpy.int64)}


def events(run):
    """The objects of events.jsonl, oldest first."""
    return _lines(run, "events.jsonl")
