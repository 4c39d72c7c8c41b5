"""Tasks that a run asks while it trains: the numbers of `cairn eval`, in every layout; what chooses by them, and what ends by them."""

import json
import re

from harness import HostsTest, main

ITEMS = [{"question": f"what follows {k}", "choices": ["one", "two words", "a third"], "answer": k % 3} for k in range(9)]
FILES = {"items": ITEMS, "probes": [{"prompt": "In the", "text": " end"}, {"prompt": "a", "text": "b"}],
         "pairs": [{"better": "a b", "worse": "b aa"}], "next": [{"prompt": "In", "tokens": [" a", " b"]}],
         "texts": [{"text": "In the beginning there were many more words than a sequence of this run has tokens for."}]}
TASKS = ", ".join(f'T.task {{ "{name}.jsonl" }}' for name in FILES)


class TasksTest(HostsTest):
    def setUp(self):
        super().setUp()
        for name, items in FILES.items():
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))

    def asking(self, evaluation, more="", name="small", **options):
        """The small recipe with an `eval`, and with `more` fields."""
        path = self.recipe(name, **{"steps": 12, "tp": 1, "pp": 1, "dp": 1, "zero": 0, "sp": "false", **options})
        path.write_text(path.read_text().replace("tokenizer = T.bytes,", f"tokenizer = T.bytes, eval = T.eval {{ {evaluation} }}, {more}"))
        return path

    def told(self, run):
        return {step: line["eval"] for step, line in self.metrics(run).items() if "eval" in line}

    def evaluated(self, run, steps="all"):
        files = [part for name in FILES for part in ("--tasks", f"{name}.jsonl")]
        return json.loads(self.cairn("eval", run, *files, "--steps", steps, "--precision", "fp32", "--json").stdout)["results"]

    def test_a_run_has_the_numbers_of_its_checkpoints(self):
        recipe = self.asking(f"tasks = {{ {TASKS} }}, tasks_at = T.every {{ steps = 5 }}")
        text = self.train(recipe, "run").output()
        self.assertRegex(text, r"step 5: items acc 0\.\d{4}, next mass .*, pairs margin .*, probes logprob -\d+\.\d{4}, texts loss \d")
        told = self.told("run")
        self.assertEqual(sorted(told), [5, 10, 12])
        rows = self.evaluated("run")
        saved = sorted({row["step"] for row in rows})  # steps are faster than saves: one may be left out
        self.assertEqual(saved, self.checkpoints("run"))
        self.assertEqual(saved[-1], 12)
        for row in rows:
            mine = told[row["step"]][row["task"]]
            self.assertEqual(set(mine), {name for name, value in row["sum"].items() if value is not None} - {
                "first_rank", "first_rank_stderr", "greedy", "greedy_stderr"})
            for name, value in mine.items():
                self.assertAlmostEqual(value, row["sum"][name], delta=2e-5 * max(1, abs(value)), msg=f"{row['step']} {row['task']} {name}")
        report = json.loads(self.cairn("report", "run", "--json").stdout)
        self.assertEqual(report["tasks"]["eval/items/acc"]["last"], told[12]["items"]["acc"])
        self.assertEqual(report["tasks"]["evals/texts/loss"]["evaluations"], len(saved))
        self.assertEqual(report["curves"]["series"]["eval/texts/loss"]["mean"][0], float(f"{told[5]['texts']['loss']:.6g}"))
        self.assertRegex(self.cairn("report", "run").stdout.decode(), r"task +eval/items/acc: 0\.\d+ at step 12, best 0\.\d+ at ")

        # Other layouts, with documents apart, and over two hosts: the same numbers, and the training of a run that asks nothing.
        apart = 'deterministic = "layout", objective = { document_end = 32 },'
        alone = self.asking(f"tasks = {{ {TASKS} }}, tasks_at = T.every {{ steps = 5 }}", apart, "alone", zero=1)
        self.train(alone, "alone")
        cut = self.asking(f"tasks = {{ {TASKS} }}, tasks_at = T.every {{ steps = 5 }}", apart, "cut", zero=1, tp=2, pp=2)
        self.train(cut, "cut")
        self.assertEqual(self.told("cut"), self.told("alone"))
        wide = self.asking(f"tasks = {{ {TASKS} }}, tasks_at = T.every {{ steps = 5 }}", apart, "wide", zero=1, dp=2)
        self.finish_all(self.start_hosts(wide, "wide", 2, 1))
        self.assertEqual(self.told("wide"), self.told("alone"))
        silent = self.asking("at = T.every { steps = 100 }, steps = 1", apart, "silent", zero=1)
        self.train(silent, "silent")
        for step, line in self.metrics("silent").items():
            self.assertEqual(line["loss"], self.metrics("alone")[step]["loss"])

    def test_the_best_by_a_task_stays(self):
        recipe = self.asking(f"tasks = {{ {TASKS} }}, tasks_at = T.every {{ steps = 2 }}", steps=20, save=2)
        recipe.write_text(recipe.read_text().replace("keep = { T.last(3) }", 'keep = { T.last(1), T.best { metric = "eval/texts/loss" } }'))
        text = self.train(recipe, "run", "--set", "optimizer.peak_lr=0.3").output()
        self.assertNotIn("never finds one", text)
        losses = {step: one["texts"]["loss"] for step, one in self.told("run").items()}
        best = min(losses, key=losses.get)
        self.assertEqual(self.checkpoints("run"), sorted({best, 20}))
        self.assertEqual(self.manifest("run", 20)["metrics"]["eval.texts.loss"], losses[20])
        listed = self.cairn("ckpt", "ls", "run").stdout.decode()
        self.assertIn("eval/texts/loss", listed)
        self.assertIn(f"{losses[best]:.5g}", listed)

    def test_a_run_that_no_longer_becomes_better_ends(self):
        patience = 'watch = T.watch { early_stop = T.patience { metric = "eval/items/acc", evaluations = 3, least = 2 } },'
        recipe = self.asking('tasks = { T.task { "items.jsonl" } }, tasks_at = T.every { steps = 2 }', patience, steps=40)
        text = self.train(recipe, "run").output()
        self.assertIn("step 8: the run ends early: eval/items/acc has not become better in 3 evaluations; its best is ", text)
        self.assertIn("done: 8 steps", text)
        (event,) = self.events("run", "early_stop")
        self.assertEqual((event["step"], event["best_step"], event["evaluations"]), (8, 2, 3))
        self.assertEqual(self.events("run", "end")[-1]["exit_code"], 0)
        self.assertEqual(self.checkpoints("run")[-1], 8)
        again = self.train(recipe, "run").output()
        self.assertIn("nothing to do", again)
        self.assertEqual(self.last_step("run"), 8)
        more = self.train(recipe, "run", "--set", "watch.early_stop.evaluations=5").output()
        self.assertIn("step 12: the run ends early", more)
        # Over two hosts; killed before the end, it has the same end.
        recipe = self.asking('tasks = { T.task { "items.jsonl" } }, tasks_at = T.every { steps = 2 }', patience, "wide", steps=40, dp=2)
        jobs = self.start_hosts(recipe, "wide", 2, 1)
        self.finish_all(jobs)
        self.assertEqual(self.last_step("wide"), 8)
        self.assertIn("the run ends early", jobs[0].output())
        jobs = self.start_hosts(recipe, "wide", 2, 1)
        self.finish_all(jobs)
        self.assertEqual(self.last_step("wide"), 8)

    def test_what_a_run_cannot_ask_is_refused_before_it_begins(self):
        def refused(evaluation, more=""):
            recipe = self.asking(evaluation, more)
            text = self.train(recipe, "run", code=2).output()
            self.assertFalse((self.folder / "run").exists(), text)
            return re.sub(r"\s+", " ", text)
        at = "tasks_at = T.every { steps = 2 }"
        (self.folder / "made.jsonl").write_text('{"question": "a", "answers": ["b"]}\n')
        self.assertIn("made.jsonl: its answers have to be generated, which a run does not do", refused(f'tasks = {{ T.task {{ "made.jsonl" }} }}, {at}'))
        self.assertIn("gone.jsonl", refused(f'tasks = {{ T.task {{ "gone.jsonl" }} }}, {at}'))
        self.assertIn("nothing says when they are evaluated", refused('tasks = { T.task { "items.jsonl" } }'))
        self.assertIn("eval.tasks has none", refused(at))
        self.assertIn('another task is named "items" too', refused(f'tasks = {{ T.task {{ "items.jsonl" }}, T.task {{ "./items.jsonl" }} }}, {at}'))
        long = [{"prompt": "a", "text": "b" * 40}]
        (self.folder / "long.jsonl").write_text("".join(json.dumps(item) + "\n" for item in long))
        self.assertIn("long.jsonl: item 1: 40 tokens to be predicted; a sequence of the run has 32", refused(f'tasks = {{ T.task {{ "long.jsonl" }} }}, {at}'))
        patience = 'watch = T.watch { early_stop = T.patience { metric = "%s", evaluations = 3 } },'
        tasks = f'tasks = {{ T.task {{ "items.jsonl" }} }}, {at}'
        self.assertIn("watch.early_stop asks for eval/items/accuracy, and the tasks have items/", refused(tasks, patience % "eval/items/accuracy"))
        self.assertIn('"accuracy" names no metric; there are loss, valid_loss', refused(tasks, patience % "accuracy"))
        self.assertIn("waits for a better valid_loss, but nothing is evaluated", refused(tasks, patience % "valid_loss"))
        self.assertIn("but eval.tasks is empty", refused("at = T.every { steps = 2 }", patience % "eval/items/acc"))
        self.assertIn("does not say after how many evaluations", refused(tasks, patience.replace(", evaluations = 3", "") % "eval/items/acc"))
        self.assertIn("the loss is of each step", refused(tasks, patience % "loss"))


if __name__ == "__main__":
    main()
