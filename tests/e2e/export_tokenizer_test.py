"""The tokenizer of a run that was trained from scratch goes out with its weights."""

import json
import pathlib
import shutil

from harness import RunTest, main

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def byte_level(end="<end>"):
    """A tokenizer.json of 256 tokens of a byte each, and one that ends a text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters.update({byte: chr(256 + k) for k, byte in enumerate(b for b in range(256) if b not in letters)})
    special = {"id": 256, "content": end, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True}
    return json.dumps({
        "version": "1.0", "added_tokens": [special],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}})


class ExportTokenizer(RunTest):
    def trained(self, run, tokenizer, objective=""):
        """A short run with this tokenizer in its recipe."""
        recipe = self.recipe(name=run, steps=6, tp=1, pp=1, dp=1, sp="false", save=6)
        text = recipe.read_text().replace("T.bytes", tokenizer).replace("vocab = 257", "vocab = 330")
        recipe.write_text(text.replace("mesh =", f"{objective} mesh ="))
        self.train(recipe, run)
        return run

    def exported(self, run, name="out", *extra):
        """The JSON files of an export, and what was warned of."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        done = self.cairn("export", run, name, *extra)
        files = {}
        for file in (self.folder / name).iterdir():
            files[file.name] = json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()
        return files, done.stderr.decode()

    def encoded(self, tokenizer, text="so  the\tdog\n"):
        return self.cairn("data", "encode", text, "--tokenizer", tokenizer).stdout

    def make_tokenizer(self, folder="tok", end="<end>"):
        (self.folder / folder).mkdir()
        (self.folder / folder / "tokenizer.json").write_text(byte_level(end))
        (self.folder / folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": end}}))
        (self.folder / folder / "chat_template.jinja").write_text("{{ messages }}")
        (self.folder / folder / "LICENSE").write_text("of the tokenizer's model")
        return self.folder / folder

    def test_a_tokenizer_json_goes_out_with_its_tokens(self):
        tok = self.make_tokenizer()
        run = self.trained("a", 'T.hf_tokenizer "tok/tokenizer.json"')
        files, warned = self.exported(run)
        self.assertEqual(warned, "")
        self.assertEqual((self.folder / "out/tokenizer.json").read_bytes(), (tok / "tokenizer.json").read_bytes())
        self.assertEqual(files["config.json"]["eos_token_id"], 256)
        self.assertIsNone(files["config.json"]["bos_token_id"])
        self.assertEqual(files["generation_config.json"]["eos_token_id"], 256)
        self.assertEqual(files["tokenizer_config.json"]["tokenizer_class"], "PreTrainedTokenizerFast")
        self.assertEqual(files["tokenizer_config.json"]["eos_token"], "<end>")
        self.assertEqual(files["chat_template.jinja"], b"{{ messages }}")
        self.assertNotIn("LICENSE", files)
        self.assertEqual(self.encoded("out"), self.encoded("tok"))
        made = json.loads(self.cairn("generate", "out", "--prompt", "a", "--max-tokens", 2, "--json").stdout)
        self.assertEqual(len(made["texts"]), 1)
        files, _ = self.exported(run, "none", "--without-tokenizer")
        self.assertNotIn("tokenizer.json", files)

        # Settings that exist stay, except a class that one of the lines of transformers lacks.
        settings = {"tokenizer_class": "TokenizersBackend", "eos_token": "<end>", "bos_token": "<end>", "x": [1]}
        (tok / "tokenizer_config.json").write_text(json.dumps(settings))
        files, warned = self.exported(run, "out", "--like", tok)
        self.assertIn("tok/tokenizer_config.json is not the file that the run was trained with", warned)
        self.assertEqual(files["tokenizer_config.json"], {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
        self.assertEqual((files["config.json"]["bos_token_id"], files["generation_config.json"]["bos_token_id"]), (256, 256))

    def test_a_file_that_was_changed_or_is_missing_is_an_error_with_its_name(self):
        tok = self.make_tokenizer()
        run = self.trained("a", 'T.hf_tokenizer "tok/tokenizer.json"')
        (tok / "tokenizer.json").write_text(byte_level("<stop>"))
        for command in (("export", run, "out"), ("generate", run, "--prompt", "a")):
            said = self.cairn(*command, code=2).stderr.decode()
            self.assertIn("tok/tokenizer.json: is not the tokenizer that the run was trained with", said)
        self.assertFalse((self.folder / "out").exists())
        (tok / "tokenizer.json").unlink()
        said = self.cairn("export", run, "out", code=2).stderr.decode()
        self.assertIn("tok/tokenizer.json: the recipe's tokenizer is missing", said)
        self.assertIn("--like FOLDER", said)
        self.assertFalse((self.folder / "out").exists())

        # Another copy, in a folder that has a tokenizer only.
        copy = self.make_tokenizer("copy")
        files, warned = self.exported(run, "out", "--like", copy)
        self.assertEqual((files["config.json"]["eos_token_id"], warned), (256, ""))
        self.make_tokenizer("other", "<stop>")
        files, warned = self.exported(run, "out", "--like", "other")
        self.assertIn("other/tokenizer.json is not the file that the run was trained with", warned)
        (self.folder / "empty").mkdir()
        self.assertIn("neither config.json nor a tokenizer", self.cairn("export", run, "x", "--like", "empty", code=2).stderr.decode())

        # A checkpoint by itself knows no lineage: the file that is found is reported.
        shutil.copytree(self.checkpoint(run, 6), self.folder / "alone")
        shutil.move(copy / "tokenizer.json", tok)
        self.assertIn("whether it is the file of the training", self.exported("alone")[1])

    def test_a_file_beside_the_tokenizer_that_changed_since_the_training_is_named(self):
        tok = self.make_tokenizer()
        run = self.trained("a", 'T.hf_tokenizer "tok/tokenizer.json"')
        (line,) = map(json.loads, (self.folder / run / "lineage.jsonl").read_text().splitlines())
        self.assertEqual(list(line["tokenizer_beside"]), ["special_tokens_map.json"])

        def refused(words, accept="tokenizer"):
            for command in (("export", run, "out"), ("generate", run, "--prompt", "a")):
                said = self.cairn(*command, code=2).stderr.decode()
                self.assertIn(words, said)
            said = self.cairn("train", "a.lua", "--run", run, "--dry-run", code=2)
            self.assertIn(accept, (said.stdout + said.stderr).decode())

        saved = (tok / "special_tokens_map.json").read_text()
        (tok / "special_tokens_map.json").write_text('{"eos_token": "a"}')
        refused("tok/special_tokens_map.json: is not the file beside the tokenizer that the run was trained with")
        (tok / "special_tokens_map.json").unlink()
        refused("its content is missing, and the run's lineage.jsonl has " + line["tokenizer_beside"]["special_tokens_map.json"])
        (tok / "special_tokens_map.json").write_text(saved)
        (tok / "added_tokens.json").write_text('{"dog": 257}')
        refused("lineage.jsonl has missing; move it away", "tok/added_tokens.json")

        # A line of an older build knows the tokenizer's file only.
        del line["tokenizer_beside"]
        (self.folder / run / "lineage.jsonl").write_text(json.dumps(line) + "\n")
        self.cairn("train", "a.lua", "--run", run, "--dry-run")
        (tok / "added_tokens.json").write_text('{"dog": ')
        for command in (("export", run, "out"), ("train", "a.lua", "--run", run, "--dry-run"),
                        ("export", run, "out", "--like", "tok"), ("generate", run, "--prompt", "a")):
            said = self.cairn(*command, code=2).stderr.decode()
            self.assertIn("added_tokens.json: byte 8: not JSON", said)
        self.assertFalse((self.folder / "out").exists())

    def test_a_sentencepiece_model_goes_out_as_itself_and_as_a_tokenizer_json(self):
        shutil.copy(GOLDEN / "sentencepiece-tiny" / "tiny.model", self.folder / "own.model")
        run = self.trained("a", 'T.sentencepiece "own.model"')
        files, warned = self.exported(run)
        self.assertEqual(warned, "")
        self.assertEqual(files["tokenizer.model"], (self.folder / "own.model").read_bytes())
        self.assertEqual(files["tokenizer_config.json"]["eos_token"], "</s>")
        for file in ("config.json", "generation_config.json"):
            self.assertEqual((files[file]["bos_token_id"], files[file]["eos_token_id"]), (1, 2))
        for text in ("the cairn stands", "  on  the\nhill ", ""):
            self.assertEqual(self.encoded("out/tokenizer.json", text), self.encoded("own.model", text))

    def test_bytes_go_out_as_a_tokenizer_json(self):
        run = self.trained("a", "T.bytes")
        files, warned = self.exported(run)
        self.assertEqual((warned, files["config.json"]["eos_token_id"]), ("", 0))
        self.assertEqual(files["tokenizer_config.json"]["eos_token"], "\0")
        self.assertEqual(self.encoded("out", "a \u2603\n"), self.encoded("bytes", "a \u2603\n"))

    def test_a_document_end_ends_texts_where_the_tokenizer_names_none(self):
        tok = self.make_tokenizer()
        (tok / "special_tokens_map.json").unlink()
        files, warned = self.exported(self.trained("a", 'T.hf_tokenizer "tok/tokenizer.json"'))
        self.assertIn("so eos_token_id is null", warned)
        self.assertIsNone(files["config.json"]["eos_token_id"])
        ends = "objective = { document_end = 256 },"
        files, warned = self.exported(self.trained("b", 'T.hf_tokenizer "tok/tokenizer.json"', ends))
        self.assertEqual((warned, files["config.json"]["eos_token_id"]), ("", 256))
        self.assertEqual(files["tokenizer_config.json"]["eos_token"], "<end>")
        files, warned = self.exported(self.trained("c", "T.bytes", ends))
        self.assertEqual(files["config.json"]["eos_token_id"], [0, 256])

    def test_a_recipe_without_a_tokenizer_is_told(self):
        recipe = self.recipe(name="a", steps=6, tp=1, pp=1, dp=1, sp="false", save=6)
        recipe.write_text(recipe.read_text().replace("tokenizer = T.bytes,", ""))
        self.train(recipe, "a")
        files, warned = self.exported("a")
        self.assertIn("no tokenizer is exported, for the recipe names none; --like FOLDER", warned)


if __name__ == "__main__":
    main()
