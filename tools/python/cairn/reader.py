"""Checkpoints as mappings from `kind/name` to numpy arrays."""

import collections.abc
import importlib
import json
import pathlib
import re

import numpy

from .checksum import unzstd, xxh3
from .errors import CairnError, demand
from .format import STORED_AS, decode_manifest, decode_table, step_name, tiles

_STEP = re.compile(r"step-(\d{8,15})")


def open(path):
    """A `Checkpoint` of a step's folder, or the `Steps` of a run's folder or of its `checkpoints`.

    Errors: CairnError if the path is neither; Damaged if a manifest is.
    """
    path = pathlib.Path(path)
    if (path / "manifest.json").is_file():
        return Checkpoint(path)
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (folder.name == "checkpoints" or any(_STEP.fullmatch(p.name) for p in folder.iterdir())):
            return Steps(folder)
    raise CairnError(f"{path}: neither a checkpoint nor a run: it has no manifest.json, no checkpoints and no step-N")


class Steps:
    """The checkpoints of a run. `steps`: their numbers, ascending, by the names of folders that have a manifest."""

    def __init__(self, folder):
        self.folder = folder
        found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
        self.steps = sorted(int(name[1]) for name, path in found if name and (path / "manifest.json").is_file() and
                            path.name == step_name(int(name[1])))

    @property
    def labels(self):
        """Step to its entry in labels.json (`label`, `why`, ...); empty without that file."""
        file = self.folder / "labels.json"
        return {int(k): v for k, v in json.loads(file.read_text())["steps"].items()} if file.is_file() else {}

    def checkpoint(self, step=None):
        """The checkpoint of a step; without one, the newest. Errors: CairnError if it is missing."""
        demand(self.steps, f"{self.folder}: no checkpoint", CairnError)
        step = self.steps[-1] if step is None else step
        demand(step in self.steps, f"{self.folder}: no step {step}; it has {self.steps}", CairnError)
        return Checkpoint(self.folder / step_name(step))

    def __repr__(self):
        return f"<cairn.Steps {self.folder}: {self.steps}>"


class Checkpoint(collections.abc.Mapping):
    """A mapping from `kind/name` to the whole tensor, assembled from its shards, the checksum of each chunk verified.

    bf16 becomes ml_dtypes.bfloat16 where ml_dtypes is installed, else float32, which holds each value exactly.
    `bf16` of `tensor()` chooses: "ml_dtypes", "float32", or "uint16", the bits.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        file = self.folder / "manifest.json"
        self.manifest = decode_manifest(file.read_bytes(), file)
        named = _STEP.fullmatch(self.folder.resolve().name)
        demand(not named or int(named[1]) == self.step, f"{file}: step {self.step}, the folder's name has another")
        table = self.folder / "shards.bin"
        self._shards = {}
        for shard in decode_table(table.read_bytes(), self.manifest, table):
            self._shards.setdefault(shard.tensor, []).append(shard)
        self._index = {f"{t['kind']}/{t['name']}": i for i, t in enumerate(self.manifest["tensors"])}
        demand(len(self._index) == len(self.manifest["tensors"]), f"{file}: two tensors of one name")
        for key, i in self._index.items():
            demand(tiles(self.shape(key), [(s.lo, s.hi) for s in self._shards.get(i, [])]),
                   f"{table}: shards do not tile {key}")

    @property
    def step(self):
        return self.manifest["step"]

    def _entry(self, key):
        if key not in self._index:
            raise KeyError(f"{key}: no such tensor in {self.folder}; names are kind/name, as weight/...")
        return self.manifest["tensors"][self._index[key]]

    def shape(self, key):
        return tuple(self._entry(key)["shape"])

    def dtype(self, key):
        """The stored type, as the format spells it: f32, bf16, ..."""
        return self._entry(key)["dtype"]

    def __iter__(self):
        return iter(self._index)

    def __len__(self):
        return len(self._index)

    def __contains__(self, key):
        return key in self._index

    def __getitem__(self, key):
        return self.tensor(key)

    def __repr__(self):
        return f"<cairn.Checkpoint {self.folder}: {len(self)} tensors>"

    def tensor(self, key, bf16=None):
        """The whole tensor, in memory. Errors: KeyError; Damaged, with file, tensor and chunk."""
        dtype = self._entry(key)["dtype"]
        out = numpy.empty(self.shape(key), STORED_AS[dtype])
        for shard in self._shards[self._index[key]]:
            extents = tuple(b - a for a, b in zip(shard.lo, shard.hi))
            box = tuple(slice(a, b) for a, b in zip(shard.lo, shard.hi))
            out[box] = self._payload(shard, out.itemsize, key).view(out.dtype).reshape(extents)
        return _bf16(out, bf16) if dtype == "bf16" else out

    def _payload(self, shard, item_bytes, key):
        entry = self.manifest["files"][shard.file]
        path = self.folder / entry["name"]
        if "step" in entry:
            path = self.folder.resolve().parent / step_name(entry["step"]) / entry["name"]
        demand(path.is_file(), f"{path}: the file is missing")
        size = path.stat().st_size
        demand(size == entry["size_bytes"], f"{path}: {size} bytes, the manifest has {entry['size_bytes']}")
        data, step = numpy.memmap(path, numpy.uint8, "r"), shard.chunk_bytes
        if shard.stored is None:
            demand(shard.offset + shard.bytes <= size, f"{path}: {key}: ends behind the file")
            payload = data[shard.offset:shard.offset + shard.bytes]
            for i, expected in enumerate(shard.hashes.tolist()):
                _check(payload[i * step:(i + 1) * step], expected, f"{path}: {key}: chunk {i}")
            return payload
        parts = []
        for i, (expected, (at, length, mask)) in enumerate(zip(shard.hashes.tolist(), shard.stored.tolist())):
            where = f"{path}: {key}: chunk {i}"
            demand(at + length <= size, f"{where}: ends behind the file")
            lies = data[at:at + length]
            _check(lies, expected, where)
            plain = lies if mask & 2 else unzstd(lies, step, where)
            demand(plain.size == step, f"{where}: {plain.size} bytes, expected {step}")
            parts.append(plain if mask & 1 else numpy.ascontiguousarray(plain.reshape(item_bytes, -1).T).reshape(-1))
        return numpy.concatenate(parts)[:shard.bytes]


def _check(data, expected, where):
    found = xxh3(data)
    demand(found == expected, f"{where}: checksum {found:016x}, shards.bin has {expected:016x}")


def _bf16(bits, form):
    if form == "uint16":
        return bits
    if form in (None, "ml_dtypes"):
        try:
            return bits.view(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError:
            if form:
                raise
    demand(form in (None, "float32"), f"bf16={form!r}: expected ml_dtypes, float32 or uint16", CairnError)
    return (bits.astype("<u4") << 16).view("<f4")
