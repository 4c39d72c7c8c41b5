"""Training states of Megatron-Core (tests/golden/megatron-dist), imported and trained on: the losses of Megatron's own next steps."""

import json
import pathlib
import subprocess

import numpy
from harness import RunTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "megatron-dist"
TRAINING = json.loads((GOLDEN / "training.json").read_text())
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 3, stop = T.steps({steps}), precision = "{precision}",
  model = T.llama {{ layers = 2, width = 12, heads = 4, kv_heads = 2, head_dim = 4, ffn = {ffn}, context = {length},
                    vocab = 40, norm_eps = 1e-2, qk_norm = "head", tied_embeddings = {tied}{experts} }},
  data = T.token_files {{ train = "tokens.bin" }},
  batch = {{ samples = {samples}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = {top}, lr = T.schedule {{ T.warmup {{ over = T.steps({steps}) }} }},
                        beta1 = {beta1}, beta2 = {beta2}, eps = {eps}, weight_decay = {decay}, clip = 0 }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
}}
"""
FORMS = {"dense-dp": "dense", "tp-fully": "tp", "bf16-dp": "bf16", "experts-dp": "experts"}


class Megatron(RunTest):
    def setUp(self):
        super().setUp()
        numpy.array(TRAINING["tokens"], "<u2").tofile(self.folder / "tokens.bin")  # one step takes all of them

    def losses(self, form, tp=1, pp=1, dp=1):
        adam, name = TRAINING["adam"], FORMS[form]
        recipe = self.folder / f"{form}.lua"
        recipe.write_text(RECIPE.format(
            name=form, precision="bf16" if name == "bf16" else "fp32", tied=str(name == "bf16").lower(),
            experts=", moe = T.moe { experts = 4, top_k = 2 }" if name == "experts" else "",
            ffn=8 if name == "experts" else 20,
            steps=TRAINING["steps"], top=adam["lr"], length=TRAINING["length"], samples=TRAINING["samples"],
            beta1=adam["betas"][0], beta2=adam["betas"][1], eps=adam["eps"], decay=TRAINING["weight_decay"], tp=tp, pp=pp,
            dp=dp))
        run = f"{form}-{tp}{pp}{dp}"
        return self.losses_behind_an_import(GOLDEN / form, recipe, run, "the 12 samples")

    def assert_close(self, ours, form, bar):
        theirs = TRAINING["losses"][FORMS[form]][TRAINING["saved_after"]:]
        self.assertEqual(len(ours), len(theirs))
        for mine, other in zip(ours, theirs):
            self.assertLess(abs(mine - other) / other, bar)

    def test_the_next_losses_are_those_of_megatron(self):
        for form, name in FORMS.items():
            with self.subTest(form):
                self.assert_close(self.losses(form), form, 1e-2 if name == "bf16" else 1e-6)

    def test_any_layout_of_ours_resumes_it(self):
        self.assert_close(self.losses("dense-dp", tp=2, dp=2), "dense-dp", 1e-6)

    def test_a_look_says_what_an_import_takes_and_leaves(self):
        done = subprocess.run([self.program, "convert", "--check", GOLDEN / "dense-dp"], check=True, capture_output=True,
                              text=True)
        for line in ("a training state of Megatron-LM: torch_dist, step 3, 12 samples", "optimizer: exp_avg, exp_avg_sq",
                     "an import takes: the optimizer's state", "an import leaves: the order of the data",
                     "it imports, as the megatron_gpt model of its own arguments"):
            self.assertIn(line, done.stdout)


if __name__ == "__main__":
    main()
