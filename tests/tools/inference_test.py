"""generate, eval and data encode: of Hugging Face folders, imported checkpoints and their tokenizers."""

import gzip
import json
import lzma
import math
import os
import pathlib
import shutil
import struct

from program import ProgramTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
TOKENIZER = GOLDEN / "tokenizers" / "gpt2.json"


class InferenceTest(ProgramTest):
    def model(self, name="hf-llama-gqa-sharded"):
        """A folder with the tiny vocabulary of the model as its tokenizer.json: byte-level, of 131 ids at most."""
        folder = pathlib.Path(self.path("model"))
        shutil.copytree(GOLDEN / name, folder)
        spec = json.loads(TOKENIZER.read_text())
        vocab = {token: k for token, k in spec["model"]["vocab"].items() if len(token) == 1 and ord(token) < 0x7F}
        vocab["\u0120"] = 96  # the space
        vocab = {token: k for k, token in enumerate(sorted(vocab))}
        spec["model"].update(vocab=vocab, merges=[])
        spec["added_tokens"] = [{"id": 120, "content": "<end>", "special": True}]
        folder.joinpath("tokenizer.json").write_text(json.dumps(spec))
        folder.joinpath("tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        folder.joinpath("generation_config.json").unlink()
        config = json.loads(folder.joinpath("config.json").read_text())
        config.pop("eos_token_id")
        folder.joinpath("config.json").write_text(json.dumps(config))
        return "model"

    def test_generating_from_a_folder_and_from_its_import_is_the_same(self):
        model = self.model()
        self.cairn("import", model, "imported", "--mesh", "tp=2")
        options = ["--prompt", "In the", "--max-tokens", 40, "--seed", 3, "--ignore-eos"]
        made = self.cairn_json("generate", "--from", model, *options)
        text = made["texts"][0]
        self.assertEqual((len(text["tokens"]), text["finish"], text["prompt_tokens"]), (40, "length", 6))
        again = self.cairn_json("generate", "imported/step-00000000", *options)
        self.assertEqual(again["texts"], made["texts"])
        other = self.cairn_json("generate", "--from", model, *options[:-2], 4, "--ignore-eos")
        self.assertNotEqual(other["texts"][0]["tokens"], text["tokens"])
        plain = self.cairn("generate", "--from", model, *options, "--special").stdout
        self.assertTrue(plain.startswith("In the"))

        # Batches of prompts from a file, and stops.
        self.write("prompts.txt", 'In the\n"two\\nlines"\n\nthird\n')
        batch = self.cairn_json("generate", "--from", model, "--prompts", "prompts.txt", *options[2:])["texts"]
        self.assertEqual([t["prompt"] for t in batch], ["In the", "two\nlines", "third"])
        self.assertEqual(batch[0]["tokens"], text["tokens"])
        stop = text["text"][5:8]
        stopped = self.cairn_json("generate", "--from", model, *options, "--stop", stop)["texts"][0]
        self.assertEqual((stopped["finish"], stopped["text"]), ("stop", text["text"][:text["text"].index(stop)]))
        bf16 = self.cairn_json("generate", "--from", model, "--precision", "bf16", *options)["texts"][0]
        self.assertEqual(len(bf16["tokens"]), 40)

    def glm(self):
        """GLM-130B's files with a tokenizer of single letters; the last four rows are its marks."""
        folder = pathlib.Path(self.path("glm"))
        shutil.copytree(GOLDEN / "ranks-glm130b", folder)
        spec = json.loads(TOKENIZER.read_text())
        vocab = {letter: k for k, letter in enumerate("abcdefghijklmnopqrstuvw")}
        spec["model"].update(vocab={**vocab, "\u0120": 23}, merges=[])
        spec["added_tokens"] = []
        folder.joinpath("tokenizer.json").write_text(json.dumps(spec))
        return "glm"

    def test_gaps_are_filled_where_the_model_was_trained_to(self):
        glm = self.glm()
        marks = ["--mask-token", 25, "--gmask-token", 26, "--start-token", 27, "--end-token", 28]
        made = lambda prompt, *options: self.cairn_json(  # noqa: E731
            "generate", "--from", glm, "--prompt", prompt, "--max-tokens", 8, "--temperature", 0, *options)["texts"][0]
        plain = made("some words")
        self.assertEqual((plain["prompt_tokens"], plain["finish"]), (10, "length"))  # a prefix alone: no marks are known
        end, same, gap = made("some words", *marks), made("some words[gMASK]", *marks), made("some [MASK] words", *marks)
        self.assertEqual(end["tokens"], same["tokens"])
        self.assertEqual((end["prompt_tokens"], gap["prompt_tokens"]), (12, 13))
        self.assertNotEqual(gap["tokens"], end["tokens"])
        self.assertNotEqual(plain["tokens"], end["tokens"])
        # An end token ends the text: the one that comes third is taken for it.
        third = end["tokens"][2]
        stopped = made("some words", *marks[:-1], third)
        self.assertEqual(stopped["finish"], "eos")
        self.assertEqual(stopped["tokens"], end["tokens"][:end["tokens"].index(third)])
        # From config.json, and from an import in a layout of its own.
        config = json.loads(pathlib.Path(self.path("glm/config.json")).read_text())
        config.update(mask_token_id=25, gmask_token_id=26, bos_token_id=27, eos_token_id=28)
        self.write("glm/config.json", json.dumps(config))
        self.assertEqual(made("some [MASK] words"), gap)
        self.cairn("import", glm, "imported", "--mesh", "tp=2,pp=2")
        again = self.cairn_json("generate", "--from", "imported", "--prompt", "some [MASK] words", "--max-tokens", 8,
                                "--temperature", 0)["texts"][0]
        self.assertEqual(again, gap)
        told = lambda *options: self.cairn("generate", "--from", glm, *options, code=2).stderr  # noqa: E731
        self.assertIn("two [MASK]", told("--prompt", "[MASK] [MASK]"))
        self.assertIn("nothing may follow", told("--prompt", "[gMASK] a"))
        self.assertIn("the model has 29 ids", told("--prompt", "a", "--mask-token", 29))
        self.assertIn("reads a prompt as a whole", told("--prompt", "a" * 34))
        self.assertIn("perplexity is of causal models", self.cairn("eval", "--from", glm, "--text", "glm/config.json",
                                                                   code=2).stderr)
        self.assertIn("mask is causal", self.cairn("generate", "--from", self.model(), "--mask-token", 1, code=2).stderr)

    def test_numbers_that_python_writes_stop_nothing_where_they_are_not_read(self):
        model = self.model()
        text = pathlib.Path(self.path("model/config.json")).read_text().rstrip().rstrip("}")
        self.write("model/config.json", text + ', "time_step_limit": [0.0, Infinity], "some_score": NaN, "other": 1e999}')
        self.write("model/generation_config.json", '{"eos_token_id": 7, "temperature": NaN}')
        made = self.cairn_json("generate", "--from", model, "--prompt", "In the", "--max-tokens", 2)["texts"][0]
        self.assertEqual(made["prompt_tokens"], 6)
        self.cairn("export", model, "rewritten")
        kept = json.loads(pathlib.Path(self.path("rewritten/config.json")).read_text())
        self.assertEqual(kept["time_step_limit"], [0.0, math.inf])
        self.assertTrue(math.isnan(kept["some_score"]))
        self.write("model/config.json", text + ', "rms_norm_eps": NaN}' if "rms_norm_eps" not in text else
                   text.replace('"rms_norm_eps"', '"rms_norm_eps": NaN, "was"') + "}")
        self.assertIn("rms_norm_eps", self.cairn("generate", "--from", model, "--prompt", "a", code=2).stderr)

    def test_a_damaged_file_beside_the_weights_is_refused_by_every_reader_with_its_name(self):
        model = self.model()
        for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json", "generation_config.json"):
            path = pathlib.Path(self.path(f"model/{name}"))
            before = path.read_bytes() if path.exists() else None
            for content, said in ((b'{"a": ', "byte 6: not JSON"), (b"[]", "expected a JSON object"), (b"", "is empty")):
                path.write_bytes(content)
                commands = (("generate", model, "--prompt", "a"), ("import", model, "out"), ("convert", "--check", model),
                            ("convert", model, "out", "--to", "hf"))
                for command in commands if content == b"[]" and name.startswith("added") else commands[:1]:
                    with self.subTest(name=name, content=content, command=command[0]):
                        done = self.cairn(*command, code=2)
                        self.assertIn(f"model: {name}: ", done.stderr)
                        self.assertIn(said, done.stderr)
            path.unlink()
            path.symlink_to("gone")
            for command in (("generate", model, "--prompt", "a"), ("import", model, "out"),
                            ("data", "encode", "a", "--tokenizer", "model")):
                if command[0] != "data" or not name.startswith("gen"):
                    self.assertIn(f"model/{name}: is a link to gone", self.cairn(*command, code=2).stderr)
            path.unlink()
            if before is not None:
                path.write_bytes(before)
        self.cairn("import", model, "out")
        # No other tokenizer takes the place of one that a link does not lead to.
        os.makedirs(self.path("linked"))
        shutil.copy(GOLDEN / "sentencepiece-tiny" / "tiny.model", self.path("linked/tokenizer.model"))
        os.symlink("gone", self.path("linked/tokenizer.json"))
        for command in (("data", "encode", "a", "--tokenizer", "linked"), ("export", "out", "hf", "--like", "linked")):
            self.assertIn("linked/tokenizer.json: is a link to gone", self.cairn(*command, code=2).stderr)

    def test_warnings_of_a_folder_are_those_of_its_import(self):
        model = self.model()
        config = json.loads(pathlib.Path(self.path("model/config.json")).read_text())
        config["some_key"] = 3
        self.write("model/config.json", json.dumps(config))
        self.write("a.txt", "some text of words")
        for command in (("generate", model, "--prompt", "a", "--max-tokens", 1), ("eval", model, "--text", "a.txt"),
                        ("import", model, "out")):
            self.assertIn("warning: not read: some_key of config.json", self.cairn(*command).stderr)
            if command[0] != "import":
                self.assertIn("not read: some_key", self.cairn_json(*command)["warnings"][0])

    def test_prompts_and_lines_of_other_forms_are_refused_with_their_place(self):
        model = self.model()
        made = lambda content, code=2: (self.write("p", content), self.cairn(  # noqa: E731
            "generate", model, "--prompts", "p", "--max-tokens", 1, "--json", code=code))[1]
        self.assertIn("p: is one JSON array", made('["a",\n "b"]').stderr)
        self.assertIn("p:2: is a JSON array", made('a\n["b"]').stderr)
        self.assertIn("p:1: has half of a surrogate pair", made('"a\\ud83d"').stderr)
        self.assertEqual(json.loads(made("\ufeffa", 0).stdout)["texts"][0]["prompt"], "a")
        self.write("bad.jsonl", '{"text": "some words"}\n{"text": \n')
        for command in (("eval", model, "--text", "bad.jsonl"), ("data", "tokenize", "bad.jsonl", "--out", "set")):
            self.assertIn("bad.jsonl:2: byte 9: not JSON", self.cairn(*command, code=2).stderr)
        said = self.cairn("eval", model, "--text", "a=-", "--text", "b=-", text_in=b"some words", code=2).stderr
        self.assertIn("standard input is named twice", said)
        self.write("half.bin", struct.pack("<40H", *range(40)))
        self.assertIn("half.idx: is missing", self.cairn("eval", model, "--data", "half", code=2).stderr)
        with open(self.path("long.jsonl"), "wb") as f:
            f.truncate(65 << 20)
        self.assertIn("long.jsonl:1: a line of more than 64.0 MiB",
                      self.cairn("eval", model, "--text", "long.jsonl", "--any-text", "--json-key", "text", code=2).stderr)

    def test_a_top_query_model_generates_from_its_published_files_and_its_import(self):
        folder = pathlib.Path(self.path("geex"))
        shutil.copytree(GOLDEN / "ranks-codegeex", folder)
        shutil.copy(pathlib.Path(self.path(self.glm())) / "tokenizer.json", folder)
        made = [self.cairn_json("generate", "--from", source, "--prompt", "def f", "--max-tokens", 12, "--seed", 2)["texts"]
                for source in ("geex", self.cairn("import", "geex", "cut", "--mesh", "tp=2,pp=2") and "cut")]
        self.assertEqual(made[0], made[1])
        self.assertEqual(len(made[0][0]["tokens"]), 12)

    def test_generate_and_eval_report_what_they_cannot_do(self):
        model = self.model()
        self.assertIn("--from", self.cairn("generate", code=2).stderr)
        self.assertIn("nowhere", self.cairn("generate", "--from", "nowhere", code=2).stderr)
        bad = self.cairn("generate", "--from", model, "--tokenizer", TOKENIZER, code=2).stderr
        self.assertIn("they do not belong together", bad)
        self.write("t.json", TOKENIZER.read_text().replace('"type":"BPE"', '"type":"WordPiece"'))
        self.assertIn("WordPiece", self.cairn("generate", "--from", model, "--tokenizer", "t.json", code=2).stderr)
        os.remove(self.path("model/tokenizer.json"))
        self.assertIn("has no tokenizer", self.cairn("generate", "--from", model, code=2).stderr)

    def test_eval_of_texts_and_stores_by_name(self):
        model = self.model()
        text = "In the beginning God created the heaven and the earth. " * 12
        self.write("a.txt", text)
        self.cairn("data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "model/tokenizer.json")
        row = lambda *options: self.cairn_json("eval", "--from", model, *options)  # noqa: E731
        both = row("--text", "words=a.txt", "--data", "set")
        self.assertEqual([s["name"] for s in both["sets"]], ["words", "set"])
        words, store = both["sets"]
        self.assertEqual(words["tokens"], len(text) - 1)
        self.assertEqual((words["loss"], words["tokens"]), (store["loss"], store["tokens"]))
        self.assertAlmostEqual(words["perplexity"], math.exp(words["loss"]), places=6)
        self.assertAlmostEqual(words["bits_per_byte"], words["loss"] / math.log(2), places=6)  # a token is a byte here
        self.assertEqual(both["window"], 68)
        # A stride changes what a token sees, not which tokens count; a window of 2 is a bigram's.
        strided = row("--text", "a.txt", "--stride", 17)["sets"][0]
        self.assertEqual(strided["tokens"], words["tokens"])
        self.assertNotEqual(strided["loss"], words["loss"])
        some = row("--text", "a.txt", "--max-tokens", 100)["sets"][0]
        self.assertEqual(some["tokens"], 100)
        self.cairn("data", "tokenize", "a.txt", "--out", "lines", "--tokenizer", "model", "--documents", "line", "--eod")
        lines = row("--data", "lines", "--documents")["sets"][0]
        self.assertEqual((lines["documents"], lines["tokens"]), (1, len(text)))  # with the end of the document
        table = self.cairn("eval", "--from", model, "--text", "words=a.txt", "--data", "set").stdout
        self.assertIn("perplexity", table)
        self.assertIn("words", table)
        for options, message in ((["--text", "a.txt", "--window", 69], "context is 68"), ([], "--text"),
                                 (["--text", "a.txt", "--window", 8, "--stride", 9], "left out"),
                                 (["--text", "no.txt"], "no.txt"), (["--data", "nothing"], "nothing")):
            self.assertIn(message, self.cairn("eval", "--from", model, *options, code=2).stderr)

    def test_eval_has_the_validation_loss_of_the_run(self):
        lines = [f"line {k * 7919 % 1000} of {'many' if k % 3 else 'a few'}" for k in range(400)]
        text = "".join(line + "\0" for line in lines).encode()
        ids = struct.pack(f"<{len(text)}H", *text)
        self.write("train.bin", ids)
        self.write("valid.bin", ids[:2 * (12 * 32 + 1)])  # 12 windows
        for name, options, window in (("parted", "document_end = 0", 32), ("counted", "document_end = 0, document_loss = true", 32),
                                      ("seen", "document_end = 0, reset_attention = false, reset_positions = false", 32),
                                      ("plain", "", 32), ("short", "document_end = 0", 16)):
            with self.subTest(name):
                self.write("run.lua", f"""local T = require "cairn"
return T.recipe {{ name = "run", seed = 1, stop = T.steps(4), model = T.llama {{ layers = 1, width = 16, heads = 2, context = 32,
  vocab = 256 }}, tokenizer = T.bytes, data = T.token_files {{ train = "train.bin", valid = "valid.bin" }},
  objective = {{ {options} }}, batch = {{ samples = 4, micro = 2, tokens = {window} }}, optimizer = T.adamw {{ peak_lr = 1e-2 }},
  precision = "fp32", eval = {{ steps = 3, at = T.every {{ steps = 4 }} }} }}""")
                self.cairn("train", "run.lua", "--nproc", 1, "--run", name)
                with open(self.path(f"{name}/metrics.jsonl")) as f:
                    trained = [row["valid_loss"] for row in map(json.loads, f) if row.get("valid_loss")][-1]
                found = self.cairn_json("eval", name, "--data", "valid.bin", "--dtype", "uint16")
                self.assertEqual(found["window"], window)
                self.assertAlmostEqual(found["sets"][0]["loss"], trained, places=5)
                self.assertEqual(found["objective"] is None, name == "plain")
                table = self.cairn("eval", name, "--data", "valid.bin", "--dtype", "uint16").stdout
                self.assertIn("not parted" if name == "plain" else "documents end at token 0", table)
                if name == "parted":
                    across = self.cairn_json("eval", name, "--data", "valid.bin", "--dtype", "uint16", "--across-documents")
                    self.assertGreater(abs(across["sets"][0]["loss"] - trained), 1e-3)
                    self.assertIsNone(across["objective"])
        # The same documents as a pair, as JSON lines and through a pipe.
        json_lines = "".join(json.dumps({"text": line}) + "\n" for line in lines[:9])
        self.write("lines.jsonl", json_lines)
        self.cairn("data", "tokenize", "lines.jsonl", "--out", "pair")
        pair = self.cairn_json("eval", "parted", "--data", "pair", "--documents")["sets"][0]
        for options, given in ((["--text", "lines.jsonl"], None), (["--text", "-", "--json-key", "text"], json_lines.encode())):
            done = json.loads(self.cairn("eval", "parted", *options, "--json", text_in=given).stdout)["sets"][0]
            self.assertEqual([done[k] for k in ("loss", "tokens", "documents", "bits_per_byte")],
                             [pair[k] for k in ("loss", "tokens", "documents", "bits_per_byte")])
            self.assertEqual(done["json_key"], "text")
        self.assertIn('"text" of 9 documents', self.cairn("eval", "parted", "--text", "lines.jsonl").stdout)
        self.write("named.txt", json_lines)
        self.assertIn("named.txt: looks like JSON", self.cairn("eval", "parted", "--text", "named.txt", code=2).stderr)
        self.assertIn("lines.jsonl:1: \"body\" is missing",
                      self.cairn("eval", "parted", "--text", "lines.jsonl", "--json-key", "body", code=2).stderr)
        self.write("lines.jsonl.gz", gzip.compress(json_lines.encode()))
        self.assertEqual(self.cairn_json("eval", "parted", "--text", "lines.jsonl.gz")["sets"][0]["loss"], pair["loss"])
        self.write("packed.txt", gzip.compress(json_lines.encode()))
        self.assertIn("packed.txt, unpacked: looks like JSON",
                      self.cairn("eval", "parted", "--text", "packed.txt", code=2).stderr)
        self.assertIn("prompt as a JSON string", self.cairn("generate", "parted", "--prompts", "named.txt", code=2).stderr)
        self.write("packed.txt", lzma.compress(json_lines.encode()))
        self.assertIn("is packed by xz", self.cairn("generate", "parted", "--prompts", "packed.txt", code=2).stderr)
        self.assertIn("--documents is for Megatron pairs", self.cairn("eval", "parted", "--data", "valid.bin", "--dtype",
                                                                      "uint16", "--documents", code=2).stderr)

    def test_eval_of_a_store_needs_no_tokenizer(self):
        model = self.model()
        self.write("a.txt", "In the beginning God created the heaven and the earth. " * 12)
        self.cairn("data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "model/tokenizer.json")
        known = self.cairn_json("eval", "--from", model, "--data", "set")["sets"][0]
        tokenizer = self.path("model/tokenizer.json")
        with open(tokenizer) as f:
            spec = json.load(f)
        spec["model"]["type"] = "WordPiece"
        for broken in (None, json.dumps(spec)):
            os.remove(tokenizer)
            if broken is not None:
                self.write("model/tokenizer.json", broken)
            row = self.cairn_json("eval", "--from", model, "--data", "set")["sets"][0]
            self.assertEqual((row["loss"], row["tokens"], row["bits_per_byte"]), (known["loss"], known["tokens"], None))
            self.assertIn(" - ", self.cairn("eval", "--from", model, "--data", "set").stdout)
            self.cairn("eval", "--from", model, "--text", "a.txt", code=2)
            if broken is None:
                self.write("model/tokenizer.json", "")
        self.cairn("eval", "--from", model, "--data", "set", "--tokenizer", "no.json", code=2)  # it was named

    def test_encode_shows_ids(self):
        out = self.cairn("data", "encode", "--tokenizer", TOKENIZER, "the end", "").stdout.split("\n")
        self.assertEqual(len(out), 3)
        self.write("lines.jsonl", '"the end"\n"a\\nb"\n')
        rows = [json.loads(line) for line in self.cairn("data", "encode", "--tokenizer", TOKENIZER, "--lines", "lines.jsonl",
                                                        "--json-lines", "--json").stdout.splitlines()]
        self.assertEqual([r["decoded"] for r in rows], ["the end", "a\nb"])
        self.assertEqual(" ".join(map(str, rows[0]["ids"])), out[0])
        self.assertEqual("".join(rows[0]["pieces"]), "the end")
        self.write("bad.txt", b"fine\n\xff\xfe\n")
        self.assertIn("bad.txt:2: byte 0: 0xff", self.cairn("data", "encode", "--tokenizer", TOKENIZER, "--lines", "bad.txt",
                                                            code=2).stderr)


if __name__ == "__main__":
    main()
