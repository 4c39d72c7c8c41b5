"""Coded and incremental checkpoints of real runs: what is restored from them is what was saved."""

import shutil
import subprocess

from harness import RunTest, main


class Cold(RunTest):
    def small(self, name, **changes):
        path = self.recipe(**{**dict(name=name, steps=6, tp=1, pp=1, dp=2, sp="false", save=3), **changes})
        path.write_text(path.read_text().replace("width = 32", "width = 64"))  # tensors large enough to be coded
        return path

    def cairn(self, *args, code=0):
        done = subprocess.run([self.program, *map(str, args)], capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def size(self, run, step):
        return sum(p.stat().st_size for p in self.checkpoint(run, step).glob("*.h5"))

    def assert_goes_on_like(self, run, reference):
        got, wanted = self.metrics(run), self.metrics(reference)
        self.assertEqual(sorted(got), sorted(wanted))
        for step in wanted:
            self.assertEqual((got[step]["loss"], got[step]["grad_norm"]), (wanted[step]["loss"], wanted[step]["grad_norm"]))

    def test_a_run_goes_on_from_a_coded_checkpoint_and_reshard_codes_one(self):
        recipe = self.small("base")
        self.train(recipe, "raw")
        coded = ["--set", 'checkpoint.compress="zstd"']
        said = self.train(recipe, "coded", *coded).output()
        self.assertNotIn("HDF5", said)  # no word of the library itself, which lacks the filter
        self.assertLess(self.size("coded", 3), self.size("raw", 3))
        shutil.rmtree(self.checkpoint("coded", 6))
        self.train(recipe, "coded", *coded)  # from step 3, from disk
        self.assertEqual(self.checkpoints("coded"), [3, 6])
        self.assert_goes_on_like("coded", "raw")
        self.cairn("ckpt", "verify", self.checkpoint("coded", 6))

        self.cairn("ckpt", "reshard", self.checkpoint("raw", 3), "cold", "--mesh", "tp=2", "--compress", "zstd")
        self.cairn("ckpt", "verify", self.checkpoint("cold", 3))
        # And back: the numbers are those of the raw one, so the files are too.
        self.cairn("ckpt", "reshard", self.checkpoint("cold", 3), "warm", "--mesh", "dp=2")
        self.cairn("ckpt", "reshard", self.checkpoint("raw", 3), "plain", "--mesh", "dp=2")
        self.assertEqual(self.contents("warm", 3)[1], self.contents("plain", 3)[1])

    def test_weights_that_stand_still_are_written_once_and_their_step_stays(self):
        recipe = self.small("still", steps=8, save=2, keep=1)
        # Moments change; a weight that is not zero does not feel a step of 1e-30.
        recipe.write_text(recipe.read_text().replace("to = 1e-3", "to = 1e-31").replace("peak_lr = 1e-2", "peak_lr = 1e-30")
                          .replace("weight_decay = 0.1", "weight_decay = 0.0"))
        self.train(recipe, "whole")
        incremental = ["--set", "checkpoint.incremental=true"]
        self.train(recipe, "still", *incremental)
        self.assertEqual(self.checkpoints("whole"), [8])
        self.assertEqual(self.checkpoints("still"), [2, 8])
        referred = {f.get("step") for f in self.manifest("still", 8)["files"]}
        self.assertEqual(referred, {None, 2})
        self.assertLess(self.size("still", 8), 0.8 * self.size("whole", 8))
        self.cairn("ckpt", "verify", self.checkpoint("still", 8))
        for run in ("still", "whole"):
            self.cairn("ckpt", "reshard", self.checkpoint(run, 8), f"{run}-alone", "--mesh", "dp=2")
        self.assertEqual(self.contents("still-alone", 8)[1], self.contents("whole-alone", 8)[1])

        shutil.rmtree(self.checkpoint("still", 2))
        self.assertIn("step-00000002", self.cairn("ckpt", "verify", self.checkpoint("still", 8), code=65))
        self.assertIn("step-00000002", self.cairn("ckpt", "ls", "still"))


if __name__ == "__main__":
    main()
