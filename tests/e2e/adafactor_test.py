"""Adafactor in whole runs: rows and columns in checkpoints, over deaths, on a disk, and into other layouts."""

import json
import os
import signal

import numpy

from harness import JUMP, RunTest, main


class Adafactor(RunTest):
    def factored(self, name, more="", **changes):
        path = self.recipe(**{**dict(name=name, steps=24, save=12, keep=8), **changes})
        text = path.read_text().replace("T.adamw { peak_lr = 1e-2,", f"T.adafactor {{ peak_lr = 3e-2, {more}")
        path.write_text(text)
        return path

    def test_a_killed_rank_and_a_killed_job_end_in_the_same_bytes(self):
        for name, more in (("plain", ""), ("averaged", "beta1 = 0.9, ")):
            self.train(self.factored(name, more, steps=400, save=400), name)
            again = name + "-killed"
            path = self.factored(name, more, steps=400, save=400)  # the same recipe, to the name
            job = self.start(path, again)
            self.until_step(again, 4, job)
            os.kill(job.children()[5], signal.SIGKILL)
            self.until_step(again, 12, job)
            job.kill_group()
            self.train(path, again)
            self.assert_same_training(again, name, 400)

    def test_adafactor_saves_what_is_planned_and_reshards_to_the_same_state(self):
        path = self.factored("a")
        self.train(path, "a")
        tensors = self.manifest("a", 24)["tensors"]
        kinds = {kind: {t["name"]: t["shape"] for t in tensors if t["kind"] == kind} for kind in {t["kind"] for t in tensors}}
        self.assertEqual(set(kinds), {"weight", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"})
        for name, shape in kinds["weight"].items():
            if len(shape) == 2:
                self.assertEqual(kinds["exp_avg_sq_row"][name], shape[:1])  # 257 rows, and not those of padding
                self.assertEqual(kinds["exp_avg_sq_col"][name], shape[1:])
            else:
                self.assertEqual(kinds["exp_avg_sq"][name], shape)
        planned = json.loads(self.cairn("plan", path, "--world", 8, "--json").stdout)
        self.assertEqual(planned["checkpoint"]["bytes"], sum(s["bytes"] for s in self.shards("a", 24)))
        self.assertIn("second moments of rows and columns", self.cairn("plan", path, "--world", 8).stdout.decode())
        told = json.loads(self.cairn("ckpt", "inspect", "a", "--stats", "--json").stdout)
        self.assertEqual({t["kind"] for t in told["tensors"]}, set(kinds))
        # The mean of a matrix's rows is that of its columns: one number, from two sums over differently cut shards.
        for name in ("embed.tokens", "layers.0.attn.q.weight", "layers.1.mlp.down.weight"):
            rows, cols = self.array("a", 24, f"exp_avg_sq_row/{name}"), self.array("a", 24, f"exp_avg_sq_col/{name}")
            numpy.testing.assert_allclose(rows.astype("f8").mean(), cols.astype("f8").mean(), rtol=1e-6)
            self.assertGreater(rows.min(), 0 if name != "embed.tokens" else -1)

        self.cairn("ckpt", "reshard", "a", "b", "--mesh", "tp=1,pp=2,dp=1")
        self.cairn("ckpt", "reshard", "b", "c", "--mesh", "tp=4,pp=1,dp=2")
        for other in ("b", "c"):
            self.cairn("ckpt", "verify", other)
            diff = json.loads(self.cairn("ckpt", "diff", "a", other, "--json").stdout)
            self.assertEqual(diff["equal_tensors"], len(tensors), diff)
        # On from there, beside the run that stays: the same losses to rounding.
        longer = self.factored("a", steps=30, save=30)
        for run, ranks, mesh in (("a", 8, {}), ("b", 2, dict(tp=1, pp=2, dp=1, sp="false")), ("c", 8, dict(tp=4, pp=1, dp=2))):
            longer = self.factored("a", steps=30, save=30, **mesh)
            self.train(longer, run, "--nproc", ranks, *JUMP)
        for step in range(25, 31):
            for other in ("b", "c"):
                self.assertAlmostEqual(self.metrics(other)[step]["loss"], self.metrics("a")[step]["loss"], places=4)
        self.assertLess(self.metrics("a")[30]["loss"], self.metrics("a")[1]["loss"] - 0.5)

    def test_adafactor_on_a_disk_gives_the_same_bits(self):
        disk = self.folder / "nvme"
        disk.mkdir()
        layout = dict(steps=12, save=12, zero=1, tp=1, sp="false")
        wide = ["--set", "model.width=256"]
        self.train(self.factored("m", **layout), "m", *wide)
        self.train(self.factored("d", f'offload = "{disk}", ', **layout), "d", *wide)
        self.assertEqual(self.contents("d", 12)[1], self.contents("m", 12)[1])

    def test_a_change_from_adafactor_is_refused_and_weights_alone_can_be_taken(self):
        self.train(self.factored("a", steps=6, save=6, tp=1, pp=1, dp=2, sp="false"), "a")
        plain = dict(steps=6, save=6, tp=1, pp=1, dp=2, sp="false")
        job = self.start(self.recipe(name="a", **{**plain, "steps": 8}), "a")
        self.assertNotEqual(job.wait(), 0)
        self.assertIn("--accept optimizer.kind", job.output())
        begun = self.start(self.recipe(name="b", **plain), "b", "--init-from", "a")
        self.assertNotEqual(begun.wait(), 0)
        self.assertIn("the optimizer state of Adafactor", begun.output())
        self.train(self.recipe(name="b", **plain), "b", "--init-from", "a", "--init-weights-only")
        self.train(self.factored("c", **plain), "c", "--init-from", "b", "--init-weights-only")
        self.assertEqual(self.last_step("c"), 6)


if __name__ == "__main__":
    main()
