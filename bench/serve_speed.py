#!/usr/bin/env python3
"""`cairn serve` against a static server (python3 -m http.server) on the files that an export has written.

  bench/serve_speed.py --scratch FOLDER_ON_THE_DISK [--megabytes 600] [--rounds 5] [--clients 1]

A synthetic Llama of about that size, float32 in the checkpoint. Arms, interleaved, page cache warm, curl to /dev/null:

  f32    all weights as they are in the checkpoint      bf16   cast on the way
  first  seconds to the first byte of a range in the middle of the last file
  peak   resident memory of the server

The server is started anew for each round, so that nothing is kept from the round before.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import struct
import subprocess
import sys
import time

from common import Scratch, add_cairn_option, machine, spread

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add_cairn_option(parser)
parser.add_argument("--megabytes", type=int, default=600, help="of float32 weights (default: %(default)s)")
parser.add_argument("--clients", type=int, default=1, help="that read at once (default: %(default)s)")
args = parser.parse_args()

WIDTH, FFN, VOCAB = 1024, 2816, 16000


def make_folder(folder):
    """A Llama's config.json and one file of weights that are small and finite."""
    folder.mkdir()
    layer = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH], "self_attn.q_proj": [WIDTH, WIDTH],
             "self_attn.k_proj": [WIDTH // 4, WIDTH], "self_attn.v_proj": [WIDTH // 4, WIDTH],
             "self_attn.o_proj": [WIDTH, WIDTH], "mlp.gate_proj": [FFN, WIDTH], "mlp.up_proj": [FFN, WIDTH],
             "mlp.down_proj": [WIDTH, FFN]}
    layers = max(1, (args.megabytes * 250_000 - 2 * VOCAB * WIDTH) // 11_300_000)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "vocab_size": VOCAB,
              "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": WIDTH // 64,
              "num_key_value_heads": WIDTH // 256, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
              "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
              "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": [VOCAB, WIDTH], "model.norm.weight": [WIDTH], "lm_head.weight": [VOCAB, WIDTH]}
    for k in range(layers):
        tensors.update({f"model.layers.{k}.{name}.weight": shape for name, shape in layer.items()})
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = bytearray(os.urandom(1 << 24))
    block[3::4] = b"\x3c" * (len(block) // 4)  # sign and exponent: about 0.01
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for left in range(at, 0, -len(block)):
            out.write(block[:left])


def download(urls):
    """Seconds until all clients have all files."""
    start = time.monotonic()
    running = [subprocess.Popen(["curl", "-sf", *(word for url in urls for word in ("-o", "/dev/null", url))])
               for _ in range(args.clients)]
    if any(one.wait() for one in running):
        sys.exit(f"curl cannot read {urls}")
    return time.monotonic() - start


def first_byte(url, size):
    word = subprocess.run(["curl", "-sf", "-o", "/dev/null", "-w", "%{time_starttransfer}", "-r",
                           f"{size // 2 + 1}-{size // 2 + 100}", url], capture_output=True, text=True, check=True)
    return float(word.stdout)


def peak_mb(pid):
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def serve(path, form):
    server = subprocess.Popen([args.cairn, "serve", path, "--listen", "127.0.0.1:0", "--max-shard-size", "200MB"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, server.stdout.readline().strip().split("=", 1)[1] + f"/runs/run.{form}/resolve/latest"


def static(path, form):
    server = subprocess.Popen([sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory",
                               path.parent / form], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, "http://127.0.0.1:" + re.search(r"port (\d+)", server.stdout.readline())[1]


with Scratch(args.scratch) as scratch:
    make_folder(scratch.path / "hf")
    run = scratch.path / "run"
    run.mkdir()
    subprocess.run([args.cairn, "import", scratch.path / "hf", run / "checkpoints"], check=True, capture_output=True)
    for form in ("f32", "bf16"):
        subprocess.run([args.cairn, "export", run, scratch.path / form, "--dtype", form, "--max-shard-size", "200MB"],
                       check=True, capture_output=True)
    print(machine())
    for form in ("f32", "bf16"):
        files = {path.name: path.stat().st_size for path in sorted((scratch.path / form).glob("*.safetensors"))}
        size = sum(files.values())
        times, firsts, peak = {"serve": [], "static": []}, [], 0
        for _ in range(args.rounds):
            for name, start in (("static", static), ("serve", serve)):
                server, base = start(run, form)
                urls = [f"{base}/{file}" for file in files]
                if start is serve:
                    subprocess.run(["curl", "-sfI", "-o", "/dev/null", urls[-1]], check=True)  # the step is opened
                    firsts.append(first_byte(urls[-1], list(files.values())[-1]))
                times[name].append(download(urls))
                peak = max(peak, peak_mb(server.pid)) if start is serve else peak
                server.send_signal(signal.SIGTERM)
                server.wait()
        rates = {name: [args.clients * size / 1e6 / one for one in some] for name, some in times.items()}
        ratio = statistics.median(rates["serve"]) / statistics.median(rates["static"])
        print(f"{form} {size / 1e6:.0f} MB, {args.clients} clients: serve {spread(rates['serve'])} MB/s, "
              f"static {spread(rates['static'])} MB/s, ratio {ratio:.2f}; first byte {1e3 * max(firsts):.1f} ms at most; "
              f"peak {peak:.0f} MB")
