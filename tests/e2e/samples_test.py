"""`cairn data samples`: what it says a step trained on is what the step trained on. The weights of these runs never move,
so that a step's loss is that of its samples: a run of only those ids has the same."""

import json
import os
import random
import struct

import numpy

from harness import RunTest, main

CONTEXT, BATCH = 24, 6
RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "still", seed = 5, stop = T.steps({steps}),
  model = T.llama {{ layers = 1, width = 32, heads = 2, ffn = 32, context = {context}, vocab = 256 }},
  tokenizer = T.bytes,
  data = T.blend {{ sources = {{ {sources} }} }},
  batch = {{ samples = {batch}, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-30 }},
  mesh = T.mesh {{ dp = {dp} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 3 }} }}, keep = {{ T.last(9) }} }},
  {more}
}}
"""


class Samples(RunTest):
    def pair(self, name, documents):
        """A Megatron pair of documents of one-byte tokens."""
        (self.folder / f"{name}.bin").write_bytes(b"".join(documents))
        lengths, offsets = [len(one) for one in documents], [0]
        for length in lengths[:-1]:
            offsets.append(offsets[-1] + length)
        count = len(documents)
        (self.folder / f"{name}.idx").write_bytes(
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, count, count + 1) + struct.pack(f"<{count}i", *lengths)
            + struct.pack(f"<{count}q", *offsets) + struct.pack(f"<{count + 1}q", *range(count + 1)))

    def texts(self, seed, count):
        draw = random.Random(seed)
        return [bytes(draw.randrange(97, 123) for _ in range(draw.randrange(1, 60))) for _ in range(count)]

    def still(self, name, sources, steps=12, dp=2, batch=BATCH, more=""):
        path = self.folder / f"{name}.lua"
        path.write_text(RECIPE.format(steps=steps, context=CONTEXT, sources=", ".join(sources), batch=batch, dp=dp,
                                      more=more))
        return path

    def source(self, name, **fields):
        more = "".join(f", {key} = {value}" for key, value in fields.items())
        return f'T.megatron {{ prefix = "{name}"{more} }}'

    def samples(self, what, *options, code=0):
        return json.loads(self.cairn("data", "samples", what, "--json", *options, code=code).stdout)["samples"]

    def check_documents(self, sample):
        """The ids are those of the documents that are named, in their order."""
        read = []
        for part in sample["documents"]:
            self.assertTrue(part["file"].endswith(".bin"))
            index = (self.folder / part["file"].replace(".bin", ".idx")).read_bytes()
            count = struct.unpack_from("<Q", index, 18)[0]
            lengths = struct.unpack_from(f"<{count}i", index, 34)
            offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
            self.assertLessEqual(part["end"], lengths[part["document"]])
            kind = {1: numpy.uint8, 8: numpy.uint16}[index[17]]
            at = offsets[part["document"]] // kind().itemsize
            read += numpy.fromfile(self.folder / part["file"], kind)[at + part["begin"]:at + part["end"]].tolist()
        self.assertEqual(read, sample["ids"][:len(read)])
        return len(read)

    def check_step(self, run, step, batch=BATCH):
        """A run of only a step's ids, a source for each sample, has the step's loss."""
        found = self.samples(run, "--step", step, "--ids")
        self.assertEqual(len(found), batch)
        for k, sample in enumerate(found):
            self.assertEqual((sample["step"], sample["trained"], len(sample["ids"])), (step, True, CONTEXT + 1))
            self.assertEqual(self.check_documents(sample), CONTEXT)
            self.pair(f"one-{k}", [bytes(sample["ids"])])
        again = self.still("again", [self.source(f"one-{k}") for k in range(batch)], steps=1, dp=1, batch=batch)
        self.train(again, f"{run}-again-{step}")
        for key in ("loss", "grad_norm"):
            self.assertAlmostEqual(self.metrics(f"{run}-again-{step}")[1][key], self.metrics(run)[step][key], delta=1e-5)

    def test_a_step_is_told_as_it_was_trained(self):
        """Through stages with another blend and another batch, and data that have grown."""
        self.pair("a", self.texts(1, 90))
        self.pair("b", self.texts(2, 30))
        stage = "stages = { T.stage { at = T.steps(4), data = { weights = { b = 5 } } }, T.stage { at = T.steps(10), batch = { samples = 8 } } },"
        recipe = self.still("still", [self.source("a", split="{ 90, 10 }"), self.source("b")], steps=8, more=stage)
        before = self.samples(recipe, "--step", "1..8", "--ids")
        self.train(recipe, "run")
        self.assertFalse(any(one.pop("trained") for one in before))
        done = self.samples("run", "--step", "1..8", "--ids")
        self.assertTrue(all(one.pop("trained") for one in done))
        self.assertEqual(done, before)
        shares = [sum(one["source"] == "b" for one in before if one["step"] == step) for step in (1, 2, 3, 4, 5, 6, 7, 8)]
        self.assertEqual(shares, [3, 3, 3, 3, 5, 5, 5, 5])
        self.pair("b", self.texts(2, 30) + self.texts(3, 20))
        self.train(self.still("still", [self.source("a", split="{ 90, 10 }"), self.source("b")], more=stage), "run",
                   "--accept", "stop")
        for step, batch in ((2, BATCH), (5, BATCH), (11, 8)):
            with self.subTest(step=step):
                self.check_step("run", step, batch)
        done = self.samples("run", "--step", "1..8", "--ids")
        self.assertTrue(all(one.pop("trained") for one in done))
        self.assertEqual(done, before)
        held = max(one["epoch"] for one in self.samples("run", "--step", "1..12"))
        self.assertGreater(held, 0)
        # One position, and one document, are found again.
        wanted = self.samples("run", "--step", 7)[2]
        self.assertEqual(self.samples("run", "--position", wanted["position"]), [wanted])
        part = wanted["documents"][0]
        of_document = self.samples("run", "--document", f'{part["file"]}:{part["document"]}')
        everything = self.samples("run", "--step", "1..12")
        self.assertEqual(of_document, [one for one in everything if any(
            (other["file"], other["document"]) == (part["file"], part["document"]) for other in one["documents"])])
        self.assertIn(wanted, of_document)
        # The table for people.
        text = self.cairn("data", "samples", "run", "--step", 7, "--text", 10, "--source", wanted["source"]).stdout.decode()
        self.assertIn(f'step 7  position {wanted["position"]}  {wanted["source"]}', text)
        self.assertIn(f'{part["file"]}: document {part["document"]}, tokens {part["begin"]} to {part["end"] - 1}', text)

    def test_instruction_data_and_a_way_back(self):
        with open(self.folder / "chats.jsonl", "w") as out:
            for k, text in enumerate(self.texts(4, 60)):
                out.write(json.dumps({"prompt": text[:8].decode(), "completion": f"{k:02d}"}) + "\n")
        self.cairn("data", "chat", "chats.jsonl", "--out", "set", "--tokenizer", "bytes", "--chat", "plain")
        self.pair("a", self.texts(1, 90))
        packs = 'T.instruct { prefix = "set" }'
        recipe = self.still("mixed", [packs, self.source("a")], steps=9)
        self.train(recipe, "run")
        first = self.samples("run", "--step", "1..9", "--ids")
        for one in first:
            if one["source"] == "set":
                self.assertLessEqual(self.check_documents(one), CONTEXT)
        self.assertGreater(max(len(one["documents"]) for one in first if one["source"] == "set"), 1)
        # Each document's line in the file that it came from; a pair of another program has none.
        lines = (self.folder / "chats.jsonl").read_bytes()
        for one in first:
            for part in one["documents"]:
                self.assertEqual("origin" in part, one["source"] == "set")
                if "origin" in part:
                    self.assertEqual((part["origin"]["file"], part["origin"]["packed"]), ("chats.jsonl", ""))
                    row = json.loads(lines[part["origin"]["byte"]:].split(b"\n")[0])
                    self.assertEqual(row["completion"], f'{part["document"]:02d}')
        told = self.cairn("data", "samples", "run", "--step", "1..9", "--source", "set").stdout.decode()
        self.assertRegex(told, r"set.bin: document 0, tokens 0 to \d+; chats.jsonl at byte 0\n")
        other = self.still("mixed", [packs.replace(" }", ", weight = 3 }"), self.source("a")], steps=9)
        self.train(other, "run", "--from-step", "3")
        again = self.samples("run", "--step", "1..9", "--ids")
        self.assertEqual(again[:3 * BATCH], first[:3 * BATCH])
        self.assertNotEqual(again[3 * BATCH:], first[3 * BATCH:])
        lines = [self.metrics("run")[step]["source_loss"] for step in range(4, 10)]
        self.assertEqual([set(line) for line in lines], [{one["source"] for one in again if one["step"] == step}
                                                         for step in range(4, 10)])
        # Without the file of the first segment's order a checkpoint still knows where a later one stood.
        self.assertEqual(self.samples("run", "--step", "8", "--ids"), [one for one in again if one["step"] == 8])

    def test_positions_that_are_skipped(self):
        """From the beginning, and from where a run stands; the run is the one whose recipe said so at once."""
        self.pair("a", self.texts(1, 90))
        self.pair("b", self.texts(2, 30))
        sources = [self.source("a"), self.source("b")]
        recipe = self.still("still", sources, steps=8)
        whole = self.samples(recipe, "--step", "1..8", "--ids")

        def skipping(*ranges):
            return ("--set", "batch.skip={" + ",".join(f'"{one}"' for one in ranges) + "}")

        def left(*skipped):
            return [one for one in whole if one["position"] not in skipped]

        late = list(range(30, 38))
        ahead = self.samples(recipe, "--step", "1..6", "--ids", *skipping("30..37"))
        for one, other in zip(ahead, left(*late)):
            self.assertEqual({**one, "step": 0}, {**other, "step": 0})
        self.train(recipe, "at-once", *skipping("30..37"))
        self.train(self.still("still", sources, steps=3), "later")
        told = self.cairn("train", self.still("still", sources, steps=8), "--run", "later", "--accept", "stop",
                          *skipping("2..9", "30..37")).stdout.decode()
        self.assertIn("batch.skip", told)
        for run in ("at-once", "later"):
            lines = self.metrics(run)
            self.assertEqual([lines[step]["samples"] for step in range(1, 9)], [BATCH * step for step in range(1, 9)])
            done = self.samples(run, "--step", "1..8", "--ids")
            self.assertTrue(all(one["trained"] for one in done))
            self.assertEqual([one["position"] for one in done][:40], [one["position"] for one in left(*late)])
            self.check_step(run, 7)
            self.assertEqual([one["step"] for one in self.samples(run, "--position", "38")], [6])
            refused = self.cairn("data", "samples", run, "--position", "33", code=2).stderr.decode()
            self.assertIn("position 33 is in batch.skip: step 6 passes over it", refused)
        self.assertEqual([self.metrics("later")[step]["loss"] for step in range(1, 9)],
                         [self.metrics("at-once")[step]["loss"] for step in range(1, 9)])
        for wrong in ("3..2", "x", "-1..4", "1..", "0..200000000"):
            refused = self.cairn("check", recipe, *skipping(wrong), code=2).stderr.decode()
            self.assertIn("batch.skip", refused)

    def test_what_cannot_be_told_is_refused(self):
        self.pair("a", self.texts(1, 90))
        recipe = self.still("still", [self.source("a")], steps=4)

        def refused(*args, code=2):
            return self.cairn("data", "samples", *args, code=code).stderr.decode()

        self.assertIn("recipe.resolved.json", refused(self.folder, "--step", 1))
        self.assertIn("one of --step, --position, --document, --documents and --suspects", refused(recipe))
        self.assertIn("is no run folder", refused(recipe, "--suspects"))
        self.train(recipe, "run")
        self.assertIn("no such sample", refused("run", "--suspects", code=1))
        self.assertIn("step 6 is asked for, and the last one is 5", refused("run", "--step", "6"))
        self.assertIn("position 30", refused("run", "--position", "30"))
        self.assertEqual([one["trained"] for one in self.samples("run", "--step", "4..5")], BATCH * [True] + BATCH * [False])
        for wrong in ("0", "3..2", "x", "1..", "-1"):
            self.assertIn("expected a step or two", refused("run", f"--step={wrong}"))
        self.assertIn("expected FILE:D", refused("run", "--document", "a"))
        self.assertIn('no source "b"', refused("run", "--step", 1, "--source", "b"))
        self.assertIn("no such sample", refused("run", "--document", "a:90", code=1))
        self.pair("a", self.texts(2, 90))
        self.assertIn("is not what the run trained on", refused("run", "--step", 1))
        os.unlink(self.folder / "a.idx")
        self.assertIn("a.idx", refused("run", "--step", 1))
        lineage = self.folder / "run/lineage.jsonl"
        lineage.write_text(lineage.read_text()[:-20] + "\n")
        self.assertIn("lineage.jsonl", refused("run", "--step", 1, code=65))


if __name__ == "__main__":
    main()
