"""Training states of Megatron-Core (tests/golden/megatron-dist), imported and trained on: the losses of Megatron's own next steps."""

import pathlib

from harness import main
from imported_states import ImportedStates

FORMS = {"dense-dp": "dense", "tp-fully": "tp", "bf16-dp": "bf16", "experts-dp": "experts"}


class Megatron(ImportedStates):
    golden = pathlib.Path(__file__).resolve().parents[1] / "golden" / "megatron-dist"

    def losses(self, form, **layout):
        experts, bf16 = form.startswith("experts"), form.startswith("bf16")
        model = "ffn = 8, moe = T.moe { experts = 4, top_k = 2 }" if experts else "ffn = 20"
        return self.losses_of(form, "bf16" if bf16 else "fp32", tied=bf16, peak_lr=self.training["adam"]["lr"],
                              model=model + ', vocab = 40, qk_norm = "head"', **layout)

    def test_the_next_losses_are_those_of_megatron(self):
        for form, run in FORMS.items():
            with self.subTest(form):
                self.assert_close(self.losses(form), run, 1e-2 if run == "bf16" else 1e-6)

    def test_any_layout_of_ours_resumes_it(self):
        self.assert_close(self.losses("dense-dp", tp=2, dp=2), "dense", 1e-6)

    def test_a_look_says_what_an_import_takes_and_leaves(self):
        self.assert_looked("dense-dp", "a training state of Megatron-LM: torch_dist, step 3, 12 samples",
                           "optimizer: exp_avg, exp_avg_sq", "an import takes: the optimizer's state",
                           "an import leaves: the order of the data",
                           "it imports, as the megatron_gpt model of its own arguments")


if __name__ == "__main__":
    main()
