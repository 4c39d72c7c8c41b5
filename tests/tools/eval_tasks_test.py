"""cairn eval --tasks: of a folder, of imports in several layouts, over the steps of a run, kept and never computed twice."""

import json
import pathlib

import inference_test
from program import ProgramTest, main

ITEMS = [{"question": f"what follows {k}", "choices": ["one", "two words", "a third"], "answer": k % 3} for k in range(6)]
PROBES = [{"prompt": "In the", "text": " end"}, {"prompt": "a", "text": "b"}]


class EvalTasksTest(ProgramTest):
    model = inference_test.InferenceTest.model

    def files(self):
        self.write("items.jsonl", "".join(json.dumps(item) + "\n" for item in ITEMS))
        self.write("probes.jsonl", "".join(json.dumps(item) + "\n" for item in PROBES))
        self.write("pairs.jsonl", '{"better": "a b", "worse": "b a"}\n')
        self.write("next.jsonl", '{"prompt": "In", "tokens": [" a", " b"]}\n')
        self.write("texts.jsonl", '{"text": "In the beginning"}\n')
        self.write("open.jsonl", '{"question": "a", "answers": ["b"]}\n')
        return [part for name in ("items", "probes", "pairs", "next", "texts", "open") for part in ("--tasks", f"{name}.jsonl")]

    def evaluate(self, model, *options):
        return self.cairn_json("eval", model, *options)["results"]

    def test_results_are_the_same_in_every_layout_and_every_order(self):
        model, tasks = self.model(), self.files()
        results = self.evaluate(model, *tasks, "--items", "--shots", 0)
        self.assertEqual([row["task"] for row in results], ["items", "probes", "pairs", "next", "texts", "open"])
        layouts = ["tp=2", "pp=2", "dp=2", "tp=2,pp=2", "dp=2,pp=2", "dp=2,tp=2", "dp=4"]
        for k, layout in enumerate(layouts):
            self.cairn("import", model, f"layout{k}", "--mesh", layout)
            again = self.evaluate(f"layout{k}/step-00000000", *tasks, "--items", "--shots", 0)
            for one, other in zip(results, again):
                self.assertEqual((layout, one["task"], one["items"], one["sum"]), (layout, other["task"], other["items"], other["sum"]))
        reverse = [part for k in range(len(tasks) - 2, -1, -2) for part in tasks[k:k + 2]]
        back = self.evaluate(model, *reverse, "--items", "--shots", 0)
        self.assertEqual(sorted(map(json.dumps, back)), sorted(map(json.dumps, results)))
        shown = self.cairn("eval", model, *tasks).stdout
        self.assertRegex(shown, r"- +items +6 +acc 0\.\d{4} ± 0\.\d{4}")

    def run_folder(self):
        """Two steps of a run's folder, which are two imports."""
        model = self.model()
        self.cairn("import", model, "run/checkpoints", "--mesh", "tp=2")
        self.write("run/run.json", "{}")
        return "run"

    def test_what_is_kept_is_not_computed_again_and_a_cut_file_is_continued(self):
        run = self.run_folder()
        self.files()
        first = self.evaluate(run, "--tasks", "items.jsonl", "--steps", "all")
        self.assertEqual([(row["step"], row["computed"]) for row in first], [(0, 6)])
        kept, = pathlib.Path(self.path("run/evals")).glob("items-*/step-00000000-*.jsonl")
        whole = kept.read_bytes()
        self.assertEqual(whole.count(b"\n"), 8)
        again = self.evaluate(run, "--tasks", "items.jsonl")
        self.assertEqual((again[0]["computed"], again[0]["sum"]), (0, first[0]["sum"]))
        kept.write_bytes(whole[:len(whole) // 2])
        middle = self.evaluate(run, "--tasks", "items.jsonl")
        self.assertIn(middle[0]["computed"], range(1, 6))
        self.assertEqual((middle[0]["sum"], kept.read_bytes()), (first[0]["sum"], whole))
        other = self.evaluate(run, "--tasks", "items.jsonl", "--shots", 1)  # other contexts: other results
        self.assertEqual(other[0]["computed"], 6)
        followed = self.evaluate(run, "--tasks", "items.jsonl", "--follow")  # no process trains: it ends
        self.assertEqual([row["computed"] for row in followed], [0])

    def test_wrong_words_are_refused(self):
        model = self.model()
        self.files()
        told = lambda *options: self.cairn("eval", model, *options, code=2).stderr  # noqa: E731
        self.assertIn("two evaluations", told("--tasks", "items.jsonl", "--text", "items.jsonl"))
        self.assertIn("has no steps", told("--tasks", "items.jsonl", "--steps", "all"))
        self.assertIn("--tasks", told("--limit", "3"))
        self.assertIn("another task is named", told("--tasks", "items.jsonl", "--tasks", "./items.jsonl"))
        self.assertIn("examples (shots) are for", told("--tasks", "probes.jsonl", "--shots", "1"))
        self.assertIn('the transform "turn" is not known', told("--tasks", "items.jsonl", "--transform", "turn"))
        self.write("bad.jsonl", '{"question": "a", "choices": ["b"], "answer": 3}\n')
        self.assertIn("bad.jsonl: item 1: the answer 3 is none of the 1 choices", told("--tasks", "bad.jsonl"))


if __name__ == "__main__":
    main()
