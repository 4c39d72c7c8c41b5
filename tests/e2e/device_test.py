"""Where a run trains: nothing is taken in place of a device that was asked for, or that is there and cannot be used."""

import json

from harness import DEVICE_MODEL, RunTest, main


class Device(RunTest):
    def one_rank(self, **changes):
        return self.recipe(**{**dict(steps=6, tp=1, pp=1, dp=1, sp="false"), **changes})

    def with_words(self, words, **changes):
        path = self.one_rank(**changes)
        path.write_text(path.read_text().replace("seed = 11,", f"seed = 11, {words},"))
        return path

    def test_a_device_that_cannot_be_used_is_refused_with_what_the_doctor_says_and_nothing_is_made(self):
        recipe = self.one_rank()
        with self.with_device(driver=""):
            said = self.train(recipe, "run", code=2).output()
            for words in (DEVICE_MODEL, "PROBLEM NVIDIA driver: none", "needed: 580 or newer", "--device cpu"):
                self.assertIn(words, said)
            self.assertFalse((self.folder / "run").exists())
            self.assertEqual(self.train(recipe, "dry", "--dry-run", code=2).output(), said)
            told = json.loads(self.cairn("doctor", "--json", code=2).stdout)
            self.assertFalse(told["ok"])
            driver = next(one for one in told["checks"] if one["what"] == "NVIDIA driver")
            self.assertEqual(driver["verdict"], "problem")
            self.assertIn("install the driver", driver["to_do"])
            self.train(recipe, "run", "--device", "cpu")
            self.assertEqual(self.checkpoints("run"), [5, 6])

    def test_cuda_that_was_asked_for_is_not_replaced_by_the_cpu(self):
        for recipe, words in ((self.one_rank(), ("--device", "cuda")),
                              (self.with_words('device = "cuda"', name="written"), ())):
            said = self.train(recipe, "run", *words, code=2).output()
            self.assertIn("this machine has no NVIDIA device; to train on the CPU: --device cpu", said)
            self.assertFalse((self.folder / "run").exists())
        self.train(self.with_words('device = "cuda"', name="written"), "run", "--device", "cpu")

    def test_a_run_that_trained_on_cuda_continues_on_the_cpu_only_when_asked(self):
        self.train(self.one_rank(), "run")
        self.assertFalse((self.folder / "run/device").exists())
        (self.folder / "run/device").write_text("cuda")  # what a start on CUDA leaves
        longer = self.one_rank(steps=8)
        refused = self.train(longer, "run", "--accept", "optimizer.lr", code=2).output()
        self.assertIn("trained on CUDA, and this machine has no NVIDIA device", refused)
        self.assertIn("--device cpu", refused)
        self.assertEqual(self.checkpoints("run"), [5, 6])
        self.train(longer, "run", "--accept", "optimizer.lr", "--device", "cpu")
        self.assertEqual((self.folder / "run/device").read_text(), "cpu")
        self.assertEqual(self.last_step("run"), 8)
        (self.folder / "run/device").write_text("tpu")
        self.assertIn('expected "cuda" or "cpu"', self.train(longer, "run", code=2).output())

    def test_a_check_names_the_fields_for_which_cuda_lacks_something(self):
        recipe = self.one_rank(dp=2)
        recipe.write_text(recipe.read_text()
                          .replace("seed = 11,", 'seed = 11, device = "cuda", deterministic = "layout",')
                          .replace("weight_decay = 0.1,", "weight_decay = 0.1, ema = 0.9,")
                          .replace("snapshot = T.every", 'snapshot_by = "banks", snapshot = T.every'))
        told = json.loads(self.cairn("check", recipe, "--json", code=2).stdout)
        lacks = {one.get("path"): one["message"] for one in told["diagnostics"]}
        self.assertIn("which CUDA has not yet", lacks["deterministic"])
        self.assertIn("banks are memory of the host", lacks["checkpoint.snapshot_by"])
        self.assertNotIn("mesh", lacks)
        self.assertNotIn("optimizer.ema", lacks)


if __name__ == "__main__":
    main()
