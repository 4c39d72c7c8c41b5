"""Training states of DeepSpeed (tests/golden/deepspeed), imported and trained on: the losses of DeepSpeed's own next steps."""

import json
import pathlib

from harness import main
from imported_states import STEPS, ImportedStates

PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}


class DeepSpeed(ImportedStates):
    golden = pathlib.Path(__file__).resolve().parents[1] / "golden" / "deepspeed"

    def form(self, name):
        precision = next((of for key, of in PRECISIONS.items() if f"-{key}" in name), "bf16")
        config = json.loads((self.golden / name / "config.json").read_text())
        return precision, config["tie_word_embeddings"]

    def losses(self, name, **layout):
        precision, tied = self.form(name)
        begin = 3 if precision == "fp16" else 2  # DeepSpeed's schedule does not count the step that was skipped
        lr = (f"T.linear {{ over = T.steps({begin}), to = 0 }}, "
              f"T.linear {{ to = {(STEPS - begin) * 2.5e-3} }}")
        return self.losses_of(name, precision, tied, peak_lr=1e-2, lr=lr, clip=self.training["clip"], **layout)

    def test_the_next_losses_are_those_of_deepspeed(self):
        for name in self.training["losses"]:
            if (self.golden / name).is_dir():
                with self.subTest(name):
                    self.assert_close(self.losses(name), name, 1e-6 if self.form(name)[0] == "fp32" else 1e-2)

    def test_any_layout_of_ours_resumes_it(self):
        for layout in (dict(tp=2), dict(pp=2, dp=2)):
            with self.subTest(**layout):
                self.assert_close(self.losses("z1-f32-tied", **layout), "z1-f32-tied", 1e-6)

    def test_an_optimizer_that_cannot_use_the_moments_says_so(self):
        self.losses("z0-f32")
        recipe = self.folder / "z0-f32.lua"
        text = recipe.read_text()
        begin, end = text.index("optimizer ="), text.index("mesh =")
        recipe.write_text(f"{text[:begin]}optimizer = T.adafactor {{ peak_lr = 1e-2 }},\n  {text[end:]}")
        self.cairn("import", self.golden / "z0-f32", "other/checkpoints")
        refused = self.train(recipe, "other", code=2).output()
        self.assertIn("the moments are of another form: they begin at zero", refused)
        self.train(recipe, "other", "--accept", "optimizer.kind")
        self.assertEqual(sorted(self.metrics("other")), [4, 5, 6])


if __name__ == "__main__":
    main()
