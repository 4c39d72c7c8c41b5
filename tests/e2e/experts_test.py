"""Experts and sequences over processes: killed ranks come back from memory, and other layouts take the run up."""

import json
import subprocess

from harness import OTHER_NAME, RunTest, main

MOE = ["--set", 'model.positions="rotary"', "--set", 'model.activation="swiglu"', "--set", "model.bias=false", "--set",
       "model.moe.experts=4", "--set", "model.moe.aux_loss=0.01", "--set", 'model.moe.router="sigmoid"', "--set",
       "model.moe.bias_rate=0.01", "--set", "model.moe.shared_experts=1", "--set", 'deterministic="layout"']

# DeepSeek-V3 in small: latent attention, a dense layer before experts in groups, biases that balance their choice, a
# module that guesses a further token.
DEEPSEEK = ["--set", 'model.positions="rotary"', "--set", 'model.rope.pairs="interleaved"', "--set",
            'model.norm="rmsnorm"', "--set", 'model.activation="swiglu"', "--set", "model.bias=false", "--set",
            "model.tied_embeddings=false", "--set", "model.layers=3", "--set", "model.mla.kv_rank=24", "--set",
            "model.mla.q_rank=20", "--set", "model.mla.nope_dim=10", "--set", "model.mla.rope_dim=6", "--set",
            "model.mla.value_dim=12", "--set", "model.moe.experts=8", "--set", "model.moe.top_k=2", "--set",
            "model.moe.ffn=24", "--set", "model.moe.dense_layers={0}", "--set", "model.moe.shared_experts=1", "--set",
            'model.moe.router="sigmoid"', "--set", "model.moe.groups=4", "--set", "model.moe.groups_per_token=2", "--set",
            "model.moe.scale=2.5", "--set", "model.moe.bias_rate=0.01", "--set", "model.mtp.depth=1"]


