#!/usr/bin/env python3
"""`cairn convert` in its three directions against `cp` of the same bytes, and against transformers.

  bench/convert_speed.py --scratch FOLDER_ON_THE_DISK [--gigabytes 30] [--dtype f32|bf16] [--rounds 3]
                         [--arms import,rewrite,export] [--transformers PYTHON] [--transformers-gigabytes 2]

Makes a synthetic Llama-shaped folder of the asked-for size (float32 unless --dtype says bf16) in 1 GB shards, then,
interleaved, every arm with a cold page cache and everything it wrote fsynced:

  import    folder -> checkpoint     against cp of the folder
  rewrite   folder -> folder         against cp of the folder
  export    checkpoint -> folder     against cp of the checkpoint's files
  peak      resident memory of each

With --transformers (a Python that has torch and transformers) also from_pretrained + save_pretrained of a smaller folder
that fits into memory, against `cairn convert --to hf` of it. What an arm made is removed before the next begins, and the
folder once it has been exported from: the disk needs twice the folder (three times for bf16, whose checkpoint is float32).
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import time

from common import Scratch, add_cairn_option, load, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.set_defaults(rounds=3)
parser.add_argument("--gigabytes", type=float, default=30.0, help="of the folder's weights (default: %(default)s)")
parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the folder (default: %(default)s)")
parser.add_argument("--arms", default="import,rewrite,export", help="some of these (default: %(default)s)")
parser.add_argument("--transformers", help="a Python with torch and transformers; without it that column is left out")
parser.add_argument("--transformers-gigabytes", type=float, default=2.0, help="(default: %(default)s)")
parser.add_argument("--tiny", action="store_true", help="one round of 20 MB")
args = parser.parse_args()
if args.tiny:
    args.rounds, args.gigabytes = 1, 0.02

SHARD = 1_000_000_000
THEIRS = """
import sys, time, torch
from transformers import AutoModelForCausalLM
start = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="1GB")
print(time.monotonic() - start)
"""


def shapes(gigabytes: float) -> tuple:
    """config.json and {name: shape} of a Llama of about this size."""
    elem = 4 if args.dtype == "f32" else 2
    width = 4096 if gigabytes > 4 else 1024 if gigabytes > 0.1 else 256
    ffn, vocab = width * 11 // 4, 32000 if width > 256 else 1000
    layer = {"input_layernorm": [width], "post_attention_layernorm": [width], "self_attn.q_proj": [width, width],
             "self_attn.k_proj": [width // 4, width], "self_attn.v_proj": [width // 4, width],
             "self_attn.o_proj": [width, width], "mlp.gate_proj": [ffn, width], "mlp.up_proj": [ffn, width],
             "mlp.down_proj": [width, ffn]}
    count = lambda shape: shape[0] * (shape[1] if len(shape) > 1 else 1)
    layers = max(1, round((gigabytes * 1e9 / elem - 2 * vocab * width) / sum(map(count, layer.values()))))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
              "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": width // 64,
              "num_key_value_heads": width // 256, "head_dim": 64, "hidden_act": "silu", "vocab_size": vocab,
              "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
              "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32" if elem == 4 else "bfloat16"}
    tensors = {"model.embed_tokens.weight": [vocab, width]}
    for k in range(layers):
        tensors.update({f"model.layers.{k}.{name}.weight": shape for name, shape in layer.items()})
    tensors.update({"model.norm.weight": [width], "lm_head.weight": [vocab, width]})
    return config, {name: (shape, count(shape) * elem) for name, shape in tensors.items()}


def make_folder(folder: pathlib.Path, gigabytes: float) -> None:
    """Weights are small, finite and not compressible; the same bytes again and again would do too, for nobody looks."""
    folder.mkdir()
    config, tensors = shapes(gigabytes)
    (folder / "config.json").write_text(json.dumps(config))
    block = bytearray(os.urandom(1 << 24))
    for k in range(3 if args.dtype == "f32" else 1, len(block), 4 if args.dtype == "f32" else 2):
        block[k] = 0x3C  # sign and exponent: about 0.01
    shards, filled = [[]], 0
    for name, (shape, size) in tensors.items():
        if shards[-1] and filled + size > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape, size))
        filled += size
    weight_map = {}
    for k, shard in enumerate(shards):
        name = f"model-{k + 1:05}-of-{len(shards):05}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for tensor, shape, size in shard:
            header[tensor] = {"dtype": args.dtype.upper(), "shape": shape, "data_offsets": [at, at + size]}
            weight_map[tensor] = name
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for left in range(at, 0, -len(block)):
                out.write(block[:left])
            out.flush()
            os.fsync(out.fileno())
    total = sum(size for _, size in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def sync_all(folder) -> None:
    for path in [folder, *pathlib.Path(folder).rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder) -> None:
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def bytes_of(folder) -> int:
    return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())


def timed(command, target) -> tuple:
    """Seconds until everything is durable, peak resident memory, what it printed."""
    start = time.monotonic()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as child:
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {child.returncode}:\n{out[-2000:]}")
    sync_all(target)
    return time.monotonic() - start, usage.ru_maxrss * 1024, out


def measure(arm: str, source: pathlib.Path, command: list, scratch: Scratch) -> None:
    made, copied = scratch.path / "made", scratch.path / "copied"
    ours, theirs, peaks = [], [], []
    for _ in range(args.rounds):
        forget(source)
        seconds, peak, _ = timed([args.cairn, *command, source, made], scratch.path)
        ours.append(seconds)
        peaks.append(peak)
        written = bytes_of(made)
        shutil.rmtree(made)
        forget(source)
        theirs.append(timed(["cp", "-r", "--reflink=never", source, copied], scratch.path)[0])
        shutil.rmtree(copied)
    read, ratio = bytes_of(source), statistics.median(theirs) / statistics.median(ours)
    print(f"{arm:8} {spread(ours)} s for {read / 1e9:.2f} GB to {written / 1e9:.2f} GB; cp of {read / 1e9:.2f} GB "
          f"{spread(theirs)} s; {ratio:.2f} of cp's speed; peak memory {max(peaks) / 2**20:.0f} MiB", flush=True)


def main() -> None:
    print(machine())
    arms = args.arms.split(",")
    if unknown := set(arms) - {"import", "rewrite", "export"}:
        sys.exit(f"--arms: {', '.join(sorted(unknown))}: known are import, rewrite and export")
    with Scratch(args.scratch) as scratch:
        folder, made, checkpoints = scratch.path / "folder", scratch.path / "made", scratch.path / "checkpoints"
        make_folder(folder, args.gigabytes)
        print(f"folder of {bytes_of(folder) / 1e9:.2f} GB in {args.dtype}, {args.rounds} rounds, load now {load()}")
        if "import" in arms:
            measure("import", folder, ["import"], scratch)
        if "rewrite" in arms:
            measure("rewrite", folder, ["convert", "--to", "hf"], scratch)
        if "export" in arms:
            subprocess.run([args.cairn, "import", str(folder), str(checkpoints)], check=True, stdout=subprocess.DEVNULL)
            shutil.rmtree(folder)
            measure("export", checkpoints, ["export", "--dtype", args.dtype], scratch)
            shutil.rmtree(checkpoints)
        if args.transformers:
            small = scratch.path / "small"
            make_folder(small, min(args.gigabytes, args.transformers_gigabytes))
            for name, command in {"cairn": [args.cairn, "convert", small, made, "--to", "hf"],
                                  "transformers": [args.transformers, "-c", THEIRS, small, made]}.items():
                times, peak = [], 0
                for _ in range(args.rounds):
                    forget(small)
                    seconds, rss, _ = timed(command, scratch.path)
                    times.append(seconds)
                    peak = max(peak, rss)
                    shutil.rmtree(made)
                print(f"{name:12} {spread(times)} s for {bytes_of(small) / 1e9:.2f} GB; peak memory {peak / 2**20:.0f} MiB")


main()
