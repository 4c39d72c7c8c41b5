"""Training states of torch.distributed.checkpoint (tests/golden/dcp), imported and trained on: the losses of torch's own next steps."""

import pathlib

from harness import main
from imported_states import STEPS, ImportedStates


class Dcp(ImportedStates):
    golden = pathlib.Path(__file__).resolve().parents[1] / "golden" / "dcp"
    samples = "the samples"

    def losses(self, name, **layout):
        return self.losses_of(name, "fp32" if "f32" in name else "bf16", tied="tied" in name,
                              peak_lr=STEPS * self.training["adam"]["lr"] / 8,
                              clip=self.training["clip"], **layout)

    def test_the_next_losses_are_those_of_torch(self):
        for name in self.training["losses"]:
            if (self.golden / name).is_dir():
                with self.subTest(name):
                    self.assert_close(self.losses(name), name, 1e-6 if "f32" in name else 1e-2)

    def test_any_layout_of_ours_resumes_it(self):
        for layout in (dict(tp=2), dict(pp=2, dp=2)):
            with self.subTest(**layout):
                self.assert_close(self.losses("titan-f32", **layout), "titan-f32", 1e-6)

    def test_a_look_says_what_an_import_takes_and_leaves(self):
        self.assert_looked("flat-f32-tied", "a training state of torch.distributed.checkpoint", "step 3",
                           "optimizer: exp_avg, exp_avg_sq, its own step 3", "an import takes: the optimizer's state",
                           "an import leaves: the order of the data", "it imports, as the llama model")


if __name__ == "__main__":
    main()
