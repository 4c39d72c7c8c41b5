"""Good checkpoints stay: whatever ruins a run, a good step is there, the next start works, and the way back is told."""

import json
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402

RUIN = ("--set", "optimizer.peak_lr=1e15", "--set", "optimizer.lr-")
KEEPS = ("T.last(1)", "T.every { steps = 1000 }", "T.at { steps = { 1000 } }", "T.best { metric = \"loss\", count = 1 }",
         "T.within { seconds = 1 }", "T.fractions(1)")


class LabelsTest(harness.RunTest):
    def small(self, save=1000, keep=1):
        return self.recipe(steps=12, tp=1, pp=1, dp=1, zero=0, sp="false", save=save, keep=keep)

    def to(self, steps, *more):
        return ("--set", f"stop=T.steps({steps})", *harness.JUMP, *more)

    def grown(self, recipe, run, *stops):
        """One run after another: the end of each is saved, whatever the disk's speed."""
        for stop in stops:
            self.train(recipe, run, *self.to(stop))

    def labels(self, run):
        listed = json.loads(self.cairn("ckpt", "ls", self.folder / run, "--json").stdout)
        return {c["step"]: c.get("label") for c in listed["checkpoints"]}

    def test_an_update_that_ruins_the_weights_costs_no_good_step(self):
        recipe = self.small()
        for number, keep in enumerate(KEEPS):
            with self.subTest(keep):
                run, rule = f"run{number}", ("--set", f"checkpoint.keep={{{keep}}}")
                self.train(recipe, run, *rule)
                self.assertEqual(self.labels(run), {12: "good"})
                job = self.train(recipe, run, *self.to(30), *RUIN, *rule, code=76)
                text = job.output()
                self.assertIn("step 14: loss", text)
                self.assertIn("the update of step 13 has ruined them", text)
                self.assertIn("Newest good: step 12.", text)
                self.assertIn("--from-step 12 --set optimizer.peak_lr=", text)
                self.assertEqual(self.labels(run), {12: "good"})
                if number == 0:
                    self.train(recipe, run, *self.to(40), *rule)
                    self.assertEqual(self.last_step(run), 40)

    def test_a_ruined_step_that_is_on_disk_already_is_bad_and_passed_over(self):
        recipe = self.small(save=1)
        self.train(recipe, "run")
        self.train(recipe, "run", *self.to(30), *RUIN, code=76)
        labels = self.labels("run")
        self.assertEqual(labels[12], "good")
        self.assertIn(labels.get(13, "bad"), "bad")
        self.assertNotIn(14, labels)
        job = self.train(recipe, "run", *self.to(50))
        if 13 in labels:
            self.assertIn("step 13 is passed over, it is bad", job.output())
        self.assertIn("step-00000012", job.output())
        self.assertEqual(self.labels("run")[50], "good")

    def test_a_run_that_ends_with_the_update_that_ruins_it_does_not_save_that(self):
        recipe = self.small()
        self.train(recipe, "run")
        job = self.train(recipe, "run", *self.to(13), *RUIN, code=76)
        self.assertIn("step 13, the run's last", job.output())
        self.assertIn("Newest good: step 12.", job.output())
        self.assertEqual(self.labels("run"), {12: "good"})
        self.train(recipe, "run", *self.to(13))
        self.assertEqual(self.labels("run"), {13: "good"})

    def test_forensics_hold_the_ruined_state_and_nothing_begins_with_it(self):
        recipe = self.small()
        self.train(recipe, "run")
        self.train(recipe, "run", *self.to(30), *RUIN, "--set", "watch.forensics=true", code=76)
        self.assertEqual([p.name for p in (self.folder / "run/forensics").glob("step-*")], ["step-00000013"])
        job = self.train(recipe, "new", "--init-from", self.folder / "run/forensics/step-00000013", code=2)
        self.assertIn("is bad", job.output())
        self.train(recipe, "run", *self.to(20))

    def test_from_step_goes_back_and_moves_later_steps_away(self):
        recipe = self.small(keep=9)
        self.grown(recipe, "run", 6, 9, 12)
        self.assertEqual(self.checkpoints("run"), [6, 9, 12])
        # run.lock alone tells who held it last
        state = lambda: sorted((p, p.stat().st_mtime_ns) for p in (self.folder / "run").rglob("*"))  # noqa: E731
        before = state()
        job = self.train(recipe, "run", "--from-step", "7", code=2)
        self.assertIn("has no complete step 7; there: 6, 9, 12", job.output())
        self.assertEqual(before, state())
        first = self.metrics("run")
        job = self.train(recipe, "run", "--from-step", "6")
        self.assertIn("back to step 6: 2 later steps moved to", job.output())
        self.assertEqual(self.events("run", "back_to")[0]["abandoned"], [9, 12])
        self.assertEqual(self.checkpoints("run"), [6, 12])
        self.assertEqual(sorted(self.metrics("run")), sorted(first))
        away = sorted(p.name for p in (self.folder / "run/abandoned").iterdir())
        self.assertEqual(away, ["step-00000009-1", "step-00000012-1"])
        self.cairn("resume", self.folder / "run", "--from-step", "6")
        away = sorted(p.name for p in (self.folder / "run/abandoned").iterdir())
        self.assertEqual(away, ["step-00000012-1", "step-00000012-2"])

    def test_memory_of_a_later_step_does_not_win_over_from_step(self):
        recipe = self.recipe(steps=100000, tp=1, pp=1, dp=1, zero=0, sp="false", save=5, keep=9)
        job = self.start(recipe, "run")
        self.until(lambda: len(self.checkpoints("run")) > 1, "two checkpoints", job)
        self.until_step("run", self.checkpoints("run")[-1] + 10, job)
        job.kill_group()
        named = self.checkpoints("run")[0]
        job = self.train(recipe, "run", "--from-step", named, *self.to(named + 2))
        # The recipe is another one, so what was in memory is saved first, and goes away with the others.
        self.assertEqual(self.events("run", "start")[-1]["step"], named)
        self.assertEqual(self.checkpoints("run"), [named, named + 2])
        job = self.start(recipe, "run", *harness.JUMP)
        # The lines of the first start, which went further, lie before those of this one.
        self.until(lambda: len(self.events("run", "start")) == 3 and
                   self.metrics_lines("run")[-1].get("step", 0) >= named + 33, "its steps", job)
        job.kill_group()
        job = self.start(recipe, "run", "--from-step", named)
        self.until(lambda: len(self.events("run", "start")) == 4, "the next start", job)
        self.assertEqual(self.events("run", "start")[-1]["step"], named)
        self.assertIn("in shared memory is given up, as --from-step says", job.output())
        job.kill_group()

    def test_missing_labels_are_made_again_and_damaged_ones_refuse_a_start(self):
        recipe = self.small(keep=9)
        self.grown(recipe, "run", 10, 20, 30)
        self.assertEqual(self.labels("run"), {10: "good", 20: "good", 30: "good"})
        file = self.folder / "run/checkpoints/labels.json"
        proof = ("--set", "watch.proof=4", "--set", "checkpoint.keep={T.last(1)}")
        file.unlink()
        self.train(recipe, "run", *self.to(42), *proof, "--accept", "checkpoint.keep")
        self.assertEqual(self.labels("run"), {42: "good"})
        self.train(recipe, "run", *self.to(50), *proof[:2])
        kept = file.read_text()
        file.write_text("damaged")
        job = self.train(recipe, "run", *self.to(60), *proof[:2], code=65)
        self.assertIn("labels.json: not a JSON object. It is left as it is", job.output())
        self.assertEqual(file.read_text(), "damaged")
        self.assertEqual(self.checkpoints("run"), [42, 50])
        file.write_text(kept)
        self.train(recipe, "run", *self.to(60), *proof[:2])
        self.assertEqual(self.labels("run"), {42: "good", 50: "good", 60: "good"})

    def test_a_persons_word_on_a_step(self):
        recipe = self.small(keep=9)
        self.grown(recipe, "run", 6, 9, 12)
        self.assertEqual(self.labels("run"), {6: "good", 9: "good", 12: "good"})
        run = self.folder / "run"
        self.cairn("ckpt", "label", run, 12, "fine", "--why", "x", code=2)
        self.cairn("ckpt", "label", run, 7, "bad", "--why", "x", code=2)
        self.cairn("ckpt", "label", run, 12, "bad", "--why", " ", code=2)
        self.cairn("ckpt", "label", run, 12, "bad", "--why", "one language only")
        self.assertIn(b"one language only", self.cairn("ckpt", "ls", run).stdout)
        job = self.train(recipe, "run", *self.to(16))
        self.assertIn("step 12 is passed over, it is bad: one language only", job.output())
        self.assertEqual(self.events("run", "start")[-1]["step"], 9)

    def test_prune_asks_before_the_last_good_one_goes(self):
        recipe = self.small(keep=9)
        self.grown(recipe, "run", 6, 9, 12)
        run = self.folder / "run"
        self.cairn("ckpt", "label", run, 12, "suspect", "--why", "loss")
        refused = self.cairn("ckpt", "prune", run, "--remove-step", 9, "--yes", code=2)
        self.assertIn(b"--even-good", refused.stderr)
        self.cairn("ckpt", "prune", run, "--keep", "last(1)", "--yes")
        self.assertEqual(self.checkpoints("run"), [9, 12])
        asked = self.cairn("ckpt", "prune", run, "--keep", "last(1)", "--even-good", "--yes")
        self.assertIn(b"step 9 is the last good checkpoint", asked.stderr)
        self.assertEqual(self.checkpoints("run"), [12])

    def test_copies_keep_the_good_one_and_its_label_goes_along(self):
        recipe = self.small(save=4, keep=9)
        place = self.folder / "second"
        copy = ("--set", f'checkpoint.copy_to={{T.place {{ "{place}", keep_last = 1 }}}}')
        self.train(recipe, "run", *copy)
        self.train(recipe, "run", *self.to(30), *RUIN, *copy, code=76)
        there = sorted(p.name for p in (place / "run").glob("step-*"))
        self.assertIn("step-00000012", there)
        noted = json.loads((place / "run/labels.json").read_text())
        self.assertEqual(noted["steps"]["12"]["label"], "good")
        self.cairn("ckpt", "fetch", place / "run", self.folder / "brought")
        self.assertEqual(self.labels("brought")[12], "good")
        self.cairn("ckpt", "push", self.checkpoint("run", 12), self.folder / "pushed")
        self.assertEqual(self.labels("pushed"), {12: "good"})


if __name__ == "__main__":
    harness.main()
