"""Attention by cuDNN, chosen by --attention, told, written down and kept by a resume, on doubles of a device and of cuDNN:
what is computed is Cairn's own there, so both ways have the same bits."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_device import DoubleDevice  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import RECIPE, write_tokens  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class AttentionDouble(unittest.TestCase):
    def setUp(self):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="attention-double-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, PROGRAM)
        write_tokens(self.folder / "tokens", 3000)

    def recipe(self, name, precision="bf16", more=""):
        path = self.folder / f"{name}.lua"
        text = RECIPE.format(name=name, steps=2, precision=precision, tp=1, pp=1, dp=1, zero=0, sp="false", save=2, keep=1,
                             prefix=self.folder / "tokens")
        for old, new in (("over = T.steps(4)", "over = T.steps(1)"), ("samples = 8", "samples = 2"), ("context = 32", "context = 8"), ("seed = 11", f"seed = 11{more}")):
            self.assertIn(old, text)
            text = text.replace(old, new)
        path.write_text(text)
        return path

    def cairn(self, *args, code=0, **environment):
        done = subprocess.run([self.device.program, *map(str, args)], capture_output=True, text=True, timeout=110,
                              env={**os.environ, **self.device.environment, **environment})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("misuse", done.stdout + done.stderr)
        return done.stdout + done.stderr

    def train(self, recipe, run, *args, **how):
        return self.cairn("train", recipe, "--run", self.folder / run, "--threads", 1, "--device", "cuda", *args, **how)

    def record(self, run):
        lines = (self.folder / run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event.get("event") == "start"][-1]["attention"]

    def losses(self, run):
        lines = map(json.loads, (self.folder / run / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "step" in line]

    def test_the_choice_is_told_recorded_and_kept_by_a_resume_until_another_one_is_named(self):
        recipe = self.recipe("kept")
        said = self.train(recipe, "own")
        self.assertNotIn("cuDNN", said)
        self.assertEqual(self.record("own"), {"by": "own"})
        self.assertFalse((self.folder / "own/attention").exists())

        said = self.train(recipe, "kept", "--attention", "cudnn", "--dry-run")
        self.assertRegex(said, r"device memory: .* of state and activations, .* for attention by cuDNN\n")
        said = self.train(recipe, "kept", "--attention", "cudnn")
        library = self.folder / "libraries/libcudnn.so.9"
        self.assertRegex(said, r"\nattention by cuDNN 9\.19\.0 \(.*\)\n")
        told = self.record("kept")
        self.assertEqual((told["by"], told["version"]), ("cudnn", "9.19.0"))
        self.assertTrue(os.path.samefile(told["path"], library))
        self.assertEqual((self.folder / "kept/attention").read_text(), "cudnn")
        self.assertEqual(self.losses("kept"), self.losses("own"))

        said = self.cairn("resume", self.folder / "kept", "--dry-run")
        self.assertIn("\nattention by cuDNN 9.19.0 (", said)
        # A library that the run had is missed, not replaced.
        said = self.cairn("resume", self.folder / "kept", code=2, CAIRN_DOUBLE_CUDNN="91000")
        self.assertIn(f"{self.folder / 'kept'} has attention by cuDNN: ", said)
        self.assertIn("is version 9.10.0 of cuDNN; 9.x from 9.18.0 on is needed; install cuDNN 9", said)
        self.assertIn("or take Cairn's own kernels, whose bits are other ones: --attention own\n", said)
        said = self.cairn("resume", self.folder / "kept", "--attention", "own", CAIRN_DOUBLE_CUDNN="91000")
        self.assertNotIn("attention by", said)
        self.assertEqual((self.folder / "kept/attention").read_text(), "own")
        (self.folder / "kept/attention").write_text("flash")
        said = self.cairn("resume", self.folder / "kept", code=2)
        self.assertIn('kept/attention: "flash"; expected "own", "warpgroup" or "cudnn"', said)

    def test_kernels_by_warpgroups_are_recorded_and_kept(self):
        self.train(self.recipe("nine"), "nine", "--attention", "warpgroup")
        self.assertEqual(self.record("nine"), {"by": "warpgroup"})
        self.assertEqual((self.folder / "nine/attention").read_text(), "warpgroup")
        self.cairn("resume", self.folder / "nine", "--dry-run")
        self.assertEqual((self.folder / "nine/attention").read_text(), "warpgroup")

    def test_what_cannot_be_is_refused_with_what_is_missing(self):
        run = self.folder / "refused"
        for recipe, words in ((self.recipe("floats", precision="fp32"), "it takes no attention of this recipe: it takes no f32"),
                              (self.recipe("documents", more=", objective = { document_end = 32 }"),
                               "it takes no attention of this recipe: masks of documents, caps, sinks")):
            said = self.train(recipe, "refused", "--attention", "cudnn", code=2)
            self.assertIn(f"--attention cudnn: {words}", said)
            self.assertFalse(run.exists())
        recipe = self.recipe("refused")
        said = self.cairn("train", recipe, "--run", run, "--device", "cpu", "--attention", "cudnn", code=2)
        self.assertIn("--attention cudnn: ranks on the CPU have no use for cuDNN", said)
        said = self.train(recipe, "refused", "--attention", "cudnn", code=2, CAIRN_DOUBLE_CUDNN="81000")
        self.assertRegex(said, "--attention cudnn: .* is version 8.10.0 of cuDNN")
        self.assertIn("name its folder in CAIRN_CUDA_PATH", said)
        self.assertFalse(run.exists())

    def test_plan_and_doctor_know_of_it(self):
        recipe = self.recipe("told")
        # A sample of 4 heads, 8 tokens in a tile of 64 by 128.
        self.assertEqual(json.loads(self.cairn("plan", recipe, "--json"))["cudnn_attention_bytes"], 4 * (64 * 128 * 2 + 8 * 4) + 256)
        self.assertRegex(self.cairn("plan", recipe), r"\nkernels .*; on CUDA .* with --attention cudnn\n")
        floats = self.recipe("floats", precision="fp32")
        self.assertEqual(json.loads(self.cairn("plan", floats, "--json"))["cudnn_attention_bytes"], 0)
        checks = {check["what"]: check for check in json.loads(self.cairn("doctor", "--json"))["checks"]}
        self.assertRegex(checks["cuDNN"]["found"], r"version 9\.19\.0$")
        checks = {check["what"]: check for check in json.loads(
            self.cairn("doctor", "--json", CAIRN_DOUBLE_CUDNN="91000"))["checks"]}
        self.assertIn("is version 9.10.0 of cuDNN", checks["cuDNN"]["found"])


if __name__ == "__main__":
    unittest.main()
