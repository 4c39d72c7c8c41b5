"""Instruction data in whole runs: the same in every layout, packed as if it were not, over a kill, and refused where it
does not fit."""

import json
import os
import random
import signal
import struct

import numpy

from harness import RunTest, main

import chat_model  # in tests/support, where the harness looks too

GOLDEN = chat_model.GOLDEN
TOPICS = ("rivers", "Flüsse", "other things")

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
  {more}
}}
"""


def trl_recipe(data):
    """One step of one sample on the model of tests/support/chat_model.py, as tests/fixtures/make_chat_training.py makes it."""
    sizes, training = chat_model.SIZES, chat_model.TRAINING
    return f"""
local T = require "cairn"
return T.recipe {{
  name = "trl", seed = 1, stop = T.steps(1), init = T.hf "model",
  model = T.llama {{ layers = {sizes["num_hidden_layers"]}, width = {sizes["hidden_size"]},
                    heads = {sizes["num_attention_heads"]}, kv_heads = {sizes["num_key_value_heads"]},
                    ffn = {sizes["intermediate_size"]}, context = 256, vocab = {sizes["vocab_size"]},
                    positions = T.rotary {{ theta = 10000 }}, norm_eps = 1e-5, tied_embeddings = false }},
  data = {data},
  batch = {{ samples = 1, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = {training["lr"]}, weight_decay = {training["weight_decay"]}, clip = {training["clip"]},
                        betas = {{ {training["betas"][0]}, {training["betas"][1]} }}, eps = {training["eps"]} }},
  checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = 100 }} }} }},
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
    def chats(self, name, count, least, most, *flags):
        """A set of conversations of `least` to `most` bytes, for the format plain; their topics in turn."""
        draw = random.Random(3)
        with open(self.folder / f"{name}.jsonl", "w") as out:
            for number in range(count):
                length = draw.randint(least, most) - 1  # and the end of the document
                asked = draw.randint(2, length - 3)
                words = "".join(draw.choice("abcdef ghij") for _ in range(length - 2)) + "xy"
                row = {"prompt": words[:asked], "completion": words[asked:], "topic": TOPICS[number % len(TOPICS)]}
                out.write(json.dumps(row) + "\n")
        return self.cairn("data", "chat", f"{name}.jsonl", "--out", name, "--tokenizer", "bytes", "--chat", "plain", "--json",
                          *flags)

    def source(self, prefix="set", **fields):
        more = "".join(f", {key} = {value}" for key, value in fields.items())
        return f'T.instruct {{ prefix = "{self.folder / prefix}"{more} }}'

    def chat_recipe(self, name, data=None, **changes):
        path = self.folder / f"{name}.lua"
        fields = dict(steps=8, context=64, samples=8, micro=2, mesh="tp = 1", data=data or self.source(), more="")
        path.write_text(RECIPE.format(**{**fields, **changes}))
        return path

    def lengths(self, name):
        index = (self.folder / f"{name}.idx").read_bytes()
        count = struct.unpack_from("<Q", index, 18)[0]
        return struct.unpack_from(f"<{count}i", index, 34)

    def steps(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return {m["step"]: (m["loss"], m["grad_norm"]) for m in map(json.loads, lines) if "loss" in m and "grad_norm" in m}

    def blend(self, *sources, more=""):
        tokens = f'T.megatron {{ prefix = "{self.folder / "tokens"}" }}'
        return f"T.blend {{ sources = {{ {', '.join([*sources, tokens])} }}{more} }}"

    def masked(self, run):
        return [line["masked_tokens"] for step, line in sorted(self.metrics(run).items())]

    def test_every_layout_trains_alike_and_a_killed_run_too(self):
        self.chats("set", 300, 8, 60)
        data = self.blend(self.source(weight=2), self.source(weight=2, name='"by sample"', weigh='"sample"'),
                          more=", mask_repeats = T.repeats { period = 1, count = 3 }")
        alone = self.chat_recipe("alone", data)
        self.train(alone, "alone")
        wanted = self.steps("alone")
        self.assertEqual(len(wanted), 8)
        self.assertGreater(sum(self.masked("alone")), 0)
        for mesh in ("tp = 2, pp = 2", "tp = 2, dp = 2, sequence_parallel = true", "cp = 2, pp = 2"):
            with self.subTest(mesh):
                name = "m" + str(abs(hash(mesh)))
                self.train(self.chat_recipe(name, data, mesh=mesh, micro=1 if "dp" in mesh else 2), name)
                got = self.steps(name)
                self.assertEqual(self.masked(name), self.masked("alone"))
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

    def test_weighed_by_sample_is_the_mean_over_conversations(self):
        self.chats("set", 200, 8, 60, "--channel", "topic")
        data = self.blend(self.source(weight=3, weigh='"sample"'))
        for name, mesh in (("alone", "tp = 1"), ("dp", "dp = 2"), ("both", "dp = 2, pp = 2")):
            self.train(self.chat_recipe(name, data, steps=2, more='deterministic = "layout",', mesh=mesh), name,
                       "--set", "optimizer.zero=1")
            self.assertEqual(self.steps(name), self.steps("alone"), name)
        # Written again: of each conversation the mean, of these the mean, which stands for the source's tokens.
        self.cairn("data", "losses", "alone", "--step", 2, "--out", "again")
        losses, targets, documents = (numpy.load(self.folder / f"again/{part}.npy") for part in ("losses", "targets", "documents"))
        samples = json.loads(self.cairn("data", "samples", "alone", "--step", 2, "--json").stdout)["samples"]
        sources = [sample["source"] for sample in samples]
        self.assertEqual((len(sources), sources.count("set")), (8, 6))
        of_conversations, of_tokens, of_topics, counted = [], [], {}, 0
        for sample, source in enumerate(sources):
            counts = targets[sample] >= 0
            if source == "set":
                counted += int(counts.sum())
                of_conversations += [losses[sample][counts & (documents[sample] == one)].astype(float).mean()
                                     for one in set(documents[sample][counts])]
                for document, loss in zip(documents[sample][counts], losses[sample][counts]):
                    of_topics.setdefault(TOPICS[document % len(TOPICS)], []).append(float(loss))
            else:
                of_tokens += list(losses[sample][counts].astype(float))
        mean = numpy.mean(of_conversations)
        wanted = (mean * counted + sum(of_tokens)) / (counted + len(of_tokens))
        told = self.metrics("alone")[2]
        self.assertAlmostEqual(told["source_loss"]["set"], mean, delta=1e-9)
        self.assertAlmostEqual(told["loss"], wanted, delta=1e-9)
        by_token = numpy.concatenate([losses[k][targets[k] >= 0] for k, source in enumerate(sources) if source == "set"])
        self.assertGreater(abs(by_token.astype(float).mean() - mean), 1e-4)
        self.assertEqual(set(told["channel_loss"]), set(TOPICS))
        for topic, loss in told["channel_loss"].items():
            self.assertAlmostEqual(loss, numpy.mean(of_topics[topic]), delta=1e-9, msg=topic)
        report = self.cairn("report", "alone").stdout.decode()
        self.assertRegex(report, r"channel +Flüsse: \d\.\d{3} -> \d\.\d{3} nats a token, in 2 steps")

    def test_a_gradient_by_sample_is_the_mean_of_gradients(self):
        """Norms of the gradients of two conversations, and of both by token, give the angle between the two."""
        rows = [{"prompt": "what is it", "completion": "no"}, {"prompt": "tell", "completion": "a long answer, in many words"}]
        norm, loss, counted = {}, {}, {}
        for name, some, weigh in (("a", rows[:1], "token"), ("b", rows[1:], "token"), ("token", rows, "token"), ("sample", rows, "sample")):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
            made = self.cairn("data", "chat", f"{name}.jsonl", "--out", name, "--tokenizer", "bytes", "--chat", "plain", "--json")
            counted[name] = json.loads(made.stdout)["counted"]
            data = self.source(name, weigh=f'"{weigh}"')
            self.train(self.chat_recipe(name, data, steps=1, samples=1, micro=1), "run-" + name)
            loss[name], norm[name] = self.steps("run-" + name)[1]
        share = counted["a"] / counted["token"]
        self.assertLess(share, 0.2)
        self.assertAlmostEqual(loss["token"], share * loss["a"] + (1 - share) * loss["b"], delta=1e-5)
        self.assertAlmostEqual(loss["sample"], (loss["a"] + loss["b"]) / 2, delta=1e-5)
        product = (norm["token"] ** 2 - (share * norm["a"]) ** 2 - ((1 - share) * norm["b"]) ** 2) / (2 * share * (1 - share))
        wanted = (norm["a"] ** 2 + norm["b"] ** 2 + 2 * product) ** 0.5 / 2
        self.assertAlmostEqual(norm["sample"], wanted, delta=1e-4 * wanted)
        self.assertGreater(abs(norm["token"] - wanted), 1e-2 * wanted)

    def test_a_run_may_begin_to_weigh_by_sample(self):
        self.chats("set", 100, 8, 60)
        self.train(self.chat_recipe("run", steps=2), "run")
        job = self.train(self.chat_recipe("run", self.source(weigh='"sample"'), steps=3), "run")
        self.assertIn('data.set.weigh "token" -> "sample"', job.output())
        told = {event["field"]: event["rule"] for event in self.events("run", "recipe_changed")}
        self.assertEqual(told.get("data.set.weigh"), "from the next step on", told)

    def test_a_validation_loss_by_sample_is_of_all_batches_together(self):
        self.chats("set", 120, 8, 60)
        data = self.source(weigh='"sample"', split="{ 50, 50 }")
        told = []
        for samples, batches in ((1, 8), (8, 1)):
            name = f"valid-{samples}"
            more = f"eval = T.eval {{ at = T.every {{ steps = 1 }}, steps = {batches} }},"
            self.train(self.chat_recipe(name, data, steps=1, samples=samples, micro=1, more=more), name,
                       "--set", "optimizer.peak_lr=1e-12")
            told.append(self.metrics(name)[1]["valid_loss"])
        self.assertAlmostEqual(told[0], told[1], delta=1e-6)

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

    def test_a_step_is_that_of_trl(self):
        """Each row form and template with one of the tokenizers; with CAIRN_TEST_ALL in the environment with each."""
        rows = json.loads((GOLDEN / "chat/expected.json").read_text())
        (self.folder / "brackets.json").write_text(json.dumps(rows["brackets"]))
        chat_model.write_hf_folder(self.folder / "model")
        for name in ("gpt2", "qwen2", "llama2"):
            (self.folder / name).mkdir()
            (self.folder / name / "tokenizer.json").write_text(json.dumps(chat_model.tokenizer_json(name, rows["specials"])))
            (self.folder / name / "special_tokens_map.json").write_text(json.dumps({"eos_token": rows["eos"]}))
        before = chat_model.weights()
        trained = json.loads((GOLDEN / "chat/training.json").read_text())["cases"]
        self.assertEqual(len(trained), 36)
        for number, (row, wanted) in enumerate(zip(rows["cases"], trained)):
            self.assertEqual((row["tokenizer"], row["case"]), (wanted["tokenizer"], wanted["case"]))
            if (number % 12 + number // 12) % 3 and "CAIRN_TEST_ALL" not in os.environ:
                continue
            with self.subTest(tokenizer=row["tokenizer"], case=row["case"]):
                name = f"trl-{number}"
                (self.folder / f"{name}.jsonl").write_text(json.dumps(row["row"]) + "\n")
                form = "brackets.json" if row["format"] == "brackets" else row["format"]
                self.cairn("data", "chat", f"{name}.jsonl", "--out", name, "--tokenizer", row["tokenizer"],
                           "--chat", form)
                (self.folder / f"{name}.lua").write_text(trl_recipe(self.source(name)))
                self.train(self.folder / f"{name}.lua", name)
                loss, norm = self.steps(name)[1]
                self.assertAlmostEqual(loss, wanted["loss"], delta=1e-6 * wanted["loss"])
                self.assertAlmostEqual(norm, wanted["grad_norm"], delta=1e-5 * wanted["grad_norm"])
                self.cairn("export", name, f"{name}-hf", "--dtype", "f32")
                update = chat_model.digest(before, chat_model.read_weights(self.folder / f"{name}-hf"))
                self.assertEqual(set(update), set(wanted["update"]))
                for tensor, (size, along) in wanted["update"].items():
                    self.assertGreater(size, 1e-3)
                    self.assertAlmostEqual(update[tensor][0], size, delta=5e-5 * size, msg=tensor)
                    self.assertAlmostEqual(update[tensor][1], along, delta=5e-5 * size, msg=tensor)

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
        job = self.start(self.chat_recipe("further", self.source(weigh='"sample"')), "refused", "--set", "model.mtp.depth=1")
        self.assertEqual(job.wait(), 2)
        self.assertIn('a T.instruct says weigh = "sample"', job.output())
        os.unlink(self.folder / "set.loss")
        job = self.start(recipe, "missing")
        self.assertEqual(job.wait(), 2)
        self.assertIn("set.loss", job.output())
        self.assertIn("cairn data chat", job.output())


if __name__ == "__main__":
    main()