class Experts(RunTest):
    def layout(self, name, **changes):
        return self.recipe(**{**dict(name=name, steps=12, tp=1, pp=1, dp=1, zero=1, sp="false", save=4), **changes})

    def losses(self, run):
        return {step: line["loss"] for step, line in self.metrics(run).items()}

    def test_experts_over_ranks_survive_kills_and_other_layouts_go_on_with_the_same_bits(self):
        self.train(self.layout("one"), "one", *MOE)
        ep = ["--set", "mesh.ep=2"]
        self.train(self.layout("four", dp=4), "four", *MOE, *ep, "--kill", "2@3", "--kill", "0@7")
        self.assertEqual(len(self.events("four", "recovered")), 2)
        self.assertEqual(self.losses("four"), self.losses("one"))
        self.assertEqual(self.manifest("four", 12)["mesh"]["ep"], 2)

        # The save before the last (steps that follow too fast share one), by `reshard`, in another ep, and on from there.
        saved = self.checkpoint("four", 12).parent
        step = sorted(int(path.name[len("step-"):]) for path in saved.glob("step-*"))[-2]
        subprocess.run([self.program, "ckpt", "reshard", self.checkpoint("four", step), self.folder / "two", "--mesh",
                        "dp=2,ep=2", "--zero", "3"], check=True, capture_output=True)
        self.assertEqual(self.manifest("two", step)["mesh"]["ep"], 2)
        self.train(self.layout("two", dp=2, zero=3), "two", *MOE, *ep, *OTHER_NAME)
        self.assertEqual(self.losses("two"), {s: loss for s, loss in self.losses("one").items() if s > step})
        subprocess.run([self.program, "ckpt", "verify", self.folder / "two", "--all"], check=True, capture_output=True)

        # Whole again, on one rank: the same bytes of weights, moments and biases.
        for run in ("four", "two"):
            differ = subprocess.run([self.program, "ckpt", "diff", self.checkpoint("one", 12), self.checkpoint(run, 12)],
                                    capture_output=True, text=True)
            self.assertIn(" tensors equal bit for bit, 0 differ", differ.stdout + differ.stderr)

    def test_deepseek_v3s_axes_train_as_one_rank_does_and_its_checkpoints_go_anywhere(self):
        self.train(self.layout("one"), "one", *DEEPSEEK)
        self.train(self.layout("four", pp=2, dp=2), "four", *DEEPSEEK, "--set", "mesh.ep=2", "--kill", "3@5")
        self.assertEqual(len(self.events("four", "recovered")), 1)
        one, four = self.losses("one"), self.losses("four")
        self.assertEqual(sorted(four), sorted(one))
        for step, loss in one.items():
            self.assertAlmostEqual(four[step] / loss, 1, delta=1e-4)
        self.assertLess(one[12], one[1])
        further = {run: [line["mtp_loss"] for line in self.metrics(run).values()] for run in ("one", "four")}
        self.assertLess(further["one"][-1], further["one"][0])
        for mine, other in zip(further["one"], further["four"], strict=True):
            self.assertAlmostEqual(other / mine, 1, delta=1e-4)

        # Cut anew for tensor parallelism, whose last steps are the same.
        saved = self.checkpoint("four", 12).parent
        step = sorted(int(path.name[len("step-"):]) for path in saved.glob("step-*"))[-2]
        self.cairn("ckpt", "reshard", self.checkpoint("four", step), self.folder / "two", "--mesh", "tp=2,pp=2", "--zero",
                   "1")
        self.train(self.layout("two", tp=2, pp=2, sp="true"), "two", *DEEPSEEK, *OTHER_NAME)
        for later, loss in self.losses("two").items():
            self.assertGreater(later, step)
            self.assertAlmostEqual(loss / one[later], 1, delta=1e-4)

        # To Hugging Face and back: the same weights.
        self.cairn("export", self.folder / "four", self.folder / "four.hf", "--dtype", "f32")
        config = json.loads((self.folder / "four.hf" / "config.json").read_text())
        self.assertEqual((config["model_type"], config["num_nextn_predict_layers"]), ("deepseek_v3", 1))
        self.cairn("import", self.folder / "four.hf", self.folder / "back")
        told = json.loads(self.cairn("ckpt", "diff", self.checkpoint("four", 12),
                                     self.folder / "back" / "step-00000000", "--json").stdout)
        self.assertEqual([tensor for tensor in told["tensors"] if tensor["kind"] == "weight"], [])
        self.assertGreater(told["equal_tensors"], 30)

    def test_sequences_over_ranks(self):
        self.train(self.layout("whole"), "whole")
        self.train(self.layout("parts", dp=2), "parts", "--set", "mesh.cp=2", "--kill", "1@5")
        whole, parts = self.losses("whole"), self.losses("parts")
        self.assertEqual(sorted(parts), sorted(whole))
        for step, loss in whole.items():
            self.assertAlmostEqual(parts[step] / loss, 1, delta=1e-5)

    def test_sequences_over_ranks_with_the_same_bits_as_on_one(self):
        for precision in ("fp32", "fp16"):
            long = ["--set", "model.context=512", "--set", 'deterministic="layout"', "--set", f'precision="{precision}"']
            one, four = f"one-{precision}", f"four-{precision}"
            self.train(self.layout(one), one, *long)
            self.train(self.layout(four, tp=2, dp=2, zero=2), four, "--set", "mesh.cp=2", *long, "--kill", "1@5")
            self.assertEqual(len(self.events(four, "recovered")), 1)
            self.assertEqual(self.losses(four), self.losses(one))
            differ = subprocess.run([self.program, "ckpt", "diff", self.checkpoint(one, 12), self.checkpoint(four, 12)],
                                    capture_output=True, text=True)
            self.assertIn(" tensors equal bit for bit, 0 differ", differ.stdout + differ.stderr)

    def test_layouts_that_cannot_be_are_refused_with_those_that_can(self):
        job = self.train(self.layout("no", dp=2), "no", "--set", "mesh.ep=2", code=2)
        self.assertIn("mesh.ep = 2 divides experts, and the model has none", job.output())
        job = self.train(self.layout("cut", dp=1), "cut", "--set", "mesh.cp=3", code=2)
        self.assertIn("mesh.cp = 3 cuts sequences into 6 chunks, and 32 tokens", job.output())
        job = self.train(self.layout("odd", dp=2), "odd", *MOE, "--set", "mesh.ep=4", code=2)
        self.assertIn("mesh.ep = 4 does not divide dp = 2", job.output())


if __name__ == "__main__":
    main()
