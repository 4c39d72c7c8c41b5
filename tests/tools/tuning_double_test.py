"""Algorithms of products, chosen by timing and kept in the run folder, by whole programs on doubles of a device and of
cuBLASLt, which proposes three algorithms. The last two sum in another order than the first."""

import json
import pathlib
import shutil
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_runs import DoubleRuns  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
FIRST, LAST = dict(CAIRN_DOUBLE_FASTEST="0"), dict(CAIRN_DOUBLE_FASTEST="2")


class TuningDouble(DoubleRuns):
    program, gpus = PROGRAM, 2

    def recipe(self, steps=2, **layout):
        return super().recipe(f"tuned-{steps}-{len(layout)}", steps=steps, precision="fp32", **layout)

    def file(self, run):
        return self.folder / run / "tuning.json"

    def products(self, run):
        return self.choices(run, "product")

    def test_a_new_run_times_its_products_and_a_resume_takes_the_runs_file(self):
        said = self.train(self.recipe(), "long", **LAST)
        self.assertRegex(said, r"products on Double \(4 multiprocessors\), cuBLASLt 13\.1\.0: \d+ kinds timed\n")
        self.assertEqual({choice["algorithm"][-1] for choice in self.products("long")}, {"2"})
        self.assertEqual({choice["proposed"] for choice in self.products("long")}, {3})
        events = (self.folder / "long/events.jsonl").read_text()
        self.assertEqual(events.count('"event":"tuned"') + events.count('"event": "tuned"'), 1)
        kept = self.file("long").read_bytes()
        # Four steps in one go, or two and two where timing would choose otherwise by then: the same bits.
        said = self.train(self.recipe(steps=4), "long", "--accept", "optimizer.lr", **FIRST)
        self.assertNotIn("kinds timed", said)
        self.assertEqual([choice["algorithm"] for choice in self.products("long")],
                         [choice["algorithm"] for choice in json.loads(kept)["choices"] if choice["op"] == "product"])
        self.train(self.recipe(), "other", **FIRST)
        self.assertNotEqual(self.losses("other"), self.losses("long")[:2])
        self.train(self.recipe(), "shared", "--tuning", self.file("long"), **FIRST)
        self.assertEqual(self.losses("shared"), self.losses("long")[:2])
        # The ranks of a killed generation read the run's file again.
        self.train(self.recipe(), "killed", "--kill", "0@1", **LAST)
        self.assertEqual(self.losses("killed")[-2:], self.losses("long")[:2])

    def test_another_card_or_library_is_told_and_times_anew(self):
        self.train(self.recipe(), "moved", **FIRST)
        kinds = len(self.products("moved"))
        for what, where in ((dict(CAIRN_DOUBLE_CARD="Other"), r"Other \(4 multiprocessors\), cuBLASLt 13\.1\.0"),
                            (dict(CAIRN_DOUBLE_BLAS="130200"), r"Double \(4 multiprocessors\), cuBLASLt 13\.2\.0")):
            run = f"moved-{next(iter(what))}"
            shutil.copytree(self.folder / "moved", self.folder / run)
            said = self.train(self.recipe(steps=4), run, "--accept", "optimizer.lr", **LAST, **what)
            self.assertRegex(said, rf"products on {where}: {kinds} kinds timed; the choices of before are for Double "
                             r"\(4 multiprocessors\), cuBLASLt 13\.1\.0: bits differ from theirs from here on\n")
            self.assertEqual(len(self.products(run)), 2 * kinds)

    def test_ranks_of_two_stages_and_two_replicas_share_the_choices(self):
        for layout in (dict(pp=2), dict(dp=2)):
            run = f"two-{next(iter(layout))}"
            self.train(self.recipe(**layout), run, "--comm", "nccl", **LAST)
            self.assertEqual({choice["algorithm"][-1] for choice in self.products(run)}, {"2"})
            self.train(self.recipe(**layout), f"{run}-again", "--comm", "staged", "--tuning", self.file(run), **FIRST)
            self.assertEqual(self.losses(f"{run}-again"), self.losses(run))

    def test_off_is_kept_until_it_is_on_again_and_a_damaged_file_is_refused(self):
        self.train(self.recipe(), "lost", **LAST)
        self.file("lost").unlink()
        said = self.train(self.recipe(steps=4), "lost", "--accept", "optimizer.lr", **LAST)
        self.assertRegex(said, r"kinds timed; the run has no choices of before: bits may differ from here on\n")

        self.train(self.recipe(), "off", "--tuning", "off", **LAST)
        self.assertTrue(json.loads(self.file("off").read_text())["off"])
        said = self.train(self.recipe(steps=4), "off", "--accept", "optimizer.lr", **LAST)
        self.assertNotIn("kinds timed", said)
        self.assertEqual(self.products("off"), [])
        self.train(self.recipe(), "first", **FIRST)
        self.assertEqual(self.losses("off")[:2], self.losses("first"))
        said = self.train(self.recipe(steps=6), "off", "--accept", "optimizer.lr", "--tuning", "on", **LAST)
        self.assertIn("kinds timed", said)

        text = self.file("first").read_text()
        self.file("first").write_text(text[:200])
        said = self.train(self.recipe(steps=4), "first", "--accept", "optimizer.lr", code=65, **FIRST)
        self.assertRegex(said, r"first/tuning\.json: byte \d+: .*; bring back a copy of it, or do without it: all is timed anew")
        damaged = self.folder / "fleet.json"
        damaged.write_text(text.replace('"m":', '"m":1', 1))
        said = self.train(self.recipe(), "fleet", "--tuning", damaged, code=65, **FIRST)
        self.assertRegex(said, r"fleet\.json: .*they are not what was written; bring back a copy of it")
        said = self.train(self.recipe(), "none", "--tuning", self.folder / "missing.json", code=2)
        self.assertRegex(said, r"--tuning: .*missing\.json")
        said = self.cairn("train", self.recipe(), "--run", self.folder / "none", "--device", "cpu", "--tuning", "on", code=2)
        self.assertIn("--tuning: ranks on the CPU have no algorithms to choose", said)
        self.assertFalse((self.folder / "none").exists())


if __name__ == "__main__":
    unittest.main()
