"""Instruction data in whole runs: the same in every layout, packed as if it were not, over a kill, and refused where it
does not fit."""

import json
import os
import random
import signal
import struct

from harness import RunTest, main

RECIPE = """
local T = require "cairn"
return T.recipe {{
  name = "chat", seed = 5, stop = T.steps({steps}),
  model = T.llama {{ layers = 2, width = 32, heads = 4, kv_heads = 2, ffn = 64, context = {context}, vocab = 256 }},
  tokenizer = T.bytes,
  data = {data},
  batch = {{ samples = {samples}, micro = {micro} }},
  optimizer = T.adamw {{ peak_lr = 1e-2, clip = 1.0 }},
  mesh = T.mesh {{ {mesh} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 4 }} }}, keep = {{ T.last(2) }},
                              snapshot = T.every {{ steps = 1 }} }},
}}
"""


def windows_of(lengths, window):
    """How many windows the packing rule of the documentation makes, written plainly."""
    made, still = 0, []  # room of those that are open, by age
    for length in lengths:
        fits = [room for room in still if room >= length]
        if fits:
            at = still.index(min(fits))
        else:
            made += 1
            still = still[1:] if len(still) == 64 else still
            still.append(window)
            at = len(still) - 1
        still[at] -= length
        if still[at] == 0:
            del still[at]
    return made


class Instruct(RunTest):
    def chats(self, name, count, least, most):
        """A set of conversations of `least` to `most` bytes, for the format plain."""
        draw = random.Random(3)
        with open(self.folder / f"{name}.jsonl", "w") as out:
            for _ in range(count):
                length = draw.randint(least, most) - 1  # and the end of the document
                asked = draw.randint(2, length - 3)
                words = "".join(draw.choice("abcdef ghij") for _ in range(length - 2)) + "xy"
                out.write(json.dumps({"prompt": words[:asked], "completion": words[asked:]}) + "\n")
        return self.cairn("data", "chat", f"{name}.jsonl", "--out", name, "--tokenizer", "bytes", "--chat", "plain", "--json")

    def source(self, name="set", **fields):
        more = "".join(f", {key} = {value}" for key, value in fields.items())
        return f'T.instruct {{ prefix = "{self.folder / name}"{more} }}'

    def chat_recipe(self, name, data=None, **changes):
        path = self.folder / f"{name}.lua"
        fields = dict(steps=8, context=64, samples=8, micro=2, mesh="tp = 1", data=data or self.source())
        path.write_text(RECIPE.format(**{**fields, **changes}))
        return path

    def lengths(self, name):
        index = (self.folder / f"{name}.idx").read_bytes()
        count = struct.unpack_from("<Q", index, 18)[0]
        return struct.unpack_from(f"<{count}i", index, 34)

    def steps(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return {m["step"]: (m["loss"], m["grad_norm"]) for m in map(json.loads, lines) if "loss" in m and "grad_norm" in m}

    def test_every_layout_trains_alike_and_a_killed_run_too(self):
        self.chats("set", 300, 8, 60)
        data = f'T.blend {{ sources = {{ {self.source(weight=3)}, T.megatron {{ prefix = "{self.folder / "tokens"}" }} }} }}'
        alone = self.chat_recipe("alone", data)
        self.train(alone, "alone")
        wanted = self.steps("alone")
        self.assertEqual(len(wanted), 8)
        for mesh in ("tp = 2, pp = 2", "tp = 2, dp = 2, sequence_parallel = true", "cp = 2, pp = 2"):
            with self.subTest(mesh):
                name = "m" + str(abs(hash(mesh)))
                self.train(self.chat_recipe(name, data, mesh=mesh, micro=1 if "dp" in mesh else 2), name)
                got = self.steps(name)
                for step, numbers in wanted.items():
                    for a, b in zip(numbers, got[step]):
                        self.assertAlmostEqual(a, b, delta=2e-4 * max(1, abs(a)))
        job = self.start(self.chat_recipe("killed", data, mesh="pp = 2"), "killed")
        self.until_step("killed", 3, job)
        os.kill(job.children()[1], signal.SIGKILL)
        self.finish(job)
        self.assertEqual(self.steps("killed")[8], self.steps_of_layout("pp = 2", data)[8])

    def steps_of_layout(self, mesh, data):
        self.train(self.chat_recipe("whole", data, mesh=mesh), "whole")
        return self.steps("whole")

    def test_packed_is_as_if_each_stood_alone(self):
        done = json.loads(self.chats("set", 64, 17, 32).stdout)  # two in a window of 64, one in a window of 32
        self.assertEqual(done["documents"], 64)
        alone = self.chat_recipe("alone", context=32, samples=64, micro=8, steps=1)
        self.train(alone, "alone")
        # All windows of the packed set in one step.
        windows = windows_of(self.lengths("set"), 64)
        self.assertLess(windows, 40)
        self.train(self.chat_recipe("packed", samples=windows, micro=1, steps=1), "packed")
        facts = json.loads(self.cairn("check", "packed.lua", "--json").stdout)
        self.assertEqual(facts["data"]["sources"][0]["train_windows"], windows, facts)
        for a, b in zip(self.steps("alone")[1], self.steps("packed")[1]):
            self.assertAlmostEqual(a, b, delta=1e-5 * max(1, abs(a)))

    def test_only_answers_are_learnt(self):
        with open(self.folder / "fixed.jsonl", "w") as out:
            draw = random.Random(1)
            for _ in range(400):
                asked = "".join(draw.choice("abcdefghijklmnop") for _ in range(12))
                out.write(json.dumps({"prompt": asked + "=", "completion": asked[0]}) + "\n")
        self.cairn("data", "chat", "fixed.jsonl", "--out", "set", "--tokenizer", "bytes", "--chat", "plain")
        self.train(self.chat_recipe("fixed", steps=40), "fixed")
        losses = self.steps("fixed")
        # An answer and its end can be learnt; the prompt, 4 bits a letter, cannot: over all tokens 2.3 would be the least.
        self.assertLess(losses[40][0], 1.9)

    def test_what_does_not_fit_is_refused(self):
        self.chats("set", 40, 8, 60)
        refused = (("batch.tokens", ("--set", "batch.tokens=32"), "would cut conversations of T.instruct"),
                   ("too long", ("--set", "model.context=16"), 'overlong = "drop"'))
        recipe = self.chat_recipe("a")
        for name, more, text in refused:
            with self.subTest(name):
                job = self.start(recipe, "refused", *more)
                self.assertEqual(job.wait(), 2)
                self.assertIn(text, job.output())
        self.assertFalse((self.folder / "refused/metrics.jsonl").exists())
        os.unlink(self.folder / "set.loss")
        job = self.start(recipe, "missing")
        self.assertEqual(job.wait(), 2)
        self.assertIn("set.loss", job.output())
        self.assertIn("cairn data chat", job.output())


if __name__ == "__main__":
    main()
