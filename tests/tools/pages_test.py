"""Pages that say what to type: their commands work as pasted, in order, in a folder that holds what each page asks for."""

import gzip
import json
import os
import pathlib
import random
import re
import subprocess

from program import ProgramTest, main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def script_of(page):
    """The commands of a page: what stands four columns or more to the right of its paragraph."""
    out = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        out.append(line.strip() and line.startswith("       ") and line[7:] or "")
    return "\n".join(out)


class Pages(ProgramTest):
    def paste(self, page, *expected, shorter=()):
        script = script_of(page)
        for word, other in shorter:  # a run in fewer steps says as much about the page
            self.assertIn(word, script, page)
            script = script.replace(word, other)
        done = subprocess.run(["bash", "-e", "-c", script], cwd=self.folder.name, capture_output=True,
                              text=True, stdin=subprocess.DEVNULL, timeout=110,
                              env={**os.environ, "PATH": f"{os.path.dirname(self.program)}:{os.environ['PATH']}"})
        self.assertEqual(done.returncode, 0, f"{page}\n{done.stdout[-3000:]}\n{done.stderr}")
        for text in expected:
            self.assertIn(text, done.stdout, page)
        return done.stdout

    def words(self, count, seed=5):
        draw = random.Random(seed)
        words = ["".join(draw.choice("abcdefghiklmnoprstu") for _ in range(draw.randint(2, 9))) for _ in range(count)]
        weights = [1 / (k + 2) for k in range(count)]  # as in texts
        return lambda length: " ".join(draw.choices(words, weights, k=length)) + "."

    def with_recipes(self):
        (pathlib.Path(self.folder.name) / "recipes").symlink_to(ROOT / "recipes")

    def first_run(self):
        """The folder as the page on a first run leaves it."""
        sentence = self.words(600)
        for part in range(2):
            rows = (json.dumps({"text": sentence(60) + "\n"}) + "\n" for _ in range(300))
            self.write(f"raw/part-{part}.jsonl.gz", gzip.compress("".join(rows).encode()))
        return self.paste("first-run.md", "raw/part-1.jsonl.gz: ")

    def test_from_raw_text_to_a_first_run_and_out_and_in_again(self):
        self.first_run()
        self.assertTrue(os.path.isdir(self.path("runs/first/checkpoints/step-00000040")))
        self.write("held-out.txt", self.words(600)(200))
        text = self.paste("take-a-model-out.md")
        losses = [line.split()[1:-1] for line in text.splitlines() if line.startswith("held-out ")]  # but for tokens/s
        self.assertEqual(len(losses), 2, text)
        self.assertEqual(*losses)
        os.makedirs(self.path("models"))
        os.rename(self.path("model"), self.path("models/llama"))
        self.paste("bring-a-checkpoint-in.md", "done: ", shorter=(("--run runs/tune", "--run runs/tune --set 'stop=T.steps(3)'"),))
        self.assertTrue(os.path.exists(self.path("tune/tuned/model.safetensors")))

    def test_choose_a_layout(self):
        self.with_recipes()
        text = self.paste("choose-a-layout.md", "fits", "against the choice", "stopped after step 20", "stopped after step 30")
        self.assertIn("8 = tp 2 x dp 2 x pp 2", text)
        self.assertTrue(os.path.exists(self.path("pipeline.svg")))

    def test_the_tour_finds_the_dirt_and_leaves_it_out(self):
        self.with_recipes()
        sentence = self.words(900)
        draw = random.Random(6)
        self.write("data/kjv.txt", "".join(sentence(draw.randint(8, 40)) + "\n" for _ in range(31000)))
        text = self.paste("tour.md", "scraped.txt at byte", "deviations above its source's")
        with open(self.path("dirty.txt")) as f:
            named = set(f.read().split())
        dirty = {f"data/tour/scraped:{k}" for k in range(49, 6200, 50)}
        self.assertGreaterEqual(len(named & dirty), 0.9 * len(dirty))
        self.assertLessEqual(len(named - dirty), 0.01 * 6200)
        before, after = self.suspects("runs/dirty"), self.suspects("runs/clean")
        self.assertGreater(len(before), 4)
        self.assertLessEqual(len(after), 0.1 * len(before))
        self.assertIn("skip.lua: ", text)
        # Also none of those that come into the run because others are left out.
        self.write("many.txt", "".join(f"data/tour/scraped:{k}\n" for k in range(0, 6200, 4)))
        self.cairn("data", "samples", "recipes/tour.lua", "--documents", "many.txt", "--as-skip", "many.lua")
        self.cairn("data", "samples", "recipes/tour.lua", "--with", "many.lua", "--documents", "many.txt", code=1)
        entries = self.cairn_json("lineage", "runs/clean")["lineage"]
        self.assertEqual([entry["cause"] for entry in entries], ["start", "recipe"])
        self.cairn("check", "again.lua", "--world", "2")

    def test_samples_are_left_out_beside_those_that_are_already(self):
        self.write("text.txt", "".join(f"{self.words(50, k)(12)}\n" for k in range(300)))
        self.cairn("data", "tokenize", "text.txt", "--out", "lines", "--documents", "line")
        recipe = """local T = require "cairn"
return T.recipe { name = "s", stop = T.steps(20), model = T.gpt { layers = 1, width = 16, heads = 2, context = 32, vocab = 256 },
  tokenizer = T.bytes, data = T.megatron { prefix = "lines" }, batch = { samples = 4, micro = 4, skip = { "9" } },
  optimizer = T.adamw { peak_lr = 1e-3 }, mesh = T.mesh { tp = 1, pp = 1 }, %s }"""
        self.write("s.lua", recipe % "")
        self.write("list.txt", "".join(f"./lines.bin:{k}\r\n" for k in range(0, 300, 4)))
        done = self.cairn_json("data", "samples", "s.lua", "--documents", "list.txt", "--as-skip", "skip.lua")
        with open(self.path("skip.lua")) as f:
            text = f.read()
        ranges = [tuple(map(int, (one.split("..") * 2)[:2])) for one in re.findall(r'"([\d.]+)"', text)]
        self.assertTrue(any(first <= 9 <= last for first, last in ranges), ranges)
        self.assertGreater(done["samples"], 1)
        self.cairn("data", "samples", "s.lua", "--with", "skip.lua", "--documents", "list.txt", code=1)
        # A run has left out what its recipe said, and continues to.
        self.cairn("train", "s.lua", "--nproc", "1", "--threads", "1", "--run", "run", "--stop-at", "3")
        self.cairn("data", "samples", "run", "--position", "5", "--as-skip", "more.lua")
        with open(self.path("more.lua")) as f:
            self.assertEqual(f.read().split("{")[-1].split(), ['"5",', '"9",', "}", "}", "}"])
        self.assertIn("no sample is of nowhere", self.cairn("data", "samples", "s.lua", "--document", "nowhere:3",
                                                            code=2).stderr)
        self.write("all.txt", "".join(f"lines:{k}\n" for k in range(300)))
        self.assertIn("nothing would be left", self.cairn("data", "samples", "s.lua", "--documents", "all.txt", "--as-skip",
                                                          "x.lua", code=2).stderr)
        self.write("staged.lua", recipe % 'stages = { T.stage { at = T.steps(8), batch = { skip = { "40" } } } }')
        self.assertIn("a stage of the recipe sets batch.skip", self.cairn("data", "samples", "staged.lua", "--document",
                                                                          "lines:7", "--as-skip", "x.lua", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("x.lua")))
        self.write("none.txt", "")
        self.cairn("data", "samples", "s.lua", "--documents", "none.txt", "--as-skip", "/dev/stdout")

    def suspects(self, run):
        """Noise among the samples that stood out."""
        done = subprocess.run([self.program, "data", "samples", run, "--suspects", "--json", "--text", "80"],
                              cwd=self.folder.name, capture_output=True, text=True, timeout=60)
        self.assertIn(done.returncode, (0, 1), done.stderr)
        rows = json.loads(done.stdout)["samples"] if done.stdout.strip() else []
        return [row for row in rows if any(c in row["text"] for c in "<>[]{}")]


if __name__ == "__main__":
    main()
