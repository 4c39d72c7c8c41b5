"""Attention by cuDNN, chosen by --attention, told, written down and kept by a resume, on doubles of a device and of cuDNN:
what is computed is Cairn's own there, so both ways have the same bits."""

import json
import os
import pathlib
import shutil
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_runs import DoubleRuns  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class AttentionDouble(DoubleRuns):
    program = PROGRAM

    def record(self, run):
        lines = (self.folder / run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event.get("event") == "start"][-1]["attention"]

    def attention(self, run):
        return {entry["pass"]: entry["by"] for entry in self.choices(run, "attention")}

    def test_the_choice_is_told_recorded_and_kept_by_a_resume_until_another_one_is_named(self):
        recipe = self.recipe("kept")
        said = self.train(recipe, "own", "--attention", "own")
        self.assertNotIn("cuDNN", said)
        self.assertEqual(self.record("own"), {"by": "own"})
        self.assertFalse((self.folder / "own/attention").exists())
        self.cairn("resume", self.folder / "own", "--dry-run")  # no word of it is Cairn's own: runs of older programs have none
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
        self.assertIn('kept/attention: "flash"; expected "auto", "own", "warpgroup" or "cudnn"', said)

    def test_a_new_run_times_attention_and_keeps_what_was_fastest(self):
        forward, backward = (dict(CAIRN_DOUBLE_ATTENTION=times) for times in ("90,30:30,90", "30,90:90,30"))
        recipe = self.recipe("timed")
        said = self.train(recipe, "timed", **forward)
        self.assertRegex(said, r"\nattention by Cairn's own kernels or cuDNN 9\.19\.0 \(.*\), as timed\n")
        self.assertRegex(said, r"attention on Double \(4 multiprocessors\), cuDNN 9\.19\.0: 2 kinds timed; bf16 1 x 8 tokens, 4 heads of 8: "
                         r"forward by cudnn \(own 91\.0 us, cudnn 31\.0 us\), backward by own \(own .* us, cudnn .* us\)\n")
        self.assertEqual((self.record("timed")["by"], (self.folder / "timed/attention").read_text()), ("auto", "auto"))
        chosen = self.attention("timed")
        self.assertEqual(chosen, {"forward": "cudnn", "backward": "own"})
        more = self.recipe("more", steps=4)
        said = self.train(more, "timed", "--accept", "optimizer.lr", **backward)  # the clock says otherwise by now
        self.assertNotIn("attention on Double", said)
        self.assertEqual(self.attention("timed"), chosen)
        # Another library is reported; without one Cairn's own kernels do it, and that is reported too.
        for version, where in (("92000", r"cuDNN 9\.20\.0: 2 kinds timed; .*"), ("91000", "no cuDNN: 0 choices of before")):
            run = f"moved-{version}"
            shutil.copytree(self.folder / "timed", self.folder / run)
            said = self.train(self.recipe("moved", steps=6), run, "--accept", "optimizer.lr", CAIRN_DOUBLE_CUDNN=version, **backward)
            self.assertRegex(said, rf"attention on Double \(4 multiprocessors\), {where}; the choices of before are for Double "
                             r"\(4 multiprocessors\), cuDNN 9\.19\.0: bits differ from theirs from here on\n")
        # A word goes before the file, and so does a run without choices.
        self.train(recipe, "asked", "--attention", "own", "--tuning", self.folder / "timed/tuning.json", **forward)
        self.assertEqual(self.record("asked"), {"by": "own"})
        said = self.train(recipe, "off", "--tuning", "off", **forward)
        self.assertNotIn("attention on Double", said)
        self.assertEqual(self.attention("off"), {})

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
