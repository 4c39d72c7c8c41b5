"""Reads and writes Cairn's checkpoints, and reads the files of its runs, as numpy arrays.

    run = cairn.open("runs/a")            steps of a run; run.steps, run.labels
    checkpoint = run.checkpoint()         the newest; or cairn.open("runs/a/checkpoints/step-00000100")
    checkpoint["weight/tok_emb"]          a whole tensor, whatever layout saved it, its checksums verified
    cairn.metrics("runs/a")["loss"]       one number a step
    cairn.write("other", 100, {"weight/w": array})

`docs/format.md` describes the files. The program is beside this module: cairn.program() is its path.
"""

import importlib

_WHERE = {"open": "reader", "Checkpoint": "reader", "Steps": "reader", "metrics": "runs", "events": "runs", "write": "writer",
          "program": "launcher", "CairnError": "errors", "Damaged": "errors"}
__all__ = list(_WHERE)


def __getattr__(name):
    """Imports numpy only when it is needed: the command `cairn` starts through this package."""
    if name not in _WHERE:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(importlib.import_module("cairn." + _WHERE[name]), name)
