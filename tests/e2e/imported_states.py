"""Training states of another trainer (a folder of tests/golden), imported and trained on: the losses of its own next steps."""

import json

import numpy
from harness import RunTest

STEPS = 6  # of the trainer, which saved its state after the third
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 3, stop = T.steps({steps}), precision = "{precision}",
  model = T.llama {{ layers = 2, width = 12, heads = 4, kv_heads = 2, head_dim = 4, context = {length}, norm_eps = 1e-2,
                    tied_embeddings = {tied}, {model} }},
  data = T.token_files {{ train = "tokens.bin" }},
  batch = {{ samples = {samples}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = {peak_lr}, lr = T.schedule {{ {lr} }},
                        beta1 = {beta1}, beta2 = {beta2}, eps = {eps}, weight_decay = {decay}, clip = {clip} }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
}}
"""


class ImportedStates(RunTest):
    golden = None  # the folder of states, with a training.json that says how they were trained
    samples = "the 12 samples"  # that the trainer has taken, as a start reports them

    def setUp(self):
        super().setUp()
        self.training = json.loads((self.golden / "training.json").read_text())
        numpy.array(self.training["tokens"], "<u2").tofile(self.folder / "tokens.bin")  # one step takes all of them

    def losses_of(self, state, precision, tied, peak_lr, lr=f"T.warmup {{ over = T.steps({STEPS}) }}", clip=0,
                  model="ffn = 20, vocab = 37", tp=1, pp=1, dp=1):
        adam = self.training["adam"]
        recipe = self.folder / f"{state}.lua"
        recipe.write_text(RECIPE.format(
            name=state, precision=precision, tied=str(tied).lower(), model=model, peak_lr=peak_lr, lr=lr, clip=clip,
            steps=STEPS, length=self.training["length"], samples=self.training["samples"],
            beta1=adam["betas"][0], beta2=adam["betas"][1], eps=adam["eps"], decay=self.training["weight_decay"],
            tp=tp, pp=pp, dp=dp))
        return self.losses_behind_an_import(self.golden / state, recipe, f"{state}-{tp}{pp}{dp}", self.samples)

    def assert_close(self, ours, run, bar):
        theirs = self.training["losses"][run][self.training["saved_after"]:]
        self.assertEqual(len(ours), len(theirs))
        for mine, other in zip(ours, theirs):
            self.assertLess(abs(mine - other) / other, bar)

    def assert_looked(self, state, *lines):
        said = self.cairn("convert", "--check", self.golden / state).stdout.decode()
        for line in lines:
            self.assertIn(line, said)
