"""Guards that act: a run goes back to a good checkpoint and on without the samples in trouble, or stops; the run is the
one whose recipe had left those samples out, and what it decides survives a kill between any two of its writes."""

import json
import random
import shutil

from harness import RunTest, main, write_pair, write_tokens

TOKENS, BATCH, CONTEXT = 60000, 8, 32
# A hold, then a rate that no small model bears.
JUMP = ("optimizer.lr=T.schedule {{ T.warmup {{ over = T.steps(4) }}, T.hold {{ over = T.steps(145) }}, "
        "T.linear {{ to = {to}, over = T.steps(1) }}, T.hold {{}} }}")
WATCH = ("--set", "watch.window=32", "--set", "watch.proof=8")
PROVED = 130


class Guard(RunTest):
    def small(self, steps=165, tp=1):
        path = self.recipe(steps=steps, tp=tp, pp=1, dp=1, zero=0, sp="false", save=10, keep=9)
        path.write_text(path.read_text().replace("T.cosine { to = 1e-3 }", "T.hold {}"))
        return path

    def train_on(self, recipe, run, *options, code=0):
        """To step 165, with a good checkpoint before the trouble however long saves are in coming."""
        if not (self.folder / run).exists():
            self.train(recipe, run, *WATCH, "--set", f"stop=T.steps({PROVED})")
        return self.train(recipe, run, *options, "--accept", "stop", "--accept", "optimizer.lr", code=code)

    def roll_backs(self, run):
        return self.events(run, "roll_back")

    def lineage(self, run):
        return [json.loads(line) for line in (self.folder / run / "lineage.jsonl").read_text().splitlines()]

    def spoil(self, recipe, steps):
        """Noise in place of what these steps will train on; the order of samples does not depend on it."""
        rows = json.loads(self.cairn("data", "samples", recipe, "--step", steps, "--json").stdout)["samples"]
        tokens = bytearray((self.folder / "tokens.bin").read_bytes())
        draw = random.Random(9)
        for row in rows:
            (part,) = row["documents"]
            for at in range(part["begin"], part["end"]):
                tokens[2 * at:2 * at + 2] = bytes([draw.randrange(256), 0])
        (self.folder / "tokens.bin").write_bytes(tokens)
        return {row["position"] for row in rows}

    def test_samples_in_trouble_are_left_out(self):
        write_tokens(self.folder / "tokens", TOKENS)
        recipe = self.small()
        spoilt = self.spoil(recipe, "150..153")
        stop = ("--set", 'watch.on_divergence={"stop"}')
        text = self.train_on(recipe, "stopped", *WATCH, *stop, code=76).output()
        self.assertIn("stopped by watch.on_divergence: the run diverges since step 150", text)
        self.assertIn("Newest good: step", text)

        guards = (*WATCH, "--set", 'watch.on_divergence={"roll_back","stop"}')
        job = self.train_on(recipe, "run", *guards, "--set", "watch.roll_back.lead=4")
        (back,) = self.roll_backs("run")
        self.assertEqual((back["onset"], back["number"]), (150, 1))
        self.assertIn(back["to_step"], range(PROVED, 150))
        first, last = map(int, back["skip"].split(".."))
        self.assertEqual((first, last), (BATCH * max(back["to_step"], 145), BATCH * back["step"] - 1))
        self.assertTrue(spoilt <= set(range(first, last + 1)), back)
        self.assertIn("rolling back: the run diverges since step 150", job.output())
        self.assertEqual(self.last_step("run"), 165)
        self.assertFalse((self.folder / "run" / "rolling_back.json").exists())
        entry = self.lineage("run")[-1]
        self.assertEqual((entry["cause"], entry["at"]["step"], entry["roll_back"]["skip"]), ("roll_back", back["to_step"], back["skip"]))
        trained = json.loads(self.cairn("data", "samples", "run", "--step", "1..165", "--json").stdout)["samples"]
        self.assertTrue(all(one["trained"] for one in trained))
        self.assertEqual([one["position"] for one in trained],
                         [*range(first), *range(last + 1, last + 1 + BATCH * 165 - first)])

        # The law: one recipe, without guards, does the whole again bit for bit.
        replay = self.folder / "replay.lua"
        replay.write_bytes(self.cairn("lineage", "run", "--recipe").stdout)
        self.assertIn(back["skip"], replay.read_text())
        self.train(replay, "again", "--set", "watch.on_divergence={}")
        self.assertEqual(self.roll_backs("again"), [])
        for step in range(1, 166):
            for key in ("loss", "grad_norm", "lr", "samples", "tokens"):
                self.assertEqual(self.metrics("run")[step][key], self.metrics("again")[step][key], (step, key))
        self.cairn("ckpt", "diff", "--tensors-only", self.checkpoint("run", 165), self.checkpoint("again", 165))

        # The samples stay out when the user's own recipe, which does not name them, trains on; in another layout.
        self.train_on(self.small(steps=170, tp=2), "run", *guards)
        recipe = self.small()
        more = json.loads(self.cairn("data", "samples", "run", "--step", "166..170", "--json").stdout)["samples"]
        end = trained[-1]["position"] + 1
        self.assertEqual([one["position"] for one in more], list(range(end, end + 5 * BATCH)))

        # A decision that a killed start has left is carried out by the next one: with its line of lineage or without.
        # Or it is stopped again before it has passed the samples.
        for written in ("not", "once", "part"):
            with self.subTest(written=written):
                run = f"killed-{written}"
                shutil.copytree(self.folder / "stopped", self.folder / run, symlinks=True)
                decision = {key: back[key] for key in ("to_step", "onset", "step", "number", "skip", "why")}
                pending = self.folder / run / "rolling_back.json"
                pending.write_text(json.dumps(decision))
                self.train(recipe, run, *guards, *(("--set", "stop=T.steps(142)") if written == "part" else ()))
                self.assertFalse(pending.exists())
                if written == "once":
                    pending.write_text(json.dumps(decision))
                if written != "not":
                    self.train_on(recipe, run, *guards)
                    self.assertFalse(pending.exists())
                self.assertEqual([one["cause"] for one in self.lineage(run)].count("roll_back"), 1)
                self.assertEqual(self.roll_backs(run), [])
                for step in range(1, 166):
                    self.assertEqual(self.metrics(run)[step]["loss"], self.metrics("run")[step]["loss"], step)
        (self.folder / "stopped" / "rolling_back.json").write_text("{}")
        refused = self.train(recipe, "stopped", *guards, code=65).output()
        self.assertIn("rolling_back.json", refused)
        self.assertIn("--from-step", refused)

    def assert_replays(self, run, last, *options):
        """The recipe that lineage prints does the run again bit for bit, by itself. Returns its text."""
        replay = self.folder / f"{run}-replay.lua"
        replay.write_bytes(self.cairn("lineage", run, "--recipe").stdout)
        self.train(replay, f"{run}-again", *options)
        done, again = self.metrics(run), self.metrics(f"{run}-again")
        for step in range(1, last + 1):
            for key in ("loss", "grad_norm", "lr", "samples", "tokens"):
                self.assertEqual(done[step][key], again[step][key], (step, key))
        self.cairn("ckpt", "diff", "--tensors-only", "--exit-code", self.checkpoint(run, last),
                   self.checkpoint(f"{run}-again", last))
        return replay.read_text()

    def test_an_outlier_s_update_is_left_out(self):
        write_tokens(self.folder / "tokens", TOKENS)
        recipe = self.small(steps=155)
        self.spoil(recipe, "140")
        skip = ("--set", "watch.proof=8", "--set", 'watch.on_outlier={"skip"}')
        job = self.train(recipe, "run", *skip, "--kill", "0@142")
        left_out = [one["step"] for one in self.events("run", "skipped")]  # so small a model has outliers of its own
        self.assertIn(140, left_out)
        self.assertLessEqual(len(left_out), 3)
        self.assertIn("step 140: ", job.output())
        self.assertIn("its update is left out", job.output())
        rows = self.metrics("run")
        for step, row in rows.items():
            self.assertEqual(row.get("skipped", 0), sum(one <= step for one in left_out), step)
        trained = json.loads(self.cairn("data", "samples", "run", "--step", "139..141", "--json").stdout)["samples"]
        self.assertEqual({one["step"]: one["trained"] for one in trained}, {139: True, 140: False, 141: True})
        self.assertIn(f"skip_steps = {{ {', '.join(map(str, left_out))} }}", self.assert_replays("run", 155))

        # By hand: what the run has passed stays as it was.
        self.train(recipe, "hand", "--set", "stop=T.steps(10)")
        self.train(recipe, "hand", "--set", "stop=T.steps(20)", "--skip", "steps=12..13", "--kill", "0@15")
        self.assertEqual([one["step"] for one in self.events("hand", "skipped")], [12, 13])
        self.train(recipe, "hand", "--set", "stop=T.steps(25)", "--skip", "steps=19..22")
        self.assertIn("skip_steps = { 12, 13, 21, 22 }", self.assert_replays("hand", 25))
        # A stage that has skip_steps of its own skips these too.
        staged = self.small(steps=20)
        staged.write_text(staged.read_text().replace(
            "  schedule =", "  stages = { T.stage { at = T.steps(10), watch = { skip_steps = { 12 } } } },\n  schedule ="))
        self.train(staged, "staged", "--skip", "steps=14..14")
        self.assertEqual([one["step"] for one in self.events("staged", "skipped")], [12, 14])
        recipe = self.small(steps=155)
        for words in ("steps=0..2", "steps=5..4", "14", "steps=x", "steps=1..100000"):
            self.assertIn(f"--skip {words}", self.train(recipe, "hand", "--skip", words, code=2).output())

    def test_the_rate_is_lowered(self):
        write_tokens(self.folder / "tokens", TOKENS)
        recipe = self.small(steps=165)
        lower = (*WATCH, "--set", 'watch.on_divergence={"lower_lr","stop"}', "--set",
                 "watch.lower_lr=T.lower_lr { by = 0.25, over = 4, back = 3, at_most = 1 }")
        self.spoil(recipe, "150..153")
        job = self.train_on(recipe, "run", *lower)
        (event,) = self.events("run", "lr_lowered")
        self.assertEqual((event["onset"], event["by"]), (150, 0.25))
        self.assertIn("lowering the rate: the run diverges since step 150", job.output())
        (entry,) = [one for one in self.lineage("run") if one["cause"] == "lower_lr"]
        at = entry["at"]["step"]
        self.assertIn(at, range(event["step"], 160))
        factors = [1, 0.25, 0.25, 0.25, 0.25, 0.5, 0.75, 1]
        rows = self.metrics("run")
        for k, factor in enumerate(factors[:166 - at]):
            self.assertAlmostEqual(rows[at + k]["lr"], 1e-2 * factor, 12, (at, k))
        self.assertFalse((self.folder / "run" / "lowering_lr.json").exists())
        self.assertIn("lowered_rates", self.assert_replays("run", 165))

        # A decision that a killed start has left is carried out by the next one, once.
        self.train(recipe, "killed", *WATCH, "--set", "stop=T.steps(20)")
        decision = {key: event[key] for key in ("by", "over", "back", "onset", "step", "why")}
        pending = self.folder / "killed" / "lowering_lr.json"
        for stop in (23, 30):
            pending.write_text(json.dumps(decision))
            self.train(recipe, "killed", *WATCH, "--set", f"stop=T.steps({stop})")
            self.assertFalse(pending.exists())
        rows = self.metrics("killed")
        for k, factor in enumerate(factors):
            self.assertAlmostEqual(rows[20 + k]["lr"], 1e-2 * factor, 12, k)
        self.assertEqual([one["cause"] for one in self.lineage("killed")].count("lower_lr"), 1)
        # One that is left beside a run that has ended has nothing to do.
        pending.write_text(json.dumps({**decision, "onset": 29, "step": 30}))
        self.assertIn("nothing to do", self.train(recipe, "killed", *WATCH, "--set", "stop=T.steps(30)").output())
        self.assertFalse(pending.exists())
        # A person's beside it is not dropped in silence.
        pending.write_text(json.dumps({**decision, "onset": 29, "step": 30}))
        text = self.train(recipe, "killed", *WATCH, "--set", "stop=T.steps(33)", "--lower-lr", "0.5,over=6", code=2).output()
        self.assertIn("--lower-lr 0.5,over=6,back=0: ", text)
        self.assertIn("lowering_lr.json says that a guard lowers the rate", text)
        self.assertEqual([one["cause"] for one in self.lineage("killed")].count("lower_lr"), 1)
        pending.write_text("{}")
        self.assertIn("lowering_lr.json", self.train(recipe, "killed", code=65).output())
        pending.unlink()

        # By hand: the same command again lowers nothing while the rate is low.
        hand = ("--lower-lr", "0.5,over=6,back=2")
        for stop in (33, 36):
            self.train(recipe, "killed", *WATCH, "--set", f"stop=T.steps({stop})", *hand)
        rows = self.metrics("killed")
        self.assertEqual([round(rows[step]["lr"] * 100, 9) for step in range(30, 37)], [1] + [0.5] * 6)
        self.assert_replays("killed", 36)
        for words in ("2,over=5", "0.5", "0.5,over=-1", "0.5,under=3", "x,over=1"):
            self.assertIn(f"--lower-lr {words}", self.train(recipe, "killed", "--lower-lr", words, code=2).output())

    def test_outliers_from_before_the_rate_was_lowered_are_no_new_divergence(self):
        write_tokens(self.folder / "tokens", TOKENS)
        self.train_on(self.small(steps=185), "run", *WATCH, "--set", JUMP.format(to=3), "--set",
                      'watch.on_divergence={"lower_lr","stop"}', code=76)
        first, second = [one["at"]["step"] for one in self.lineage("run") if one["cause"] == "lower_lr"]
        onsets = [one["onset"] for one in self.events("run", "divergence")]
        self.assertEqual(len(onsets), 3)
        self.assertLess(first, onsets[1])
        self.assertLess(second, onsets[2])
        self.assertGreaterEqual(second, first + 4)

    def test_a_rate_that_the_run_went_back_behind_can_be_lowered_again(self):
        write_tokens(self.folder / "tokens", TOKENS)
        recipe = self.small(steps=30)
        low = ("--lower-lr", "0.5,over=6")
        self.train(recipe, "run", "--set", "stop=T.steps(20)")
        self.train(recipe, "run", "--set", "stop=T.steps(24)", *low)
        self.train(recipe, "run", "--set", "stop=T.steps(20)", "--from-step", "10", "--accept", "stop")
        self.train(recipe, "run", "--set", "stop=T.steps(24)", *low)
        rows = self.metrics("run")
        self.assertEqual([round(rows[step]["lr"] * 100, 9) for step in range(20, 25)], [1] + [0.5] * 4)
        self.assert_replays("run", 24)

    def test_weights_that_are_ruined_are_not_good(self):
        """Where the guard leaves out all that follows."""
        write_tokens(self.folder / "tokens", TOKENS)
        jump = JUMP.format(to=3).replace("145", "8")
        self.train(self.small(steps=80), "run", *WATCH, "--set", jump, "--set", 'watch.on_outlier={"skip"}',
                   "--set", "watch.skip.at_most=64")
        self.assertGreater(self.metrics("run")[60]["loss"], 15)
        labels = json.loads((self.folder / "run" / "checkpoints" / "labels.json").read_text())["steps"]
        self.assertEqual({step: entry["label"] for step, entry in labels.items() if int(step) >= 20 and entry["label"] == "good"}, {})

    def test_a_guard_s_skips_are_not_forgotten_with_the_metrics(self):
        self.train(self.small(steps=20), "run", "--skip", "steps=12..13")
        self.assertIn(b"skip_steps", self.cairn("lineage", "run", "--recipe").stdout)
        shutil.copytree(self.folder / "run", self.folder / "bare")
        (self.folder / "bare" / "metrics.jsonl").unlink()
        self.assertIn(b"12, 13", self.cairn("lineage", "bare", "--recipe").stdout)  # the recipe names them
        self.train(self.small(steps=30), "run", "--set", "stop=T.steps(30)")
        (self.folder / "run" / "metrics.jsonl").unlink()
        text = self.cairn("lineage", "run", "--recipe", code=2).stderr.decode()
        self.assertIn("metrics.jsonl: it has no steps, and 2 updates of the run were left out that no recipe names", text)

    def test_a_lowered_rate_lasts_at_least_a_step(self):
        recipe = self.small()
        for text in ("watch.lower_lr=T.lower_lr { over = 0, back = 0 }",
                     "watch.lowered_rates={ T.lowered { 5, over = 0, back = 0 } }"):
            self.assertIn("it lasts no step", self.cairn("check", recipe, "--set", text, code=2).stderr.decode())
        text = self.cairn("check", recipe, "--set", "watch.lower_lr=T.lower_lr { by = 0 }", code=2).stderr.decode()
        self.assertIn("a number > 0 and < 1", text)

    def test_audits_change_no_bit(self):
        recipe = self.small(steps=10, tp=2)
        self.train(recipe, "plain")
        self.train(recipe, "run", "--set", "watch.audit=T.every { steps = 4 }", "--set", 'watch.on_sdc={"stop"}')
        rows = self.metrics("run")
        again = {step: row["computed_again"] for step, row in rows.items() if "computed_again" in row}
        self.assertEqual(again, {step: {"found": "same", "audit": True, "since": step - 4} for step in (4, 8)})
        self.assertEqual(self.events("run", "sdc"), [])
        self.cairn("ckpt", "diff", "--tensors-only", "--exit-code", self.checkpoint("run", 10), self.checkpoint("plain", 10))
        text = self.cairn("check", recipe, "--set", 'watch.on_sdc={"stop"}', code=2).stderr.decode()
        self.assertIn("watch.audit = T.every", text)

    def test_tries_are_bounded(self):
        """A run that diverges whatever is left out."""
        write_tokens(self.folder / "tokens", TOKENS)
        text = self.train_on(self.small(), "rate", *WATCH, "--set", JUMP.format(to=3), "--set",
                          'watch.on_divergence={"roll_back","stop"}', "--set", "watch.roll_back.at_most=2", code=76).output()
        backs = self.roll_backs("rate")
        self.assertEqual([one["number"] for one in backs], [1, 2])
        self.assertEqual(len(self.events("rate", "divergence")), 3)
        self.assertGreaterEqual(backs[0]["to_step"], backs[1]["to_step"])
        self.assertGreater(len(range(*map(int, backs[1]["skip"].split("..")))), len(range(*map(int, backs[0]["skip"].split("..")))))
        self.assertIn("not rolled back: rolled back 2 times within 20000 steps", text)
        text = self.train_on(self.small(), "ruined", *WATCH, "--set", JUMP.format(to=1e30), "--set",
                          'watch.on_not_finite={"roll_back"}', "--set", "watch.roll_back.at_most=1", code=76).output()
        (back,) = self.roll_backs("ruined")
        self.assertIn("not finite", back["why"])
        self.assertEqual(self.events("ruined", "no_way_back")[0]["step"], back["step"])
        self.assertIn("Newest good", text)

    def test_what_cannot_act_is_refused(self):
        write_tokens(self.folder / "tokens", TOKENS)
        recipe = self.small()
        back = 'watch.on_divergence={"roll_back"}'
        text = self.cairn("check", recipe, "--set", back, "--set", "checkpoint.save={}", code=2).stderr.decode()
        self.assertIn("roll_back needs a way back", text)
        for field, action in (("on_drop", "skip"), ("on_outlier", "roll_back"), ("on_not_finite", "lower_lr")):
            text = self.cairn("check", recipe, "--set", f'watch.{field}={{"{action}"}}', code=2).stderr.decode()
            self.assertIn(f"watch.{field}: {action} is no answer to it", text)
        self.assertIn("watch.on_drop", self.cairn("check", recipe, "--set", 'watch.on_drop={"jump"}', code=2).stderr.decode())


if __name__ == "__main__":
    main()
