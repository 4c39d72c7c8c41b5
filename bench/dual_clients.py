#!/usr/bin/env python3
"""What unmodified clients make of `cairn export --hdf5`: the safetensors and h5py packages, and transformers.

  bench/dual_clients.py [--cairn build/release/cairn] [--scratch FOLDER]

Needs python packages that Cairn itself does not: safetensors, h5py, numpy, and for the last part torch and transformers.
For each small model of tests/golden it imports, exports plainly and with --hdf5, and prints whether both packages open the
one file and agree bit for bit with the plain export; then whether transformers builds the model from it, with which
complaints, and whether its logits are those of the plain export.
"""
import argparse
import io
import json
import logging
import os
import pathlib
import subprocess
import sys

from common import ROOT, Scratch, machine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cairn", default=str(ROOT / "build/release/cairn"))
parser.add_argument("--scratch", default=None)
args = parser.parse_args()

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import safetensors  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

MODELS = ("hf-gpt2-tied", "hf-gpt2-erf-untied", "hf-llama-tied-bias", "hf-llama-gqa-sharded")


def cairn(*words):
    done = subprocess.run([args.cairn, *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cairn {' '.join(map(str, words))}: {done.stderr}")


def compare(plain, dual) -> str:
    tensors = structures = 0
    for path in sorted(plain.glob("*.safetensors")):
        wanted, found = load_file(path), load_file(dual / path.name)
        own = [name for name in found if name.startswith("__hdf5__.")]
        if set(found) - set(own) != set(wanted):
            sys.exit(f"{path.name}: safetensors sees other tensors")
        second = (dual / path.name).with_suffix(".h5")
        if not os.path.samefile(second, dual / path.name):
            sys.exit(f"{second}: a second copy")
        with open(dual / path.name, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
        with h5py.File(second, "r") as h5:
            at = {}  # by place: the datasets may have Cairn's own names
            h5["weight"].visititems(lambda _, item: at.update({item.id.get_offset(): item})
                                    if isinstance(item, h5py.Dataset) else None)
            for name, value in wanted.items():
                dataset = at[8 + length + header[name]["data_offsets"][0]]
                if not (found[name].tobytes() == dataset[()].tobytes() == value.tobytes()):
                    sys.exit(f"{path.name}: {name} differs")
        tensors += len(wanted)
        structures += len(own)
    return f"{tensors} tensors agree bit for bit in both packages ({structures} spans of HDF5's own as bytes)"


def with_transformers(plain, dual) -> str:
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"transformers not tried ({error})"
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (plain, dual)]
    logging.getLogger("transformers").removeHandler(handler)
    ids = torch.arange(12).reshape(1, 12) % models[0].config.vocab_size
    with torch.no_grad():
        a, b = (model(ids).logits for model in models)
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    complaint = f"it reports unexpected keys, {len(lines)} lines" if "__hdf5__" in said.getvalue() else "no complaint"
    return f"transformers {transformers.__version__}: loads, logits {'equal' if torch.equal(a, b) else 'DIFFER'}, {complaint}"


print(machine())
print(f"safetensors {safetensors.__version__}, h5py {h5py.__version__} with libhdf5 {h5py.version.hdf5_version}, "
      f"numpy {np.__version__}")
with Scratch(args.scratch) as scratch:
    for model in MODELS:
        work = pathlib.Path(scratch.path) / model
        work.mkdir()
        cairn("import", ROOT / "tests/golden" / model, work / "run")
        cairn("export", work / "run", work / "plain")
        cairn("export", work / "run", work / "dual", "--hdf5")
        print(f"{model}: {compare(work / 'plain', work / 'dual')}; {with_transformers(work / 'plain', work / 'dual')}",
              flush=True)
