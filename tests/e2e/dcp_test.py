"""Training states of torch.distributed.checkpoint (tests/golden/dcp), imported and trained on: the losses of torch's own next steps."""

import json
import pathlib
import subprocess

import numpy
from harness import RunTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "dcp"
TRAINING = json.loads((GOLDEN / "training.json").read_text())
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 3, stop = T.steps({steps}), precision = "{precision}",
  model = T.llama {{ layers = 2, width = 12, heads = 4, kv_heads = 2, head_dim = 4, ffn = 20, context = {length},
                    vocab = 37, norm_eps = 1e-2, tied_embeddings = {tied} }},
  data = T.token_files {{ train = "tokens.bin" }},
  batch = {{ samples = {samples}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = {top}, lr = T.schedule {{ T.warmup {{ over = T.steps({steps}) }} }},
                        beta1 = {beta1}, beta2 = {beta2}, eps = {eps}, weight_decay = {decay}, clip = {clip} }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
}}
"""


class Dcp(RunTest):
    def setUp(self):
        super().setUp()
        numpy.array(TRAINING["tokens"], "<u2").tofile(self.folder / "tokens.bin")  # one step takes all of them

    def losses(self, name, tp=1, pp=1, dp=1):
        adam = TRAINING["adam"]
        recipe = self.folder / f"{name}.lua"
        recipe.write_text(RECIPE.format(
            name=name, precision="fp32" if "f32" in name else "bf16", tied=str("tied" in name).lower(),
            steps=TRAINING["steps"], top=TRAINING["steps"] * adam["lr"] / 8, length=TRAINING["length"],
            samples=TRAINING["samples"], beta1=adam["betas"][0], beta2=adam["betas"][1], eps=adam["eps"],
            decay=TRAINING["weight_decay"], clip=TRAINING["clip"], tp=tp, pp=pp, dp=dp))
        run = f"{name}-{tp}{pp}{dp}"
        return self.losses_behind_an_import(GOLDEN / name, recipe, run, "the samples")

    def assert_close(self, ours, name, bar):
        theirs = TRAINING["losses"][name][TRAINING["saved_after"]:]
        self.assertEqual(len(ours), len(theirs))
        for mine, other in zip(ours, theirs):
            self.assertLess(abs(mine - other) / other, bar)

    def test_the_next_losses_are_those_of_torch(self):
        for name in TRAINING["losses"]:
            if (GOLDEN / name).is_dir():
                with self.subTest(name):
                    self.assert_close(self.losses(name), name, 1e-6 if "f32" in name else 1e-2)

    def test_any_layout_of_ours_resumes_it(self):
        for layout in (dict(tp=2), dict(pp=2, dp=2)):
            with self.subTest(**layout):
                self.assert_close(self.losses("titan-f32", **layout), "titan-f32", 1e-6)

    def test_a_look_says_what_an_import_takes_and_leaves(self):
        done = subprocess.run([self.program, "convert", "--check", GOLDEN / "flat-f32-tied"], check=True,
                              capture_output=True, text=True)
        for line in ("a training state of torch.distributed.checkpoint", "step 3",
                     "optimizer: exp_avg, exp_avg_sq, its own step 3", "an import takes: the optimizer's state",
                     "an import leaves: the order of the data", "it imports, as the llama model"):
            self.assertIn(line, done.stdout)


if __name__ == "__main__":
    main()
