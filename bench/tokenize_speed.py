#!/usr/bin/env python3
"""`cairn data tokenize` of the same text as lines, JSON lines, gzip and zstd, and `cairn data chat` of it.

  bench/tokenize_speed.py --text kjv.txt [--megabytes 64] [--tokenizer tests/golden/tokenizers/gpt2.json] [--tables]

Cuts the text into documents of a few lines, repeats them to the size that is asked for, and prints MB of text a second,
interleaved rounds, each against plain text's. Peak memory is that of the largest arm.
"""
import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import time

from common import ROOT, Scratch, add_cairn_option, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--text", help="a text in lines; needed unless --tiny")
parser.add_argument("--megabytes", type=float, default=64, help="of text (default: %(default)s)")
parser.add_argument("--tokenizer", default=str(ROOT / "tests/golden/tokenizers/gpt2.json"), help="(default: %(default)s)")
parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: all cores)")
parser.add_argument("--tables", action="store_true", help="also parquet and Arrow, written by this Python's pyarrow")
parser.add_argument("--tiny", action="store_true", help="one round of 1 MB")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.megabytes = 1, 1
elif not args.text:
    parser.error("--text is missing")

LINES = 8  # of a document


def documents():
    """Texts, each on one line, of the size that is asked for in all."""
    lines = open(args.text).read().split("\n") if args.text else [f"line {n} of a made-up text" for n in range(4000)]
    once = [" ".join(lines[k:k + LINES]).strip() for k in range(0, len(lines), LINES)]
    once, made, size, k = [text for text in once if text], [], 0, 0
    while size < args.megabytes * 1e6:
        made.append(once[k % len(once)])
        size += len(made[-1].encode()) + 1
        k += 1
    return made, size


def write(scratch, texts):
    """The arms: name -> (command, file)."""
    plain, rows, chat = (str(scratch.path / name) for name in ("text.txt", "text.jsonl", "chat.jsonl"))
    with open(plain, "w") as out:
        out.writelines(text + "\n" for text in texts)
    with open(rows, "w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    with open(chat, "w") as out:
        for text in texts:
            half = len(text) // 2
            out.write(json.dumps({"prompt": text[:half] + ".", "response": "." + text[half:]}) + "\n")
    with open(rows, "rb") as source, gzip.open(rows + ".gz", "wb", compresslevel=6) as out:
        out.write(source.read())
    subprocess.run(["zstd", "-q", "-k", rows], check=True)
    tokenize = ["tokenize", "--documents"]
    arms = {"plain text, a document a line": (tokenize + ["line"], plain), "JSON lines": (tokenize + ["json"], rows),
            "JSON lines, gzip": (tokenize + ["json"], rows + ".gz"), "JSON lines, zstd": (tokenize + ["json"], rows + ".zst"),
            "chat rows": (["chat", "--chat", "plain"], chat)}
    if args.tables:
        import pyarrow.feather
        import pyarrow.parquet
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        for packed in ("snappy", "zstd"):
            path = str(scratch.path / f"{packed}.parquet")
            pyarrow.parquet.write_table(table, path, compression=packed)
            arms[f"parquet, {packed}"] = (tokenize + ["json"], path)
        pyarrow.feather.write_feather(table, str(scratch.path / "text.arrow"), compression="lz4")
        arms["Arrow, lz4"] = (tokenize + ["json"], str(scratch.path / "text.arrow"))
    return arms


def tokenizer(scratch) -> str:
    """A folder with the file and the token that ends a document, which chat rows need."""
    if args.tokenizer == "bytes":
        return args.tokenizer
    folder = scratch.run_folder("tokenizer")
    folder.mkdir()
    shutil.copy(args.tokenizer, folder / "tokenizer.json")
    ends = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]["content"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends}))
    return str(folder)


with Scratch(args.scratch) as scratch:
    texts, size = documents()
    named = tokenizer(scratch)
    arms = write(scratch, texts)
    taken = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, (command, path) in arms.items():
            begin = time.monotonic()
            subprocess.run([args.cairn, "data", *command, path, "--out", str(scratch.path / "out"), "--overwrite", "--tokenizer",
                            named, "--threads", str(args.threads)], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE)
            taken[name].append(time.monotonic() - begin)
    print(machine())
    print(f"{size / 1e6:.0f} MB of text, {os.path.basename(args.tokenizer)}, {args.threads} threads; peak "
          f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024} MiB")
    base = taken[next(iter(arms))]
    for name, seconds in taken.items():
        speeds, shares = [size / 1e6 / one for one in seconds], [first / one for first, one in zip(base, seconds)]
        print(f"{name:<30} {spread(speeds, 1)} MB/s, {spread(shares, 2)} of plain text's speed")
