"""data tokenize and data info."""

import gzip
import json
import lzma
import os
import socket
import struct

from program import ProgramTest, main

TEXT = "In the beginning\nGod created the heaven and the earth.\n\nAnd the earth was without form, and void.\n"

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class DataTest(ProgramTest):
    def gpt2(self):
        """A tokenizer.json with a token that ends documents."""
        if not os.path.exists(self.path("gpt2/tokenizer.json")):
            with open(os.path.join(ROOT, "tests", "golden", "tokenizers", "gpt2.json"), "rb") as f:
                self.write("gpt2/tokenizer.json", f.read())
            self.write("gpt2/tokenizer_config.json", '{"eos_token": "<|endoftext|>"}')
        return "gpt2/tokenizer.json"

    def test_tokenize_then_info(self):
        self.write("a.txt", TEXT)
        done = self.cairn("data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "bytes")
        self.assertIn(f"{len(TEXT)} tokens", done.stdout)
        self.assertNotIn("\r", done.stderr)  # progress is for terminals
        with open(self.path("set.bin"), "rb") as f:
            stored = f.read()
        self.assertEqual(bytes(struct.unpack(f"<{len(TEXT)}H", stored)).decode(), TEXT)
        for name in ("set", "set.bin", "set.idx"):
            info = self.cairn_json("data", "info", name, "--scan")
            self.assertEqual((info["kind"], info["tokens"], info["sequences"]), ("megatron", len(TEXT), 1))
            self.assertEqual(info["largest_token"], max(TEXT.encode()))
        self.assertIn(f"{len(TEXT)} tokens in 1 sequence", self.cairn("data", "info", "set").stdout)

    def test_documents_and_their_ends(self):
        self.write("a.txt", TEXT)
        line = self.cairn_json("data", "tokenize", "a.txt", "--out", "line", "--documents", "line", "--eod")
        self.assertEqual(line["documents"], 3)
        self.assertEqual(line["tokens"], len(TEXT.replace("\n", "")) + 3)
        blank = self.cairn_json("data", "tokenize", "a.txt", "--out", "blank", "--documents", "blank-line")
        self.assertEqual(blank["documents"], 2)
        self.assertEqual(self.cairn_json("data", "info", "blank")["sequences"], 2)

    def test_json_lines_are_read_by_their_field(self):
        self.write("a.jsonl", '{"text": "In the beginning\\nwas"}\n{"text": "the word"}\n')
        made = self.cairn_json("data", "tokenize", "a.jsonl", "--out", "set", "--threads", "2")
        self.assertEqual((made["documents"], made["tokens"]), (2, len("In the beginning\nwas") + len("the word")))
        self.write("b.txt", '{"body": "five!"}\n')
        refused = self.cairn("data", "tokenize", "b.txt", "--out", "b", code=2).stderr
        self.assertIn("b.txt: looks like JSON", refused)
        self.assertIn("--json-key", refused)
        self.cairn("data", "tokenize", "a.jsonl", "--out", "b", "--documents", "line", code=2)
        self.assertEqual(self.cairn_json("data", "tokenize", "b.txt", "--out", "b", "--json-key", "body")["tokens"], 5)
        self.assertIn('"text" is missing; fields with text: "body"',
                      self.cairn("data", "tokenize", "b.txt", "--out", "c", "--documents", "json", code=2).stderr)
        self.assertEqual(self.cairn_json("data", "tokenize", "b.txt", "--out", "c", "--any-text")["tokens"], 18)
        self.cairn("data", "tokenize", "b.txt", "--out", "d", "--documents", "line", "--json-key", "body", code=2)

    def test_files_of_other_kinds_are_named_and_a_byte_order_mark_is_no_text(self):
        record = struct.pack("<Q", 5) + struct.pack("<I", 0x3E04B2EA) + b"hello" + bytes(4)
        for name, content, kind in (
                ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS"),
                ("page", b"\n<!DOCTYPE HTML>\n<html><body>no</body></html>", "is a page of HTML"), ("records", record, "is a TFRecord file"),
                ("sound", b"RIFF\x24\x08\0\0WAVEfmt ", "RIFF"), ("torch", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j", "is a model of torch"),
                ("video", b"\0\0\0\x18ftypmp42", "MP4")):
            self.write(name + ".txt", content)
            with self.subTest(kind=name):
                self.assertIn(kind, self.cairn("data", "tokenize", name + ".txt", "--out", "no", code=2).stderr)
        self.write("marked.txt", b"\xef\xbb\xbfhello")
        self.assertEqual(self.cairn_json("data", "tokenize", "marked.txt", "--out", "set")["tokens"], 5)
        self.assertEqual(self.cairn_json("data", "tokenize", "marked.txt", "--out", "raw", "--any-text")["tokens"], 8)
        self.assertEqual(self.cairn("data", "encode", "--lines", "marked.txt").stdout, "104 101 108 108 111\n")
        said = self.cairn("data", "tokenize", "-", "-", "--out", "no", text_in=b"hello", code=2).stderr
        self.assertIn("standard input is named twice", said)
        self.assertIn("named twice", self.cairn("data", "tokenize", "-", "/dev/stdin", "--out", "no", text_in=b"hello", code=2).stderr)

    def test_text_comes_from_pipes_too(self):
        lines = b'{"text": "In the beginning"}\n{"text": "was the word", "score": NaN}\n'
        self.write("a.jsonl", lines)
        self.cairn("data", "tokenize", "a.jsonl", "--out", "file")

        def stored(name):
            with open(self.path(name + ".bin"), "rb") as f:
                return f.read()

        for name, out in (("-", "dash"), ("/dev/stdin", "stdin")):
            self.cairn("data", "tokenize", name, "--documents", "json", "--out", out, text_in=lines)
            self.assertEqual(stored(out), stored("file"))
        for name in ("-", "/dev/stdin"):  # a socket cannot be opened by its path
            ours, theirs = socket.socketpair()
            ours.sendall(lines)
            ours.close()
            self.cairn("data", "tokenize", name, "--documents", "json", "--out", "socket", "--overwrite", stdin=theirs)
            theirs.close()
            self.assertEqual(stored("socket"), stored("file"))
        self.cairn("data", "tokenize", "-", "--documents", "json", "--out", "packed", text_in=gzip.compress(lines))
        self.assertEqual(stored("packed"), stored("file"))
        self.assertEqual(self.cairn("data", "encode", "--lines", "-", text_in=gzip.compress(b"a")).stdout, "97\n")
        packed = lzma.compress(lines)
        self.assertIn("standard input: is packed by xz: unpack it first (unxz -c)",
                      self.cairn("data", "tokenize", "-", "--out", "no", text_in=packed, code=2).stderr)
        self.assertEqual(self.cairn("data", "encode", "--lines", "-", text_in=b"ab\nc").stdout, "97 98\n99\n")

    def test_packed_files_are_read_by_a_pattern_and_damage_is_named(self):
        parts = ["".join(json.dumps({"text": f"part {k}, line {n}"}) + "\n" for n in range(500)).encode() for k in range(3)]
        self.write("all.jsonl", b"".join(parts))
        self.cairn("data", "tokenize", "all.jsonl", "--out", "plain")
        for k, part in enumerate(parts):
            self.write(f"part-{k}.jsonl.gz", gzip.compress(part))
        made = self.cairn_json("data", "tokenize", "part-*.jsonl.gz", "--out", "packed")
        self.assertEqual((made["documents"], made["bytes"]), (1500, sum(map(len, parts))))
        for suffix in (".bin", ".idx"):
            with open(self.path("plain" + suffix), "rb") as one, open(self.path("packed" + suffix), "rb") as other:
                self.assertEqual(one.read(), other.read())
        self.write("part-1.jsonl.gz", gzip.compress(parts[1])[:-9])
        before = sorted(os.listdir(self.folder.name))
        said = self.cairn("data", "tokenize", "part-*.jsonl.gz", "--out", "no", code=65).stderr
        self.assertRegex(said, r"part-1\.jsonl\.gz: byte [0-9]+: the file ends before its text does.*begins at byte 0\)")
        self.assertEqual(sorted(os.listdir(self.folder.name)), before)
        row = b'{"prompt": "Who are you?", "response": "A model."}\n'
        self.write("chat.jsonl.gz", gzip.compress(row * 3))
        made = self.cairn_json("data", "chat", "chat*.gz", "--out", "chat", "--tokenizer", "bytes", "--chat", "plain")
        self.assertEqual(made["documents"], 3)
        self.write("bad.jsonl.gz", gzip.compress(row + b'{"a": 1}\n'))
        self.assertIn("bad.jsonl.gz:2:", self.cairn("data", "chat", "bad.jsonl.gz", "--out", "no", "--tokenizer", "bytes",
                                                    "--chat", "plain", code=2).stderr)

    def test_a_set_is_decoded_by_document_and_by_range(self):
        texts = ["In the beginning", "God created\nthe heaven", "and the earth \u00e9."]
        self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.cairn("data", "tokenize", "a.jsonl", "--out", "set", "--eod", "--tokenizer", self.gpt2())
        decode = ["data", "decode", "set", "--tokenizer", self.gpt2()]
        rows = [json.loads(line) for line in self.cairn(*decode, "--json").stdout.splitlines()]
        self.assertEqual([row["text"] for row in rows], [text + "<|endoftext|>" for text in texts])
        self.assertEqual([row["document"] for row in rows], [0, 1, 2])
        self.assertEqual(rows[1]["first_token"], rows[0]["tokens"])
        self.assertEqual(self.cairn(*decode, "--documents", "1..2", "--raw").stdout, "".join(row["text"] for row in rows[1:]))
        shown = self.cairn(*decode, "--documents", "1").stdout
        self.assertEqual(shown, f"--- document 1, {rows[1]['tokens']} tokens from {rows[1]['first_token']} on\n{rows[1]['text']}\n")
        first = rows[1]["first_token"]
        last = rows[2]["first_token"] - 1
        self.assertEqual(self.cairn(*decode, "--tokens", f"{first}..{last}", "--raw").stdout, rows[1]["text"])
        self.assertEqual(self.cairn("data", "decode", "set.bin", "--tokenizer", self.gpt2(), "--raw").stdout,
                         "".join(row["text"] for row in rows))
        for options, said in ((["--documents", "3"], "has 3, the last of which is 2"),
                              (["--documents", "2..1"], 'is "2..1", expected a number from 0, or A..B'),
                              (["--tokens", "0..x"], 'is "0..x"'), (["--documents", "0", "--tokens", "0"], "exclude each other")):
            self.assertIn(said, self.cairn(*decode, *options, code=2).stderr)
        said = self.cairn("data", "decode", "set", "--documents", "2", code=2).stderr  # bytes have 256 ids
        self.assertIn("document 2", said)

    def test_sets_are_merged_with_what_counts_and_info_names_their_origin(self):
        for k, texts in enumerate((["one", "two"], ["three"])):
            self.write(f"{k}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
            self.cairn("data", "tokenize", f"{k}.jsonl", "--out", f"plain-{k}")
            self.write(f"{k}.chat.jsonl.gz", gzip.compress("".join(
                json.dumps({"prompt": "Count.", "response": text}) + "\n" for text in texts).encode()))
            self.cairn("data", "chat", f"{k}.chat.jsonl.gz", "--out", f"chat-{k}", "--tokenizer", "bytes", "--chat", "plain")
        made = self.cairn_json("data", "merge", "chat-0", "chat-1", "--out", "chat")
        self.assertEqual((made["documents"], made["counted"]), (3, len("one") + len("two") + len("three") + 3))
        self.write("all.jsonl", "".join(json.dumps({"prompt": "Count.", "response": text}) + "\n" for text in ("one", "two", "three")))
        self.cairn("data", "chat", "all.jsonl", "--out", "together", "--tokenizer", "bytes", "--chat", "plain")
        for suffix in (".bin", ".idx", ".loss"):
            with open(self.path("chat" + suffix), "rb") as one, open(self.path("together" + suffix), "rb") as other:
                self.assertEqual(one.read(), other.read(), suffix)
        facts = self.cairn_json("data", "info", "chat")
        self.assertEqual((facts["counted"], facts["longest_sequence"]), (made["counted"], len("Count.three") + 1))
        self.assertEqual([(one["path"], one["packed"]) for one in facts["made_of"]["inputs"]],
                         [("0.chat.jsonl.gz", "gzip"), ("1.chat.jsonl.gz", "gzip")])
        self.assertEqual((facts["made_of"]["tokenizer"], facts["made_of"]["chat"]), ("bytes", "plain"))
        shown = self.cairn("data", "info", "chat").stdout
        self.assertIn("14 of the tokens count", shown)
        self.assertIn("0.chat.jsonl.gz: ", shown)
        self.assertEqual(json.loads(self.cairn("data", "decode", "chat", "--documents", "2", "--json").stdout)["loss"],
                         [[len("Count."), len("Count.three") + 1]])
        said = self.cairn("data", "merge", "plain-0", "chat-1", "--out", "no", code=2).stderr
        self.assertIn("chat-1.loss says which tokens count, and the other pair has no such file", said)
        self.cairn("data", "tokenize", "1.jsonl", "--out", "other", "--tokenizer", self.gpt2())
        said = self.cairn("data", "merge", "plain-0", "other", "--out", "no", code=2).stderr
        self.assertIn("one is of the tokenizer bytes, the other of " + self.gpt2(), said)
        os.remove(self.path("other.made.json"))
        said = self.cairn("data", "merge", "plain-0", "other", "--out", "blind").stderr
        self.assertIn("note: no other.made.json of this pair says which tokenizer made it", said)
        self.assertIn("is one of the sets that are merged",
                      self.cairn("data", "merge", "plain-0", "plain-1", "--out", "plain-1", "--overwrite", code=2).stderr)
        self.assertIn("1 set to merge", self.cairn("data", "merge", "plain-0", "--out", "no", code=2).stderr)
        self.assertEqual([name for name in os.listdir(self.folder.name) if name.startswith("no")], [])

    def test_a_trained_tokenizer_is_the_same_for_any_number_of_threads_and_serves_at_once(self):
        with open(os.path.join(ROOT, "tests", "golden", "tokenizers", "texts.jsonl")) as f:
            texts = [json.loads(line) for line in f]
        self.write("a.jsonl.gz", gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts * 9).encode()))
        files = []
        for threads in ("1", "2", "5"):
            made = self.cairn_json("data", "train-tokenizer", "*.jsonl.gz", "--vocab", "600", "--out", "tk" + threads,
                                   "--special", "<|im_end|>", "--threads", threads)
            self.assertEqual((made["vocab"], made["documents"]), (600, 9 * sum(text != "" for text in texts)))
            with open(self.path(f"tk{threads}/tokenizer.json"), "rb") as f:
                files.append(f.read())
        self.assertEqual(files[0], files[1])
        self.assertEqual(files[0], files[2])
        self.cairn("data", "tokenize", "a.jsonl.gz", "--out", "set", "--tokenizer", "tk1", "--eod")
        first = json.loads(self.cairn("data", "decode", "set", "--tokenizer", "tk1", "--documents", "3", "--json").stdout)
        self.assertEqual(first["text"], [text for text in texts if text][3] + "<|endoftext|>")
        self.assertIn("tk1/tokenizer.json exists", self.cairn("data", "train-tokenizer", "a.jsonl.gz", "--vocab", "600", "--out",
                                                              "tk1", code=2).stderr)
        self.write("few.txt", "ab ab")
        self.assertIn("note: 258 tokens of 999: no other pair comes 2 times",
                      self.cairn("data", "train-tokenizer", "few.txt", "--vocab", "999", "--out", "few").stderr)
        self.write("bad.txt", b"ab \xff")
        self.assertIn("bad.txt: byte 3: 0xff is not UTF-8",
                      self.cairn("data", "train-tokenizer", "bad.txt", "--vocab", "999", "--out", "bad", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("bad")))

    def test_a_pair_is_replaced_only_on_request(self):
        self.write("a.txt", TEXT)
        self.cairn("data", "tokenize", "a.txt", "--out", "set")
        refused = self.cairn("data", "tokenize", "a.txt", "--out", "set", code=2).stderr
        self.assertIn("set.bin exists; remove it, or replace the pair with --overwrite", refused)
        self.cairn("data", "tokenize", "a.txt", "--out", "set", "--overwrite")

    def test_eod_without_an_eos_token_names_the_file_and_the_token(self):
        self.write("a.txt", TEXT)
        with open(os.path.join(ROOT, "tests", "golden", "tokenizers", "gpt2.json"), "rb") as f:
            self.write("hf/tokenizer.json", f.read())
        eod = ["data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "hf", "--eod"]
        refused = self.cairn(*eod, code=2).stderr
        for words in ("hf/tokenizer.json: --eod", "tokenizer_config.json beside it is missing", "special_tokens_map.json"):
            self.assertIn(words, refused)
        self.write("hf/tokenizer_config.json", '{"eos_token": "</none>"}')
        self.assertIn('tokenizer_config.json names the eos_token "</none>", which is no token of the vocabulary',
                      self.cairn(*eod, code=2).stderr)
        self.write("hf/tokenizer_config.json", '{"eos_token": "<|endoftext|>"}')
        self.cairn(*eod)

    def test_bad_input_is_named_and_leaves_nothing(self):
        for args in (["missing.txt"], ["."]):
            self.assertIn(args[0], self.cairn("data", "tokenize", *args, "--out", "set", code=2).stderr)
        self.write("a.txt", TEXT)
        self.assertIn("no.model", self.cairn("data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "no.model",
                                             code=2).stderr)
        self.assertIn("paragraph", self.cairn("data", "tokenize", "a.txt", "--out", "set", "--documents", "paragraph",
                                              code=2).stderr)
        self.cairn("data", "tokenize", "a.txt", "--out", "a.txt/set", code=2)
        self.assertEqual(os.listdir(self.folder.name), ["a.txt"])

    def test_a_damaged_pair_is_refused_with_its_place(self):
        self.write("a.txt", TEXT)
        self.cairn("data", "tokenize", "a.txt", "--out", "set")
        with open(self.path("set.idx"), "r+b") as f:
            f.truncate(40)
        done = self.cairn("data", "info", "set", code=65)
        self.assertIn("set.idx", done.stderr)
        self.assertEqual(self.cairn_json("data", "info", "set", code=65)["error"]["code"], "corrupt")
        self.cairn("data", "tokenize", "a.txt", "--out", "set", "--overwrite")
        os.remove(self.path("set.bin"))
        self.cairn("data", "info", "set.idx", code=2)

    def test_plain_token_files(self):
        self.write("t.bin", struct.pack("<5H", 1, 2, 300, 4, 5))
        info = self.cairn_json("data", "info", "t.bin", "--dtype", "uint16", "--scan")
        self.assertEqual((info["kind"], info["tokens"], info["largest_token"]), ("token_file", 5, 300))
        self.assertIn("uint16", self.cairn("data", "info", "t.bin", code=2).stderr)
        self.assertIn("nothing-there", self.cairn("data", "info", "nothing-there", code=2).stderr)

    def test_token_files_that_numpy_saved_and_such_of_another_type(self):
        head = "{'descr': '<u4', 'fortran_order': False, 'shape': (400,), }".ljust(117) + "\n"
        ids = [k * 37 % 50000 for k in range(400)]
        tokens = struct.pack("<400I", *ids)
        self.write("a.npy", b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head.encode() + tokens)
        info = self.cairn_json("data", "info", "a.npy")
        self.assertEqual((info["tokens"], info["largest_token"]), (400, max(ids)))
        self.write("a.bin", tokens)
        self.assertIn("looks like uint32", self.cairn("data", "info", "a.bin", "--dtype", "uint16", code=2).stderr)
        self.assertEqual(self.cairn_json("data", "info", "a.bin", "--dtype", "uint32")["tokens"], 400)

    def test_unknown_words_below_data(self):
        self.assertIn("`tokenize`", self.cairn("data", "tokenise", code=2).stderr)
        self.cairn("data", code=2)


if __name__ == "__main__":
    main()
