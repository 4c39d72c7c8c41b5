"""A small run that stands in its middle, for tests of what another recipe makes of it."""

import hashlib
import json
import os
import pathlib
import shutil

from harness import RunTest

RECIPE = """
local T = require "cairn"
local p = T.params {{ stop = T.param {{ 160 }}, samples = T.param {{ 8 }}, heads = T.param {{ 4 }}, data = T.param {{ "tokens" }} }}
return T.recipe {{
  name = "small", seed = 7, stop = T.samples(p.stop), deterministic = "layout",
  model = T.llama {{ layers = 2, width = 32, heads = p.heads, context = 32, vocab = 256 }},
  tokenizer = T.bytes,
  data = T.megatron {{ prefix = p.data }},
  batch = {{ samples = p.samples, micro = 2 }},
  optimizer = T.adamw {{ peak_lr = 1e-3, lr = T.schedule {{ T.warmup {{ over = T.samples(32) }}, T.linear {{ to = 1e-4 }} }} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 10 }} }}, snapshot = T.every {{ steps = 1 }} }},
  log = {{ tensorboard = false }},
}}
"""


def contents(folder):
    """Every file below a folder with its bytes, time of change and mode."""
    out = {}
    for path in sorted(pathlib.Path(folder).rglob("*")):
        info = path.lstat()
        text = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        out[str(path.relative_to(folder))] = (info.st_mtime_ns, info.st_mode, text)
    return out


class ChangeTest(RunTest):
    def setUp(self):
        super().setUp()
        self.file = self.folder / "small.lua"
        self.file.write_text(RECIPE.format())

    def run_it(self, run, *words, code=0, nproc=1):
        job = self.train(self.file, run, "--nproc", nproc, *words, code=code)
        text = job.output()
        job.log_path.unlink()
        return text

    def half(self, run, *words):
        """A run that stands in its middle, at step 10 of 20: 80 of 160 samples. What came behind is lost."""
        self.run_it(run, *words)
        self.cut(run, 10)

    def cut(self, run, last):
        for step in self.checkpoints(run):
            if step > last:
                shutil.rmtree(self.checkpoint(run, step))
        metrics = self.folder / run / "metrics.jsonl"
        lines = [line for line in metrics.read_text().splitlines() if json.loads(line).get("step", 0) <= last]
        metrics.write_text("\n".join(lines) + "\n")

    def rates(self, run):
        return {step: row["lr"] for step, row in self.metrics(run).items()}

    def lineage(self, run):
        return [json.loads(line) for line in (self.folder / run / "lineage.jsonl").read_text().splitlines()]

    def copy_of(self, run, name):
        """The run moved, as a run of its own would lie there."""
        target = self.folder / name
        os.system(f"cp -a {self.folder / run} {target}")
        identity = json.loads((target / "run.json").read_text())
        identity["id"] += f"-{name}"
        identity["folder"] = str(target)
        (target / "run.json").write_text(json.dumps(identity))
        return name
