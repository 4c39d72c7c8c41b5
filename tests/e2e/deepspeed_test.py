"""Training states of DeepSpeed (tests/golden/deepspeed), imported and trained on: the losses of DeepSpeed's own next steps."""

import json
import pathlib
import shutil
import subprocess

import numpy
from harness import RunTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "deepspeed"
TRAINING = json.loads((GOLDEN / "training.json").read_text())
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 3, stop = T.steps(6), precision = "{precision}",
  model = T.llama {{ layers = 2, width = 12, heads = 4, kv_heads = 2, head_dim = 4, ffn = 20, context = {length},
                    vocab = 37, norm_eps = 1e-2, tied_embeddings = {tied} }},
  data = T.token_files {{ train = "tokens.bin" }},
  batch = {{ samples = {samples}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-2, lr = T.schedule {{ T.linear {{ over = T.steps({begin}), to = 0 }},
                                                          T.linear {{ to = {top} }} }},
                        beta1 = {beta1}, beta2 = {beta2}, eps = {eps}, weight_decay = {decay}, clip = {clip} }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
}}
"""
PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}


class DeepSpeed(RunTest):
    def setUp(self):
        super().setUp()
        numpy.array(TRAINING["tokens"], "<u2").tofile(self.folder / "tokens.bin")  # one step takes all of them

    def form(self, name):
        precision = next((of for key, of in PRECISIONS.items() if f"-{key}" in name), "bf16")
        config = json.loads((GOLDEN / name / "config.json").read_text())
        return precision, config["tie_word_embeddings"]

    def losses(self, name, tp=1, pp=1, dp=1):
        precision, tied = self.form(name)
        adam = TRAINING["adam"]
        begin = 3 if precision == "fp16" else 2  # DeepSpeed's schedule does not count the step that was skipped
        recipe = self.folder / f"{name}.lua"
        recipe.write_text(RECIPE.format(
            name=name, precision=precision, tied=str(tied).lower(),
            begin=begin, top=(6 - begin) * 2.5e-3, length=TRAINING["length"], samples=TRAINING["samples"], beta1=adam["betas"][0], beta2=adam["betas"][1],
            eps=adam["eps"], decay=TRAINING["weight_decay"], clip=TRAINING["clip"], tp=tp, pp=pp, dp=dp))
        run = f"{name}-{tp}{pp}{dp}"
        return self.losses_behind_an_import(GOLDEN / name, recipe, run, "the 12 samples")

    def test_the_next_losses_are_those_of_deepspeed(self):
        for name, theirs in TRAINING["losses"].items():
            if not (GOLDEN / name).is_dir():
                continue
            bar = 1e-6 if self.form(name)[0] == "fp32" else 1e-2
            with self.subTest(name):
                ours = self.losses(name)
                self.assertEqual(len(ours), 3)
                for mine, other in zip(ours, theirs[TRAINING["saved_after"]:]):
                    self.assertLess(abs(mine - other) / other, bar)

    def test_any_layout_of_ours_resumes_it(self):
        theirs = TRAINING["losses"]["z1-f32-tied"][TRAINING["saved_after"]:]
        for layout in (dict(tp=2), dict(pp=2, dp=2)):
            with self.subTest(**layout):
                for mine, other in zip(self.losses("z1-f32-tied", **layout), theirs):
                    self.assertLess(abs(mine - other) / other, 1e-6)

    def test_an_optimizer_that_cannot_use_the_moments_says_so(self):
        self.losses("z0-f32")
        recipe = self.folder / "z0-f32.lua"
        text = recipe.read_text()
        begin, end = text.index("optimizer ="), text.index("mesh =")
        recipe.write_text(f"{text[:begin]}optimizer = T.adafactor {{ peak_lr = 1e-2 }},\n  {text[end:]}")
        subprocess.run([self.program, "import", GOLDEN / "z0-f32", "other/checkpoints"], cwd=self.folder, check=True,
                       capture_output=True)
        refused = self.train(recipe, "other", code=2).output()
        self.assertIn("the moments are of another form: they begin at zero", refused)
        self.train(recipe, "other", "--accept", "optimizer.kind")
        self.assertEqual(sorted(self.metrics("other")), [4, 5, 6])


if __name__ == "__main__":
    main()
