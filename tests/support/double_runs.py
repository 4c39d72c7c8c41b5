"""Runs of the built program on doubles of a device (double_device.py), for tests that are programs of their own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from double_device import DoubleDevice

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import RECIPE, write_tokens  # noqa: E402


class DoubleRuns(unittest.TestCase):
    """Each test has a folder, a device and tokens of its own."""

    program, gpus = None, 1  # of the class that is tested

    def setUp(self):
        scratch = self.program.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{type(self).__name__}-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, self.program, gpus=self.gpus)
        write_tokens(self.folder / "tokens", 3000)

    def recipe(self, name, more="", steps=2, precision="bf16", pp=1, dp=1, keep=3):
        """A model of 8 tokens a sample. `more`: fields behind the seed."""
        path = self.folder / f"{name}.lua"
        text = RECIPE.format(name="double", steps=steps, precision=precision, tp=1, pp=pp, dp=dp, zero=0, sp="false", save=2,
                             keep=keep, prefix=self.folder / "tokens")
        for old, new in (("over = T.steps(4)", "over = T.steps(1)"), ("samples = 8", "samples = 2"), ("context = 32", "context = 8"),
                         ("seed = 11", f"seed = 11{more}")):
            self.assertIn(old, text)
            text = text.replace(old, new)
        path.write_text(text)
        return path

    def cairn(self, *args, code=0, **environment):
        """Returns what it printed."""
        done = subprocess.run([self.device.program, *map(str, args)], capture_output=True, text=True, timeout=110,
                              env={**os.environ, **self.device.environment, **environment})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("misuse", done.stdout + done.stderr)
        return done.stdout + done.stderr

    def train(self, recipe, run, *args, **how):
        return self.cairn("train", recipe, "--run", self.folder / run, "--threads", 1, "--device", "cuda", *args, **how)

    def choices(self, run, op):
        """Entries of the run's file of choices."""
        entries = json.loads((self.folder / run / "tuning.json").read_text())["choices"]
        return [entry for entry in entries if entry["op"] == op]

    def losses(self, run):
        lines = map(json.loads, (self.folder / run / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "step" in line]
