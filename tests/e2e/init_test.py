"""What a run begins with, and which of its checkpoints stay: by the command line and by the recipe."""

from harness import RunTest, main


class Init(RunTest):
    def small(self, name, extra="", **changes):
        settings = dict(name=name, steps=6, tp=1, pp=1, dp=2, sp="false", save=100)
        path = self.recipe(**{**settings, **changes})
        if extra:
            text = path.read_text().rstrip()
            path.write_text(text[:-1] + extra + "\n}\n")
        return path

    def test_a_part_of_a_checkpoint_into_another_model_and_layout(self):
        self.train(self.small("base", tp=2, dp=1), "base")
        other = self.small("other", steps=9, dp=1, pp=2)
        set_model = ["--set", "model.tied_embeddings=false", "--set", "model.layers=3"]

        # Strict by default: every misfit with what was found, expected, and what would allow it.
        job = self.train(other, "other", *set_model, "--init-from", "base", code=2)
        out = job.output()
        self.assertIn('missing: weight layers.2.attn.q.weight, the model has f32 [32, 32]; '
                      'allow_missing = { "layers.2.attn.q.weight" } starts it anew', out)
        self.assertIn('missing: weight head.weight, the model has f32 [257, 32]', out)
        self.assertEqual(self.checkpoints("other"), [])

        # Allowed, the run goes on at step 6 with what there is; the report is printed and recorded.
        allow = ["--init-allow-missing", "layers.2.*", "--init-allow-missing", "head.weight"]
        job = self.train(other, "other", *set_model, "--init-from", "base", *allow)
        self.assertIn("tensors taken from the checkpoint, with their moments; the run resumes at step 6", job.output())
        self.assertIn("anew: head.weight [257, 32] (not in the checkpoint, `allow_missing`)", job.output())
        self.assertEqual(sorted(self.metrics("other")), [7, 8, 9])
        event = self.events("other", "initialized")[0]
        self.assertEqual(event["step"], 6)
        self.assertIn("embed.tokens", event["taken"])
        self.assertIn("head.weight", [t["tensor"] for t in event["anew"]])
        self.assertTrue(all(t["tensor"] == "head.weight" or t["tensor"].startswith("layers.2.") for t in event["anew"]))
        self.assertEqual(event["left"], [])

        # The same command again goes on from the run's own checkpoint, whatever it was begun with.
        job = self.train(other, "other", *set_model, "--init-from", "base", *allow)
        self.assertIn("nothing to do", job.output())
        self.assertIn("has checkpoints of its own and resumes from them", job.output())
        self.assertEqual(len(self.events("other", "initialized")), 1)

    def test_weights_alone_by_the_recipe_are_a_new_run(self):
        self.train(self.small("base"), "base")
        init = 'init = T.init_from { path = "base", weights_only = true, except = { "final_norm.*" } },'
        job = self.train(self.small("tuned", extra=init), "tuned")
        self.assertIn("weights alone: moments start at zero, the run begins at step 0", job.output())
        self.assertIn("anew: final_norm.weight [32] (`except`)", job.output())
        self.assertEqual(sorted(self.metrics("tuned")), [1, 2, 3, 4, 5, 6])
        state = self.manifest("tuned", 6)["state"]
        self.assertEqual(state["seed"], 11)
        # Its first loss is that of a trained model, not of a fresh one, and its learning rate starts from the bottom.
        self.train(self.small("fresh"), "fresh")
        base, tuned, fresh = (self.metrics(run) for run in ("base", "tuned", "fresh"))
        self.assertLess(tuned[1]["loss"], (base[1]["loss"] + base[6]["loss"]) / 2)
        self.assertEqual(fresh[1]["loss"], base[1]["loss"])
        self.assertEqual(tuned[1]["lr"], fresh[1]["lr"])
        job = self.train(self.small("lost", extra='init = { only = { "layers.*" } },'), "lost", code=2)
        self.assertIn("not from where", job.output())
        job = self.train(self.small("typo", extra='init = { path = "base", only = { "layer.*" } },'), "typo", code=2)
        self.assertIn('only = { "layer.*" } is of no tensor of the model; it has "layers.0.', job.output())

    def test_rules_of_retention_in_a_run(self):
        recipe = self.small("kept", steps=24, save=2)
        rules = "{ T.last(1), T.every { steps = 8 }, T.best { metric = 'valid_loss' }, T.at { steps = { 3 } } }"
        self.train(recipe, "kept", "--set", f"checkpoint.keep={rules}", "--set", "eval.at=T.every { steps = 4 }",
                   "--set", "eval.steps=1")
        # A save that is due while one is being written comes later, so which steps were saved is read from the events.
        saved = [e["step"] for e in self.events("kept", "saved")]
        first = lambda mark: min(s for s in saved if s >= mark)
        valid = {s: line["valid_loss"] for s, line in self.metrics("kept").items() if "valid_loss" in line and s in saved}
        wanted = {first(3), first(8), first(16), 24, min(valid, key=lambda s: (valid[s], s))}
        self.assertEqual(set(self.checkpoints("kept")), wanted)
        self.assertEqual(self.manifest("kept", 24)["metrics"]["valid_loss"], valid[24])

    def test_a_failed_save_stops_the_run_where_the_recipe_asks_for_it(self):
        recipe = self.small("strict", steps=100000, save=5)
        job = self.start(recipe, "strict", "--set", "checkpoint.on_failure=stop")
        self.until(lambda: self.events("strict", "saved"), "a save", job)
        folder = self.folder / "strict" / "checkpoints"
        folder.rename(self.folder / "strict" / "moved")
        folder.write_text("in the way")
        self.finish(job, 74)
        out = job.output()
        failed = self.events("strict", "save_failed")
        self.assertIn(f"warning: step {failed[0]['step']} was not saved: ", out)
        self.assertIn("the run stops, as checkpoint.on_failure says", out)
        steps = [e["step"] for e in failed]
        self.assertEqual(len(steps), len(set(steps)), "a failed save is told once")
        self.assertIn("stopped because step", self.events("strict", "end")[-1]["message"])
        # What could not be written is still in memory, and goes to disk as soon as there is a place for it.
        folder.unlink()
        (self.folder / "strict" / "moved").rename(folder)
        last = self.last_step("strict")
        self.train(recipe, "strict", "--set", f"stop=T.steps({last + 2})")
        self.assertEqual(self.checkpoints("strict")[-1], last + 2)


if __name__ == "__main__":
    main()
