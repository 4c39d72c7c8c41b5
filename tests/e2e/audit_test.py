"""`cairn audit`: steps trained again from a run's own checkpoints have its bits, whatever happened to the run on the
way; a step or a state that is not what the recipe gives is found, and the interval that it lies in. `cairn data losses`
has the losses of tokens from such a step."""

import fcntl
import json
import shutil

import numpy

from harness import RunTest, main, write_tokens

KEEP = ("--set", "checkpoint.save={}", "--set", "checkpoint.keep={}")  # a step is saved where a start ends, and stays


class Audit(RunTest):
    def small(self, **changes):
        return self.recipe(steps=40, tp=1, pp=1, dp=2, sp="false", zero=1, **changes)

    def audit(self, run, steps, *options, code=0):
        done = self.cairn("audit", run, "--steps", steps, "--threads", "1", "--json", *options, code=code)
        return json.loads(done.stdout)

    def train_to(self, recipe, run, stops, *options):
        for stop in stops:
            self.train(recipe, run, *KEEP, "--stop-at", stop, *options)
            self.assertEqual((self.last_step(run), self.checkpoints(run)[-1]), (stop, stop))

    def train_with_a_past(self):
        """Killed, trained on with another recipe and in another layout, with a stage ahead."""
        write_tokens(self.folder / "tokens", 60000)
        recipe = self.small()
        recipe.write_text(recipe.read_text().replace(
            "  schedule =", '  stages = { T.stage { at = T.steps(25), batch = { samples = 16 } } },\n  schedule ='))
        more = ("--set", 'deterministic="layout"')
        self.train_to(recipe, "run", [10], *more, "--kill", "1@6")
        self.train_to(recipe, "run", [14], *more)
        planned = self.events("run", "stop_planned")[-1]
        self.assertEqual((planned["by"], planned["at"]), ("--stop-at", 14))
        self.train_to(recipe, "run", [20, 30, 40], *more, "--set", "optimizer.weight_decay=0.2", "--set", "mesh.dp=1",
                      "--set", "mesh.tp=2")
        return recipe

    def test_a_run_repeats(self):
        recipe = self.train_with_a_past()
        self.assertIn("nothing to do", self.train(recipe, "run", "--stop-at", "30", *KEEP).output())
        before = (self.folder / "run" / "metrics.jsonl").read_bytes(), self.checkpoints("run")
        got = self.audit("run", "1..40")
        self.assertTrue(got["equal"], got)
        self.assertEqual([(leg["from"], leg["to"], leg["segment"]) for leg in got["legs"]],
                         [(0, 10, 1), (10, 14, 1), (14, 20, 2), (20, 25, 2), (25, 30, 3), (30, 40, 3)])
        self.assertEqual([leg["steps"] for leg in got["legs"]], [10, 4, 6, 5, 5, 10])
        self.assertEqual([leg["checkpoint"]["differing"] for leg in got["legs"]], [0, 0, 0, 0, 0, 0])
        self.assertEqual([leg["mesh"][:8] for leg in got["legs"]], ["2 = tp 1"] * 2 + ["2 = tp 2"] * 4)
        self.assertEqual(before, ((self.folder / "run" / "metrics.jsonl").read_bytes(), self.checkpoints("run")))
        self.assertFalse((self.folder / "run" / "audit").exists())
        # In the middle of a stage, in one more layout.
        got = self.audit("run", "33..36", "--set", "mesh.tp=1", "--set", "mesh.pp=2")
        self.assertEqual([(leg["from"], leg["to"], leg["equal"]) for leg in got["legs"]], [(30, 36, True)])

    def test_what_is_not_the_recipes_is_found(self):
        write_tokens(self.folder / "tokens", 60000)
        recipe = self.small()
        self.train_to(recipe, "run", [10, 20, 30, 40])
        self.train_to(recipe, "other", [20], "--set", "optimizer.weight_decay=0.3")
        # A state that no step of this run made: valid, and wrong.
        shutil.rmtree(self.checkpoint("run", 20))
        shutil.copytree(self.checkpoint("other", 20), self.checkpoint("run", 20))
        # A step whose record differs in the last bit.
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        for k, line in enumerate(lines):
            fields = json.loads(line)
            if fields.get("step") == 7:
                fields["grad_norm"] *= 1 + 2**-52
                lines[k] = json.dumps(fields) + "\n"
        path.write_text("".join(lines))
        got = self.audit("run", "5..40", "--keep", code=1)
        self.assertFalse(got["equal"])
        legs = {leg["to"]: leg for leg in got["legs"]}
        self.assertEqual((legs[10]["first"]["step"], legs[10]["first"]["field"], legs[10]["differing"]), (7, "grad_norm", 1))
        self.assertEqual(legs[10]["checkpoint"]["differing"], 0)
        self.assertEqual((legs[20]["differing"], legs[20]["checkpoint"]["differing"] > 0), (0, True))
        self.assertEqual((legs[30]["first"]["step"], legs[30]["differing"]), (21, 10))
        self.assertTrue(legs[40]["equal"])
        self.assertTrue((self.folder / "run" / "audit" / "train.log").exists())
        told = self.cairn("audit", "run", "--steps", "7", "--threads", "1", code=1).stdout.decode()
        self.assertIn("1 of 7 steps differ, first step 7: grad_norm", told)
        self.assertIn("cairn ckpt label run N suspect", told)

    def test_the_losses_of_a_steps_tokens(self):
        """They are those of the step: their mean is the metric, each token is the data's, in any layout."""
        text = bytes(97 + k * k % 23 for k in range(60000))
        (self.folder / "text.txt").write_bytes(b"\n".join(text[at:at + 41] for at in range(0, len(text), 41)))
        self.cairn("data", "tokenize", "text.txt", "--out", "lines", "--documents", "line")
        self.train_to(self.small(prefix=self.folder / "lines"), "run", [10, 20], "--set", 'deterministic="layout"')
        rows = json.loads(self.cairn("data", "samples", "run", "--step", "13", "--ids", "--json").stdout)["samples"]
        seen = []
        for k, sets in enumerate(((), ("mesh.tp=2", "mesh.dp=1"), ("mesh.pp=2", "mesh.dp=1"))):
            options = [word for one in sets for word in ("--set", one)]
            done = self.cairn("data", "losses", "run", "--step", "13", "--out", f"out{k}", "--threads", "1", "--json",
                              "--top", "5", *options)
            self.assertEqual(done.stderr, b"")
            losses, targets, documents = (numpy.load(self.folder / f"out{k}" / f"{name}.npy")
                                          for name in ("losses", "targets", "documents"))
            self.assertEqual((losses.shape, targets.shape, documents.shape), ((8, 32),) * 3)
            self.assertAlmostEqual(losses.astype(float).mean(), self.metrics("run")[13]["loss"], delta=1e-12)
            for sample, row in enumerate(rows):
                self.assertEqual(targets[sample].tolist(), row["ids"][1:])
                self.assertEqual(documents[sample].tolist(), [part["document"] for part in row["documents"]
                                                              for _ in range(part["begin"], part["end"])])
            worst = json.loads(done.stdout)["worst"]
            order = numpy.argsort(-losses.reshape(-1), kind="stable")[:5]
            self.assertEqual([(one["sample"], one["token"]) for one in worst], [divmod(int(at), 32) for at in order])
            self.assertEqual([one["position"] for one in worst], [rows[one["sample"]]["position"] for one in worst])
            self.assertEqual(worst[0]["text"], chr(worst[0]["target"]))
            self.assertFalse((self.folder / f"out{k}" / "again").exists())
            seen.append(losses)
        for losses in seen[1:]:
            self.assertEqual(seen[0].tobytes(), losses.tobytes())
        # Each rank of a sequence has two chunks of it.
        self.train_to(self.small(prefix=self.folder / "lines"), "cut", [13], "--set", "mesh.dp=1", "--set", "mesh.cp=2")
        self.cairn("data", "losses", "cut", "--step", "13", "--out", "cut-out", "--threads", "1")
        targets, losses = (numpy.load(self.folder / "cut-out" / f"{name}.npy") for name in ("targets", "losses"))
        self.assertEqual(targets.tolist(), [row["ids"][1:] for row in rows])
        self.assertAlmostEqual(losses.astype(float).mean(), self.metrics("cut")[13]["loss"], delta=1e-12)
        self.assertIn("the last one of run is 20", self.cairn("data", "losses", "run", "--step", "21", "--out", "x",
                                                             code=2).stderr.decode())

    def test_an_audit_tells_no_tracker_and_repeats_a_rate_that_was_low_from_the_beginning(self):
        write_tokens(self.folder / "tokens", 60000)
        told = self.folder / "told.prom"
        self.train_to(self.small(), "run", [10], "--lower-lr", "0.5,over=6", "--set",
                      f'log.trackers={{ T.prometheus "{told}" }}')
        self.assertIn("cairn_", told.read_text())
        told.unlink()
        got = self.audit("run", "1..10")
        self.assertTrue(got["equal"], got)
        self.cairn("data", "losses", "run", "--step", "3", "--out", "out", "--threads", "1")
        self.assertFalse(told.exists())

    def test_refusals(self):
        write_tokens(self.folder / "tokens", 60000)
        self.train_to(self.small(), "run", [10, 40])
        error = self.cairn("audit", "run", "--steps", "11..20", "--set", "mesh.tp=2", "--set", "mesh.dp=1", code=2).stderr.decode()
        self.assertIn('deterministic = "run" only the same layout repeats the bits', error)
        for steps, text in (("30..50", "the last one of run is 40"), ("9..3", "expected a step or two"),
                            ("0..3", "expected a step or two")):
            self.assertIn(text, self.cairn("audit", "run", "--steps", steps, code=2).stderr.decode())
        self.assertIn("no run folder", self.cairn("audit", "nowhere", "--steps", "1", code=2).stderr.decode())
        # No folder goes that is not an audit's: not one of a person, nor the run, its checkpoints or what has the run.
        (self.folder / "mine" / "again").mkdir(parents=True)
        (self.folder / "mine" / "again" / "audit.lua").write_text("kept")
        self.checkpoint("run", 10).joinpath("audit.lock").write_text("")
        (self.folder / "run" / "audit.lock").write_text("")
        for scratch in ("mine", "mine/again", "run", "run/checkpoints/step-00000010", ".", "./"):
            error = self.cairn("audit", "run", "--steps", "1..3", "--scratch", scratch, code=2).stderr.decode()
            self.assertIn("its contents would be lost", error)
        error = self.cairn("data", "losses", "run", "--step", "3", "--out", "mine", code=2).stderr.decode()
        self.assertIn("its contents would be lost", error)
        self.assertEqual((self.folder / "mine" / "again" / "audit.lua").read_text(), "kept")
        self.assertEqual(self.checkpoints("run"), [10, 40])
        (self.folder / "held").mkdir()
        (self.folder / "held" / "audit.lock").write_text("")
        with open(self.folder / "held" / "audit.lock") as lock:  # of a folder that is an audit's
            fcntl.flock(lock, fcntl.LOCK_EX)
            error = self.cairn("audit", "run", "--steps", "3", "--scratch", "held", code=69).stderr.decode()
            self.assertIn("another audit is at work there", error)
        for sets in ("batch.samples=4", "optimizer.peak_lr=1", "data.sources={}", "checkpoint.copy_to={}", "nothing=1"):
            error = self.cairn("audit", "run", "--steps", "3", "--set", sets, code=2).stderr.decode()
            self.assertIn("the steps are trained as the run trained them", error)
        # Steps without a record are not called equal, and other data are no fault of a machine.
        path = self.folder / "run" / "metrics.jsonl"
        told = path.read_text()
        path.write_text("".join(line for line in told.splitlines(keepends=True) if '"step":7,' not in line))
        self.assertIn("has no line of step 7", self.cairn("audit", "run", "--steps", "5..9", code=2).stderr.decode())
        path.write_text(told)
        write_tokens(self.folder / "tokens", 60000, seed=8)
        self.assertIn("tokens", self.cairn("audit", "run", "--steps", "1..3", code=2).stderr.decode())
        self.assertFalse((self.folder / "run" / "audit" / "metrics.jsonl").exists())
        (self.folder / "run" / "lineage.jsonl").unlink()
        self.assertIn("no checkpoint before step 3", self.cairn("audit", "run", "--steps", "3", code=2).stderr.decode())


if __name__ == "__main__":
    main()
