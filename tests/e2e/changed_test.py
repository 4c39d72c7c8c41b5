"""A recipe that changes under a run: what each field's class promises, whatever lies between two starts."""

import json
import os
import pathlib
import random
import re
import shutil
import subprocess

from change_run import ChangeTest, contents
from harness import main, write_tokens


class Changed(ChangeTest):
    # --- the position decides

    def test_a_changed_batch_counts_from_the_position(self):
        for name, before, after, steps in (("doubled", 8, 16, 15), ("halved", 8, 4, 30)):
            with self.subTest(name):
                self.half(name)
                text = self.run_it(name, "--param", f"samples={after}")
                rows = self.metrics(name)
                self.assertEqual(max(rows), steps)
                self.assertEqual(rows[steps]["samples"], 160)
                self.assertIn(f"batch.samples {before} -> {after}", text)
                event = [e for e in self.events(name, "recipe_changed") if e["field"] == "batch.samples"][0]
                self.assertEqual((event["old"], event["new"]), (str(before), str(after)))
                # The rate is read on samples: the same line, whatever the batch.
                for row in rows.values():
                    done = row["samples"]
                    wanted = 1e-3 * done / 32 if done <= 32 else 1e-3 + (1e-4 - 1e-3) * (done - 32) / 128
                    self.assertAlmostEqual(row["lr"], wanted, 9)

    def test_a_change_before_and_behind_a_phase(self):
        flat = "optimizer.lr=T.schedule { T.warmup { over = T.samples(16) } }"
        phase = "batch.phases={ T.phase { T.samples(48), samples = 16 } }"
        self.run_it("before", "--set", "stop=T.samples(32)", "--set", phase, "--set", flat)
        self.run_it("before", "--param", "samples=4", "--set", phase, "--set", flat)  # 8 x 4, then 4 x 4, then 16 from 48 on
        sizes = self.step_sizes("before")
        self.assertEqual(sizes, [8] * 4 + [4] * 4 + [16] * 7)
        self.run_it("behind", "--set", "stop=T.samples(80)", "--set", phase, "--set", flat)
        text = self.run_it("behind", "--set", flat, "--set", "batch.phases={ T.phase { T.samples(48), samples = 20 } }")
        self.assertEqual(self.step_sizes("behind"), [8] * 6 + [16] * 2 + [20] * 4)
        self.assertIn("what of it lies before counts as begun here", text)

    def step_sizes(self, run):
        rows = self.metrics(run)
        samples = [0] + [rows[step]["samples"] for step in sorted(rows)]
        return [b - a for a, b in zip(samples, samples[1:])]

    # --- the table of fields

    def test_each_row_of_the_table_does_what_it_says(self):
        write_tokens(self.folder / "other", 6000, seed=8)
        (self.folder / "moved").mkdir()
        for end in ("bin", "idx"):
            shutil.copy(self.folder / f"tokens.{end}", self.folder / "moved")
        for name in ("first", "second"):
            (self.folder / f"{name}.model").write_text(name)
        shutil.copy(self.folder / "first.model", self.folder / "moved")
        disk = self.folder / "disk"
        disk.mkdir()
        layout = "bit for bit with deterministic"
        blend = "data=T.blend { sources = { T.megatron { prefix = \"tokens\" } }, seed = %d }"
        rows = [
            # of which run, its name, changed, class, what is said
            # Exact: all of one run at once are the run that nothing was changed of.
            ("made", "mesh", ["mesh.tp=2", "mesh.pp=2", "schedule=gpipe"], "exact", layout),
            ("made", "recompute", ["recompute.mode=full"], "exact", layout),
            ("made", "zero", ["optimizer.zero=3", "optimizer.keep_after_forward=true", "optimizer.bucket=4096",
                              "optimizer.overlap=false"], "exact", layout),
            ("made", "uneven", ["batch.uneven=true"], "exact", layout),
            ("made", "offload", [f"optimizer.offload={disk}"], "exact", "changes nothing that is trained"),
            ("made", "save", ["checkpoint.incremental=true"], "exact", "changes nothing that is trained"),
            ("made", "keep", ["checkpoint.keep={ T.last(7) }"], "exact", "retention by the new rules"),
            ("made", "log", ["log.at=T.every { steps = 5 }"], "exact", "changes nothing that is trained"),
            ("made", "hooks", ['hooks={ T.on { "ended", run = { "true" } } }'], "exact", "changes nothing that is trained"),
            ("made", "eval", ["eval.steps=3"], "exact", "changes nothing that is trained"),
            ("made", "restart", ["restart.max_restarts=5"], "exact", "changes nothing that is trained"),
            ("made", "watch", ["watch.proof=5"], "exact", "verdicts from now on"),
            ("made", "std", ["model.init_std=0.01", "model.init=plain"], "exact", "has no effect: the run has weights"),
            ("made", "begin", ["init=T.init_from { path = \"made\" }"], "exact", "has no effect: the run has weights"),
            ("made", "path", ["data=T.megatron { prefix = \"moved/tokens\" }"], "exact", "which tokens a source holds"),
            ("worded", "elsewhere", ["tokenizer=T.sentencepiece \"moved/first.model\""], "exact", "the same file"),

            ("made", "stop", ["stop=T.samples(176)"], "rule", "stop T.samples(160) -> T.samples(176)"),
            ("made", "stages", ["stages={ T.stage { at = T.steps(15), optimizer = { clip = 1 } } }"], "rule", "begin as they say"),
            ("made", "samples", ["batch.samples=4"], "rule", "from this position on, which is sample 80"),
            ("made", "ramp", ["batch.ramp=T.ramp { from = 4, by = 4, over = T.samples(16) }"], "rule", "begun here"),
            ("made", "micro", ["batch.micro=1"], "rule", "bits differ from now on"),
            ("made", "skip", ["batch.skip={\"90..97\"}"], "rule", "left out from this position on, which is sample 80"),
            ("made", "outliers", ['watch.on_outlier={"recompute","skip"}', "watch.skip.at_most=1", "watch.recompute.at_most=1"],
             "rule", "watch.on_outlier"),
            ("made", "skipped", ["watch.skip_steps={ 12 }"], "rule", "steps that the run has passed stay as they were"),
            ("made", "lowered", ["watch.lowered_rates={ T.lowered { 10, by = 0.5 } }"], "rule", "watch.lowered_rates"),
            ("made", "peak", ["optimizer.peak_lr=1.5e-3"], "rule", "optimizer.peak_lr 0.001 -> 0.0015"),
            ("made", "curve", ["optimizer.lr=T.schedule { T.warmup { over = T.samples(32) }, T.cosine { to = 1e-4 } }"], "rule",
             "the schedule is read at this position"),
            ("made", "decay", ["optimizer.weight_decay=0.1", "optimizer.groups={ T.group { \"embed.*\", lr = 0.5 } }"], "rule",
             "optimizer.weight_decay"),
            ("made", "betas", ["optimizer.beta1=0.8", "optimizer.beta2=0.99", "optimizer.eps=1e-7"], "rule", "optimizer.beta2"),
            ("made", "clip", ["optimizer.clip=1"], "rule", "optimizer.clip"),
            ("made", "shrink", ["optimizer.z_loss=1e-4", "optimizer.embedding_gradient=0.1", "optimizer.qk_clip=50"], "rule",
             "optimizer.z_loss"),
            ("made", "ema", ["optimizer.ema=0.9"], "rule", "begins at the present weights"),
            ("averaged", "off", ["optimizer.ema-"], "optimizer.ema", "the average is dropped"),
            ("made", "lamb", ["optimizer.kind=\"lamb\""], "rule", "the moments stay"),
            ("made", "factored", ["optimizer.kind=\"adafactor\"", "deterministic=run"], "optimizer.kind", "they begin at zero"),
            ("made", "device", ["device=cpu"], "rule", "another device rounds otherwise"),
            ("made", "bf16", ["precision=bf16"], "rule", "precision"),
            ("made", "fp16", ["precision=fp16"], "rule", "loss_scale.initial"),
            ("scaled", "window", ["loss_scale.window=500", "loss_scale.hysteresis=1"], "rule", "loss_scale.window 1000 -> 500"),
            ("made", "dropout", ["model.embedding_dropout=0.1", "model.attention_dropout=0.1", "model.residual_dropout=0.1"], "rule",
             "model.residual_dropout 0 -> 0.1"),
            ("made", "bits", ["deterministic=run"], "rule", "in other bits"),
            ("made", "sums", ["sums=nccl", "deterministic=run"], "rule", "sums \"ranked\" -> \"nccl\""),
            ("made", "masked", ["data=T.blend { sources = { T.megatron { prefix = \"tokens\" } }, mask_repeats = T.repeats {} }"], "rule",
             "data.mask_repeats.count 0 -> 32"),
            ("made", "objective", ["objective.document_end=32"], "rule", "objective.document_end -1 -> 32"),
            ("routed", "router", ["model.moe.aux_loss=0.02", "model.moe.aux_scope=model", "model.moe.z_loss=1e-3",
                                  "model.moe.bias_rate=2e-3"], "rule",
             "model.moe.aux_loss"),
            ("ahead", "guesses", ["model.mtp.loss=0.5"], "rule", "model.mtp.loss"),

            ("made", "rate", ["optimizer.peak_lr=1e-2"], "optimizer.lr", "more than doubles between two steps"),
            ("made", "seed", ["seed=8"], "seed", "may come again"),
            ("blended", "order", [blend % 8], "data.seed", "may come again"),
            ("made", "data", ["data=T.megatron { prefix = \"other\" }"], "data.other", "no source that the run was trained on"),
            ("made", "content", ["data=T.megatron { prefix = \"other\", name = \"tokens\" }"], "data.tokens",
             "its tokens are not those that it began with"),
            ("made", "split", ["data=T.megatron { prefix = \"tokens\", split = { 90, 10 } }"], "data.tokens",
             "its tokens are not those that it began with"),
            ("made", "heads", ["model.heads=8", "model.kv_heads=8"], "model.heads", "the shapes fit, the meaning does not"),
            ("made", "theta", ["model.rope_theta=5e5"], "model.rope_theta", "T.stage"),
            ("made", "pairs", ["model.rope.pairs=interleaved"], "model.rope.pairs", "other angles"),
            ("made", "eps", ["model.norm_eps=1e-6"], "model.norm_eps", "the meaning does not"),
            ("made", "gate", ["model.activation=geglu"], "model.activation", "the meaning does not"),
            ("made", "sight", ["model.sliding_window=8"], "model.sliding_window", "the meaning does not"),
            ("made", "scale", ["model.logit_scale=0.5"], "model.logit_scale", "the meaning does not"),
            ("routed", "choice", ["model.moe.scale=2"], "model.moe.scale", "the meaning does not"),
            ("routed", "reads", ["model.moe.scale_input=true"], "model.moe.scale_input", "the meaning does not"),
            ("made", "chunk", ["model.attention_chunk=8"], "model.attention_chunk", "the meaning does not"),
            ("made", "warm", ["model.temperature_scale=0.1", "model.temperature_form=ministral3"], "model.temperature_form",
             "the meaning does not"),
            ("made", "context", ["model.context=64"], "model.context", "T.phase"),
            ("made", "name", ["name=second"], "name", "a folder of its own"),
            ("made", "words", ["tokenizer-"], "tokenizer", "token ids may mean other text"),
            ("worded", "text", ["tokenizer=T.sentencepiece \"second.model\""], "tokenizer", "token ids may mean other text"),

            ("made", "width", ["model.width=64"], None, "T.init_from with `except`"),
            ("made", "layers", ["model.layers=3"], None, "layers.2"),
            ("made", "vocab", ["model.vocab=300"], None, "embed.tokens"),
            ("made", "tied", ["model.tied_embeddings=true"], None, "head.weight"),
            ("made", "experts", ["model.moe.experts=2"], None, "other tensors"),
            ("made", "further", ["model.mtp.depth=1"], None, "other tensors"),
            ("made", "groups", ["model.kv_heads=2"], None, "other tensors"),
            ("made", "sinks", ["model.attention_sinks=true"], None, "attn.sinks"),
            ("learned", "places", ["model.context=64"], None, "embed.positions"),
        ]
        bases = {
            "made": [], "averaged": ["optimizer.ema=0.9"], "scaled": ["precision=fp16"],
            "routed": ["model.moe.experts=4", "model.moe.bias_rate=1e-3"], "ahead": ["model.mtp.depth=1"],
            "learned": ["model.positions=learned"],
            "blended": [blend % 7],
            "worded": ["tokenizer=T.sentencepiece \"first.model\""],
        }
        words_of = lambda values: [word for value in values for word in ("--set", value)]  # noqa: E731
        for base, values in bases.items():
            self.half(base, *words_of(values))
        exercised = set()
        for base, name, values, accept, says in rows:
            with self.subTest(name):
                words = words_of(bases[base] + values)
                nproc = 4 if name in ("mesh", "zero") else 1
                before = contents(self.folder / base)
                judged = self.judged(base, *words, nproc=nproc)
                self.assertEqual(contents(self.folder / base), before)
                exercised |= set(judged)
                if accept == "exact":
                    self.assertEqual({change for change, _ in judged.values()}, {"exact"}, judged)
                    self.assertIn(says, " ".join(rule for _, rule in judged.values()))
                    continue
                if accept == "rule":
                    run = self.copy_of(base, name)
                    text = self.run_it(run, *words)
                    self.assertEqual(self.metrics(run)[max(self.metrics(run))]["samples"], 176 if name == "stop" else 160)
                    self.assertIn(says, text)
                    told = {event["field"] for event in self.events(run, "recipe_changed") if event["step"] == 10}
                    self.assertEqual(told, {field for field, (change, _) in judged.items() if change != "exact"})
                    continue
                # Refused: with the field's name and what to do, and not a byte is touched.
                text = self.run_it(base, *words, code=2)
                self.assertIn(says, text)
                self.assertEqual(contents(self.folder / base), before)
                if accept is None:
                    self.assertIn("refused", {change for change, _ in judged.values()})
                    self.assertNotIn("--accept", text)
                    continue
                fields = re.findall(r"--accept (\S+)", text)
                self.assertIn(accept, fields)
                run = self.copy_of(base, name)
                self.run_it(run, *words, *[word for field in fields for word in ("--accept", field)])
                self.assertEqual(self.lineage(run)[-1]["accepted"], fields)
                self.run_it(run, *words)  # nothing to do: it is the recipe that trained the run
        with self.subTest("a tokenizer elsewhere is no reason not to replay"):
            run = self.copy_of("worded", "moved-words")
            self.run_it(run, "--set", "tokenizer=T.sentencepiece \"moved/first.model\"")
            self.assertIn(b"moved/first.model", self.cairn("lineage", run, "--recipe").stdout)
        with self.subTest("no row without a test"):
            used = {self.row_of(field) for field in exercised}
            self.assertEqual([row for row in self.table() if row not in used], [])
        with self.subTest("exact"):
            at_once = [value for base, _, values, change, _ in rows if (base, change) == ("made", "exact") for value in values]
            run = self.copy_of("made", "at_once")
            self.run_it(run, *words_of(at_once), nproc=4)
            self.run_it("made")
            for step, row in self.metrics("made").items():
                for key in ("loss", "grad_norm", "lr", "samples"):
                    self.assertEqual(self.metrics(run)[step][key], row[key], f"step {step} {key}")

    def judged(self, run, *words, nproc=1):
        """{field: (class, rule)} of what the start would change, as a dry run tells programs."""
        words = ["train", self.file, "--run", self.folder / run, "--nproc", nproc, *words, "--dry-run", "--json"]
        done = subprocess.run([self.program, *map(str, words)], capture_output=True, cwd=self.folder)
        result = json.loads(done.stdout)
        self.assertIn("start", result, done.stderr.decode())
        return {one["field"]: (one["class"], one["rule"]) for one in result["start"]["changes"]}

    def table(self):
        """The fields of the rows of docs/changing-a-run.md, which a test of dsl/ holds to be the program's."""
        page = (pathlib.Path(__file__).parents[2] / "docs" / "changing-a-run.md").read_text()
        page = page[page.index("compares -->"):page.index("Beyond the table:")]
        rows = re.findall(r"^\| `(\S+)` \| [a-z -]+ \|", page, re.MULTILINE)
        self.assertGreater(len(rows), 40)
        return rows

    def row_of(self, field):
        """A row for the field, else the longest for all below a block."""
        above = [row for row in self.table() if row.endswith(".*") and f"{field}.".startswith(row[:-1])]
        return field if field in self.table() else max(above, key=len)

    # --- ends

    def test_nothing_to_do_is_said_of_the_recipe_that_trained_the_run(self):
        self.run_it("done")
        before = (self.folder / "done" / "recipe.resolved.json").read_bytes()
        self.assertIn("nothing to do", self.run_it("done"))
        self.assertIn("nothing to do", self.run_it("done", "--param", "stop=80"))
        for words in (["--set", "optimizer.peak_lr=5e-3"], ["--set", "name=second"], ["--set", "seed=3"],
                      ["--param", "samples=16"]):
            kept = contents(self.folder / "done")
            text = self.run_it("done", *words, code=2)
            self.assertIn("has finished, at step 20 of", text)
            self.assertIn("A new experiment needs a new folder", text)
            self.assertEqual(contents(self.folder / "done"), kept)
        self.assertEqual((self.folder / "done" / "recipe.resolved.json").read_bytes(), before)
        self.cairn("resume", self.folder / "done")

    def test_a_longer_run_whose_rate_would_jump_asks(self):
        zero = ["--set", "optimizer.lr=T.schedule { T.warmup { over = T.samples(32) }, T.linear { to = 0 } }"]
        self.run_it("longer", *zero)
        text = self.run_it("longer", *zero, "--param", "stop=320", code=2)
        self.assertIn("the rate more than doubles between two steps: 0 at step 20", text)
        self.run_it("longer", *zero, "--param", "stop=320", "--accept", "optimizer.lr")
        self.assertEqual(max(self.metrics("longer")), 40)
        # The remedy that the message names: a schedule that begins where the old one ended.
        self.run_it("smooth", *zero)
        stage = "stages={ T.stage { at = T.steps(20), optimizer = { lr = T.schedule { T.warmup { over = T.steps(10) }, T.linear { to = 0 } } } } }"
        self.run_it("smooth", *zero, "--param", "stop=320", "--set", stage)
        rates = self.rates("smooth")
        self.assertAlmostEqual(rates[21], 1e-4, 9)
        self.assertAlmostEqual(rates[30], 1e-3, 9)
        self.assertAlmostEqual(rates[40], 0, 9)

    def test_stages_begin_where_they_say_and_ask_for_nothing(self):
        schedule = "optimizer = { lr = T.schedule { T.warmup { over = T.steps(2) }, T.linear { to = 0 } } }"
        stages = ["--param", "stop=168", "--set", "checkpoint.save={ T.every { steps = 3 } }", "--set", "stages={ T.stage { at = T.samples(40), batch = { samples = 16 } }, "
                  f"T.stage {{ at = T.tokens({88 * 32}), model = {{ rope_theta = 5e5 }}, {schedule} }}, "
                  f"T.stage {{ at = T.steps(11), {schedule} }} }}"]
        text = self.run_it("staged", *stages)
        self.assertIn("model.rope_theta 10000 -> 500000", text)
        self.assertIn(", 13 steps of 256 to 512 tokens,", text)
        self.assertIn("step 13/13 ", text)
        self.assertNotRegex(text, r"step +\d+/(?!13 )")
        self.assertIn("done: 13 steps in ", text)
        self.assertEqual([(e["step"], e["stage"]) for e in self.events("staged", "stage")], [(5, 1), (8, 2), (11, 3)])
        self.assertEqual([(line["cause"], line["at"]["step"]) for line in self.lineage("staged")],
                         [("start", 0), ("stage", 5), ("stage", 8), ("stage", 11)])
        self.assertEqual(self.step_sizes("staged"), [8] * 5 + [16] * 8)
        rates = self.rates("staged")
        self.assertAlmostEqual(rates[8], 1e-3 + (1e-4 - 1e-3) * (88 - 32) / 136, 9)
        for begin in (8, 11):  # from the rate there to the peak: the same schedule again begins anew
            self.assertAlmostEqual(rates[begin + 1], (rates[begin] + 1e-3) / 2, 9)
            self.assertAlmostEqual(rates[begin + 2], 1e-3, 9)
        trained = self.trained("staged")
        for step in (9, 8, 6, 5, 3):  # a start in a stage, at its beginning and before it
            self.cut("staged", step)
            self.run_it("staged", *stages)
            self.assertEqual(self.trained("staged"), trained, f"from step {step} on")
            replay = self.folder / f"again{step}.lua"
            replay.write_bytes(self.cairn("lineage", self.folder / "staged", "--recipe").stdout)
            self.train(replay, f"again{step}", "--nproc", 1)
            self.assertEqual(self.trained(f"again{step}"), trained, replay.read_text())

    def trained(self, run):
        return [[row[key] for key in ("step", "loss", "grad_norm", "lr", "samples")] for row in self.metrics(run).values()]

    def test_steps_that_new_rules_would_remove_stay_unless_that_is_accepted(self):
        rhythm = ["--set", "checkpoint.save={ T.every { steps = 5 } }", "--set", "watch.proof=1"]
        self.run_it("kept", *rhythm, "--set", "checkpoint.keep={ T.last(9) }")
        had = self.checkpoints("kept")
        last = ["--set", "checkpoint.keep={ T.last(1) }"]
        text = self.run_it("kept", *rhythm, *last, "--param", "stop=176")
        self.assertIn("--accept checkpoint.keep", text)
        self.assertEqual(self.checkpoints("kept")[:len(had) - 1], had[:-1])
        self.run_it("kept", *rhythm, *last, "--param", "stop=192", "--accept", "checkpoint.keep")
        self.assertLess(len(self.checkpoints("kept")), 4)

    # --- data

    def test_a_grown_source_goes_on_and_another_one_asks(self):
        write_tokens(self.folder / "tokens", 3000)
        self.half("grown")
        write_tokens(self.folder / "tokens", 6000)
        text = self.run_it("grown")
        self.assertIn("data.tokens", text)
        self.assertEqual(self.lineage("grown")[-1]["cause"], "data")
        write_tokens(self.folder / "tokens", 6000, seed=9)
        text = self.run_it("grown", "--param", "stop=320", "--set", "optimizer.lr-", "--accept", "optimizer.lr", code=2)
        self.assertIn("--accept data.tokens", text)

    def test_a_source_and_weights_come_under_way(self):
        write_tokens(self.folder / "more", 4000, seed=5)
        blend = "data=T.blend { sources = { T.megatron { prefix = \"tokens\", weight = %s }, T.megatron { prefix = \"more\", weight = %s } } }"
        flat = ["--set", "optimizer.lr-"]
        self.run_it("blend", *flat, "--set", "stop=T.samples(80)")
        self.run_it("blend", *flat, "--set", "stop=T.samples(120)", "--set", blend % (3, 1))
        self.run_it("blend", *flat, "--set", blend % (1, 1))
        order = self.manifest("blend", self.checkpoints("blend")[-1])["state"]["sampler"]
        self.assertEqual(dict(zip(order["names"], order["taken"])), {"tokens": 80 + 30 + 20, "more": 10 + 20})

    def test_a_source_that_left_is_taken_up_where_it_was(self):
        write_tokens(self.folder / "more", 4000, seed=5)
        both = "data=T.blend { sources = { T.megatron { prefix = \"tokens\" }, T.megatron { prefix = \"more\" } } }"
        flat = ["--set", "optimizer.lr-"]
        taken = []
        for stop, data, says in ((80, [both], "fresh"), (120, [], "data.more weight 0.5 -> (none)"),
                                 (160, [both], "back after 40 samples, behind which it resumes")):
            text = self.run_it("left", *flat, "--set", f"stop=T.samples({stop})", *[w for d in data for w in ("--set", d)])
            if stop > 80:
                self.assertIn(says, text)
            order = self.manifest("left", stop // 8)["state"]["sampler"]
            taken.append(dict(zip(order["names"], order["taken"])))
        self.assertEqual(taken, [{"tokens": 40, "more": 40}, {"tokens": 80, "more": 40}, {"tokens": 100, "more": 60}])

    def test_a_source_of_weight_0_waits_for_an_edit_or_a_stage(self):
        write_tokens(self.folder / "more", 4000, seed=5)
        blend = "data=T.blend { sources = { T.megatron { prefix = \"tokens\", weight = %s }, T.megatron { prefix = \"more\", weight = %s } } }"
        flat = ["--set", "optimizer.lr-"]
        for weights, says in (((0, 0), "every source has weight 0"), ((1, -1), "must be a number >= 0"),
                              (("math.huge", 1), "must be a number >= 0, got inf")):
            self.assertIn(says, self.run_it("none", *flat, "--set", blend % weights, code=2))
        planned = json.loads(self.cairn("plan", self.file, "--set", blend % (3, 0), "--json").stdout)["data"]["sources"]
        self.assertEqual([source["samples"] for source in planned], [160, 0])
        shown = self.cairn("plan", self.file, "--set", blend % (3, 0)).stdout.decode()
        self.assertIn("0 samples, 0 epochs (0 %), not drawn from yet", shown)
        self.run_it("alone", *flat, "--set", "stop=T.samples(80)")
        self.run_it("edit", *flat, "--set", "stop=T.samples(80)", "--set", blend % (3, 0))
        text = self.run_it("edit", *flat, "--set", blend % (1, 1))
        self.assertIn("data.more.weight 0 -> 1: data source \"more\": no longer of weight 0", text)
        stage = "stages={ T.stage { at = T.steps(10), data = { weights = { more = 3 } } } }"
        self.run_it("stage", *flat, "--set", blend % (3, 0), "--set", stage)
        for run in ("edit", "stage"):
            rows = self.metrics(run)
            self.assertEqual([rows[n]["loss"] for n in range(1, 11)], [self.metrics("alone")[n]["loss"] for n in range(1, 11)])
            self.assertEqual([rows[n]["loss"] for n in range(11, 21)], [self.metrics("stage")[n]["loss"] for n in range(11, 21)])
            order = self.manifest(run, 20)["state"]["sampler"]
            self.assertEqual(dict(zip(order["names"], order["taken"])), {"tokens": 120, "more": 40})
            self.assertEqual({event["accepted"] for event in self.events(run, "recipe_changed")}, {False})

    # --- lineage

    def test_a_life_of_changes_is_replayed_by_one_recipe_bit_for_bit(self):
        """Random lives of changes by rule, skips, lowered rates, roll backs, other layouts and kills; the recipe that
        lineage prints does them again."""
        lives = int(os.environ.get("CAIRN_LIVES", "3"))
        seed = int(os.environ.get("CAIRN_LIVES_SEED", "1"))
        for life in range(seed, seed + lives):
            with self.subTest(life=life):
                self.one_life(random.Random(life), f"life{life}")

    def one_life(self, draw, run):
        write_tokens(self.folder / "tokens", 3000)
        write_tokens(self.folder / "more", 4000, seed=5)
        changes = {
            "batch.samples": lambda: draw.choice([4, 8, 16]),
            "optimizer.peak_lr": lambda: draw.choice(["1e-3", "1.3e-3", "8e-4"]),
            "optimizer.weight_decay": lambda: draw.choice([0, 0.1]),
            "optimizer.clip": lambda: draw.choice([0, 0.5]),
            "optimizer.beta2": lambda: draw.choice([0.95, 0.99]),
            "optimizer.z_loss": lambda: draw.choice([0, "1e-4"]),
            "optimizer.ema": lambda: draw.choice(["0.9", "0.99"]),
            "precision": lambda: draw.choice(["fp32", "bf16"]),
            "model.residual_dropout": lambda: draw.choice([0, 0.1]),
            "optimizer.lr": lambda: draw.choice(["T.schedule { T.warmup { over = T.samples(32) }, T.cosine { to = 2e-4 } }",
                                                 "T.schedule { T.warmup { over = T.steps(3) }, T.linear { to = 5e-4 } }"]),
            "data": lambda: "T.blend { sources = { T.megatron { prefix = \"tokens\", weight = %d }, T.megatron { prefix = \"more\", weight = %d } } }"
                            % (draw.randint(1, 3), draw.randint(1, 3)),
        }
        exact = {
            "optimizer.zero": lambda: draw.choice([1, 2]),
            "recompute.mode": lambda: draw.choice(["none", "full"]), "log.at": lambda: "T.every { steps = 7 }",
        }
        now, stop = {"optimizer.zero": 1}, 0
        for part in range(draw.randint(2, 4)):
            for table in (changes, exact):
                for field in draw.sample(sorted(table), draw.randint(0, 2)):
                    now[field] = table[field]()
            stop += draw.choice([40, 48, 64])
            stop = (stop + 15) // 16 * 16
            if part == 1 and draw.random() < 0.5:
                write_tokens(self.folder / "tokens", 6000)
            words = [word for field, value in now.items() for word in ("--set", f"{field}={value}")]
            nproc = 2 if draw.random() < 0.4 else 1
            if nproc == 2 and now.get("batch.samples", 8) >= 4:
                words += ["--nproc", 2]
            else:
                words += ["--nproc", 1]
            last = max(self.kept(run), default=0)
            if draw.random() < 0.5:
                words += ["--kill", f"0@{last + 2}"]
            words += self.as_guards_do(draw, run, last)
            self.train(self.file, run, "--set", f"stop=T.samples({stop})", *words, "--accept", "optimizer.lr")
        text = self.cairn("lineage", self.folder / run, "--recipe").stdout
        replay = self.folder / f"{run}-again.lua"
        replay.write_bytes(text)
        self.train(replay, f"{run}-again", "--nproc", 1)
        a, b = self.kept(run), self.kept(f"{run}-again")
        self.assertEqual(sorted(a), sorted(b), text.decode())
        for step in sorted(a):
            for key in ("loss", "grad_norm", "lr", "samples"):
                self.assertEqual(a[step][key], b[step][key], f"step {step} {key}\n{text.decode()}")
        last = self.checkpoints(run)[-1]
        self.cairn("ckpt", "diff", self.checkpoint(run, last), self.checkpoint(f"{run}-again", last), "--tensors-only",
                   "--exit-code")

    def as_guards_do(self, draw, run, last):
        """Draws options of the next start, as a guard or a person gives them to a run that stands at step `last`."""
        words = []
        if draw.random() < 0.5:
            first = last + draw.randint(1, 5)
            words += ["--skip", f"steps={first}..{first + draw.randint(0, 2)}"]
        if draw.random() < 0.4:
            words += ["--lower-lr", f"{draw.choice([0.5, 0.3])},over={draw.randint(1, 6)},back={draw.randint(0, 4)}"]
        back = draw.choice([step for step in self.checkpoints(run) if step < last] or [0])
        if back and draw.random() < 0.4:  # as a guard that was killed leaves its decision
            position = self.manifest(run, back)["state"]["sampler"]["position"]
            roll_back = {"to_step": back, "onset": back + 1, "step": last, "number": 1, "why": "drawn",
                         "skip": f"{position}..{position + draw.randint(0, 24)}"}
            (self.folder / run / "rolling_back.json").write_text(json.dumps(roll_back))
        elif back and draw.random() < 0.3:
            words += ["--from-step", back]
        return words

    def kept(self, run):
        """{step: line} of the steps that count: those behind a step that a start resumed from are left."""
        out = {}
        for line in self.metrics_lines(run):
            if "resumed_at" in line:
                out = {step: row for step, row in out.items() if step <= line["resumed_at"]}
            elif "step" in line:
                out[line["step"]] = line
        return out

    def test_lineage_tells_what_was_accepted_and_what_no_recipe_says(self):
        self.half("told")
        self.run_it("told", "--set", "seed=8", "--accept", "seed")
        table = self.cairn("lineage", self.folder / "told").stdout.decode()
        self.assertIn("seed 7 -> 8  (accepted)", table)
        done = self.cairn("lineage", self.folder / "told", "--recipe", code=2)
        self.assertIn(b"--accept seed", done.stderr)
        lines = (self.folder / "told" / "lineage.jsonl").read_text().splitlines()
        (self.folder / "told" / "lineage.jsonl").write_text(lines[0] + "\n" + lines[1][:-20] + "\n")
        for words in (("lineage", self.folder / "told"), ("lineage", self.folder / "told", "--recipe")):
            self.assertIn("lineage.jsonl:2: the line is no JSON object; ", self.cairn(*words, code=65).stderr.decode())
        self.assertIn("lineage.jsonl:2: ", self.cairn("resume", self.folder / "told").stdout.decode())  # and it trains

    # --- what a start says before

    def test_a_dry_run_and_check_say_what_the_start_would_do(self):
        self.half("dry")
        before = contents(self.folder / "dry")
        text = self.run_it("dry", "--dry-run")
        self.assertRegex(text, r"resumes from step 10 \(.*step-00000010\); lr 0.000663 -> 0.00060\d; 10 steps remain")
        self.assertEqual(contents(self.folder / "dry"), before)
        shown = self.cairn("check", self.file, "--run", self.folder / "dry", "--world", 1).stdout.decode()
        self.assertIn("resumes from step 10", shown)
        self.cairn("check", self.file, "--run", self.folder / "dry", "--world", 1, "--set", "seed=9", code=2)
        self.assertEqual(contents(self.folder / "dry"), before)
        # A damaged newest checkpoint is told, and which one is taken.
        self.run_it("dry", "--set", "checkpoint.save={ T.every { steps = 3 } }")
        before, last = self.checkpoints("dry")[-2:]
        newest = self.checkpoint("dry", last)
        shard = next(newest.glob("*.h5"))
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(bytes(data))
        text = self.run_it("dry", "--param", "stop=176", "--dry-run")
        self.assertIn("passed over", text)
        self.assertIn(f"resumes from step {before} ", text)


if __name__ == "__main__":
    main()
