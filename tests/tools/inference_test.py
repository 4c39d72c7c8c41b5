"""generate, eval and data encode: of Hugging Face folders, imported checkpoints and their tokenizers."""

import json
import math
import os
import pathlib
import shutil

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

    def test_what_cannot_be_done_is_told(self):
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
