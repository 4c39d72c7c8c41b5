"""The average of the weights in whole runs: in checkpoints, over restarts and layouts, and taken with --ema."""

import json
import os
import signal

import numpy

from harness import RunTest, main


class Ema(RunTest):
    def averaging(self, name, decay=0.75, **changes):
        path = self.recipe(**{**dict(name=name, steps=8, tp=1, pp=2, dp=2, sp="false", save=1, keep=8), **changes})
        text = path.read_text()
        path.write_text(text.replace("weight_decay = 0.1,", f"weight_decay = 0.1, ema = {decay},"))
        return path

    def test_checkpoints_hold_it_and_it_goes_on_over_deaths(self):
        self.train(self.averaging("a", steps=30, save=30), "a")
        tensors = self.manifest("a", 30)["tensors"]
        names = {t["name"] for t in tensors if t["kind"] == "weight"}
        self.assertEqual(names, {t["name"] for t in tensors if t["kind"] == "ema"})
        for name in ("embed.tokens", "layers.1.mlp.down.weight"):
            average, weight = self.array("a", 30, f"ema/{name}"), self.array("a", 30, f"weight/{name}")
            self.assertGreater(abs(average - weight).max(), 1e-6)  # it lags behind
            self.assertLess(abs(average - weight).max(), 0.1)
        job = self.start(self.averaging("b", steps=30, save=30), "b")
        self.until_step("b", 4, job)
        os.kill(job.children()[1], signal.SIGKILL)
        self.finish(job)
        self.assertEqual(self.contents("b", 30)[1], self.contents("a", 30)[1])

    def test_export_eval_and_generate_take_it(self):
        self.train(self.averaging("a", decay=0.9), "a")
        self.cairn("export", "a", "plain")
        self.cairn("export", "a", "averaged", "--ema")
        self.cairn("ckpt", "reshard", "a", "other", "--mesh", "tp=2,dp=2")
        self.cairn("export", "other", "resharded", "--ema")
        read = [self.weights(folder) for folder in ("plain", "averaged", "resharded")]
        self.assertNotEqual(read[0], read[1])
        self.assertEqual(read[1], read[2])
        self.assertIn("moving average of its weights, decay 0.9", (self.folder / "averaged/README.md").read_text())
        text = self.folder / "text.txt"
        text.write_text("some words of a text that is no longer than this\n" * 4)
        loss = lambda *args: json.loads(self.cairn("eval", *args, "--text", text, "--json").stdout)["sets"][0]["loss"]  # noqa: E731
        self.assertNotEqual(loss("a"), loss("a", "--ema"))
        self.assertAlmostEqual(loss("a", "--ema"), loss("averaged", "--tokenizer", "bytes"), places=5)
        made = self.cairn("generate", "a", "--ema", "--prompt", "so", "--max-tokens", 4, "--json").stdout
        self.assertEqual(len(json.loads(made)["texts"]), 1)

        # Without one it is told; a run that begins to keep one begins at the weights.
        self.train(self.recipe(name="none", steps=6, tp=1, pp=1, dp=2, sp="false", save=6), "none")
        self.assertIn("holds no average of its weights", self.cairn("export", "none", "x", "--ema", code=2).stderr.decode())
        self.assertIn("--ema is for checkpoints", self.cairn("eval", "averaged", "--ema", "--text", text, code=2).stderr.decode())
        self.train(self.averaging("none", steps=7, tp=1, pp=1, dp=2, save=7), "none")
        start, weight = self.array("none", 6, "weight/embed.tokens"), self.array("none", 7, "weight/embed.tokens")
        numpy.testing.assert_allclose(self.array("none", 7, "ema/embed.tokens"), 0.75 * start + 0.25 * weight, rtol=0, atol=1e-6)

    def weights(self, folder):
        return (self.folder / folder / "model.safetensors").read_bytes()


if __name__ == "__main__":
    main()
