"""A run that begins with a Hugging Face folder: the same run, bit for bit, as from a checkpoint imported from it."""

import json
import pathlib
import shutil
import subprocess

from harness import RunTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "{name}", seed = 3, stop = T.steps(4),
  model = T.llama {{ layers = 3, width = 24, heads = 12, kv_heads = 4, head_dim = 8, ffn = 44, context = {context},
                    vocab = 131, positions = T.rotary {{ theta = {theta} }}, norm_eps = 0.03 }},
  data = T.megatron {{ prefix = "tokens", split = {{ 90, 10 }} }},
  batch = {{ samples = 4, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-3, clip = 1.0 }},
  mesh = T.mesh {{ tp = {tp}, pp = {pp}, dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
  init = {init},
}}
"""


class HfStart(RunTest):
    def tuned(self, name, init, tp=2, pp=1, dp=1, theta=370.0, context=32):
        path = self.folder / f"{name}.lua"
        path.write_text(RECIPE.format(name=name, init=init, tp=tp, pp=pp, dp=dp, theta=theta, context=context))
        return path

    def outcome(self, run):
        """The losses, and the bytes of every shard of the last checkpoint: weights and moments."""
        manifest, files = self.manifest(run, 4), {}
        for k, entry in enumerate(manifest["files"]):
            files[k] = (self.checkpoint(run, 4) / entry["name"]).read_bytes()
        payload = [files[s["file"]][s["offset"]:s["offset"] + s["bytes"]] for s in self.shards(run, 4)]
        self.assertGreater(sum(map(len, payload)), 3 * 4 * 20000)
        return [line["loss"] for _, line in sorted(self.metrics(run).items())], payload

    def setUp(self):
        super().setUp()
        shutil.copytree(GOLDEN / "hf-llama-gqa-sharded", self.folder / "hf")  # vocabulary above the letters of the tokens

    def test_a_start_from_a_folder_is_the_run_from_an_imported_checkpoint(self):
        subprocess.run([self.program, "import", "hf", "imported"], cwd=self.folder, check=True, capture_output=True)
        imported = 'T.init_from { path = "imported/step-00000000", weights_only = true }'
        for layout in (dict(tp=2), dict(tp=1, pp=3), dict(tp=2, dp=2)):
            for run in ("direct", "through"):
                shutil.rmtree(self.folder / run, ignore_errors=True)
            job = self.train(self.tuned("direct", 'T.hf "hf"', **layout), "direct")
            self.assertIn("weights alone: moments start at zero, the run begins at step 0", job.output())
            self.train(self.tuned("through", imported, **layout), "through")
            with self.subTest(**layout):
                self.assertTrue(self.outcome("direct") == self.outcome("through"), "not the same bits")

    def test_an_export_finds_the_folder_that_the_run_began_with(self):
        folder = self.folder / "hf"
        config = json.loads((folder / "config.json").read_text())
        config.update(eos_token_id=[2, 7], bos_token_id=1)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
        (folder / "LICENSE").write_text("terms")
        (self.folder / "runs").mkdir()
        self.train(self.tuned("first", 'T.hf "hf"', tp=1), "runs/first")
        again = 'T.init_from { path = "runs/first", weights_only = true }'
        self.train(self.tuned("second", again, tp=1), "runs/second")
        elsewhere = self.folder / "elsewhere"  # the export need not be where the start was
        elsewhere.mkdir()
        for run in ("first", "second"):
            out = self.folder / f"out-{run}"
            done = subprocess.run([self.program, "export", f"../runs/{run}", out], cwd=elsewhere, check=True,
                                  capture_output=True, text=True)
            self.assertEqual(done.stderr, "")
            written = json.loads((out / "config.json").read_text())
            self.assertEqual((written["eos_token_id"], written["bos_token_id"]), ([2, 7], 1))
            self.assertEqual(written["torch_dtype"], config.get("torch_dtype", config.get("dtype")))
            for name in ("generation_config.json", "LICENSE"):
                self.assertEqual((out / name).read_bytes(), (folder / name).read_bytes())
        folder.rename(self.folder / "moved")
        done = subprocess.run([self.program, "export", "../runs/second", self.folder / "late"], cwd=elsewhere, check=True,
                              capture_output=True, text=True)
        self.assertIn("the model began with hf, which is not there any more", done.stderr)
        self.assertIn("--like FOLDER", done.stderr)

    def test_a_folder_that_does_not_fit_the_recipe_is_refused(self):
        job = self.train(self.tuned("theta", 'T.hf "hf"', theta=500.0), "theta", code=2)
        self.assertIn("the recipe trains another model", job.output())
        self.assertIn("model.rope_theta = 500.0 in the recipe, 370.0 in config.json", job.output())
        job = self.train(self.tuned("shape", 'T.hf "hf"'), "shape", "--set", "model.vocab=130", code=2)
        self.assertIn("embed.tokens", job.output())
        self.assertIn("except", job.output())
        job = self.train(self.tuned("none", 'T.hf "nowhere"'), "none", code=2)
        self.assertIn("nowhere", job.output())
        job = self.train(self.tuned("wrong", 'T.hf { "hf", onyl = { "layers.*" } }'), "wrong", code=2)
        self.assertIn("wrong.lua:12: init.onyl: no such field in hf; did you mean `only`?", job.output())
        # A part of it: the head starts anew.
        job = self.train(self.tuned("part", 'T.hf { "hf", except = { "head.*" } }'), "part")
        self.assertIn("anew: head.weight [131, 24] (`except`)", job.output())

    def test_a_killed_rank_begins_again_from_the_folder(self):
        recipe = self.tuned("killed", 'T.hf "hf"')
        self.train(recipe, "killed", "--kill", "0@2")
        self.train(self.tuned("calm", 'T.hf "hf"'), "calm")
        self.assertTrue(self.outcome("killed") == self.outcome("calm"), "not the same bits")


if __name__ == "__main__":
    main()
