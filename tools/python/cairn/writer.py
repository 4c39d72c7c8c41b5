"""Writes a checkpoint of whole tensors: one shard file, raw shards, committed in the order of docs/format.md."""

import itertools
import os
import pathlib
import re
import shutil
import socket
import time

import numpy

from . import hdf5
from .checksum import xxh3, xxh3_hex
from .errors import CairnError, demand
from .format import KIND, NAME, STORED_AS, Shard, encode_manifest, encode_table, step_name

_FILE = "shard-00000-of-00001.h5"
_PAGE, _CHUNK, _MOST_HASHES = 4096, 1 << 22, 8000  # an attribute of HDF5 holds 64 KiB, and the hashes of a shard are one
_LARGEST_CHUNK = 1 << 30
_OF_NUMPY = {numpy.dtype(stored): dtype for dtype, stored in STORED_AS.items() if dtype != "bf16"}
_LIKE = ("samples", "tokens", "run", "recipe", "recipe_hash", "mesh", "state", "metrics", "extra")
_counter = itertools.count()


def write(folder, step, tensors, like=None, metrics=None, origin="cairn.write"):
    """Writes a complete checkpoint, which `cairn ckpt verify` accepts, and returns its folder.

    `folder`: where step-N is to be, or a run that has `checkpoints`. `tensors`: `kind/name` to an array; bf16 is an array
    of ml_dtypes.bfloat16, or ("bf16", array of uint16 bits). `like`: a `Checkpoint` whose position, recipe, run and state
    are taken over. `metrics`: name to float. Errors: CairnError, also if the step exists; then nothing is written.
    """
    folder = pathlib.Path(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    demand(isinstance(step, int) and 0 <= step < 10**15, f"step {step!r}: expected 0 to 15 digits", CairnError)
    target = folder / step_name(step)
    demand(not target.exists(), f"{target} exists; remove it, or write another step", CairnError)
    arrays = {key: _array(key, value) for key, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".tmp-{target.name}.{_writer()}"
    work.mkdir()
    try:
        shards, file = _write_shards(work / _FILE, step, arrays)
        table = encode_table(shards)
        _write_file(work / "shards.bin", table)
        body = {**_about(step, like, metrics, origin), "files": [file],
                "tensors": [{"kind": key.split("/")[0], "name": key.split("/")[1], "dtype": dtype,
                             "shape": list(array.shape)} for key, (dtype, array) in arrays.items()],
                "shards": {"size_bytes": len(table), "xxh3_64": xxh3_hex(table), "count": len(shards),
                           "chunks": sum(s.hashes.size for s in shards), "payload_bytes": sum(s.bytes for s in shards)}}
        _write_file(work / "manifest.json", encode_manifest(body))
        _sync_folder(work)
        os.rename(work, target)  # fails where the step has come meanwhile: a folder with files is never replaced
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    _sync_folder(folder)
    return target


def _array(key, value):
    """(dtype, contiguous array in the stored form)."""
    kind, slash, name = key.partition("/")
    demand(slash and KIND.fullmatch(kind) and NAME.fullmatch(name), f"{key!r}: expected kind/name, as weight/tok_emb", CairnError)
    if isinstance(value, tuple):
        dtype, value = value
        demand(dtype == "bf16" and value.dtype == numpy.uint16, f"{key}: expected (\"bf16\", array of uint16)", CairnError)
    else:
        value = numpy.asarray(value)
        dtype = "bf16" if value.dtype.name == "bfloat16" else _OF_NUMPY.get(value.dtype.newbyteorder("<"))
        demand(dtype, f"{key}: numpy's {value.dtype} has no place in a checkpoint; expected one of {list(STORED_AS)}", CairnError)
        if dtype == "bf16":
            value = value.view(numpy.uint16)
    demand(value.size > 0 and value.ndim <= 8, f"{key}: shape {value.shape}: expected up to 8 dims, each at least 1", CairnError)
    return dtype, numpy.asarray(value, STORED_AS[dtype], order="C")


def _write_shards(path, step, arrays):
    """The shard file, durable; its shards and its entry in the manifest."""
    shards = []
    for index, (dtype, array) in enumerate(arrays.values()):
        chunk = _CHUNK
        while array.nbytes > chunk * _MOST_HASHES and chunk < _LARGEST_CHUNK:
            chunk *= 2
        data = array.reshape(-1).view(numpy.uint8)
        hashes = numpy.array([xxh3(data[at:at + chunk]) for at in range(0, data.size, chunk)], "<u8")
        shards.append(Shard(index, 0, 0, array.nbytes, chunk, (0,) * array.ndim, array.shape, hashes, None))
    # The sizes of headers do not depend on the addresses in them: the first round places, the second one encodes.
    for _ in range(2):
        structure, end = _structure(step, arrays, shards)
    with open(path, "xb") as file:
        for shard, (_, array) in zip(shards, arrays.values()):
            file.seek(shard.offset)
            file.write(array.reshape(-1).view(numpy.uint8).data)
        file.truncate(end)
        file.seek(_PAGE)
        file.write(structure[_PAGE:])
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.write(structure[:_PAGE])
        file.flush()
        os.fsync(file.fileno())
    rest, at = bytearray(structure), len(structure)
    for shard in shards:
        rest += bytes(shard.offset - at)
        at = shard.offset + shard.bytes
    return shards, {"name": _FILE, "size_bytes": end, "rest_xxh3_64": xxh3_hex(bytes(rest))}


def _structure(step, arrays, shards):
    """All of the file before its payload, and the file's size; gives each shard its offset."""
    out, kinds = bytearray(hdf5.SUPERBLOCK_BYTES), {}

    def place(header):
        out.extend(bytes(-len(out) % 8))
        out.extend(header)
        return len(out) - len(header)

    for (key, (dtype, array)), shard in zip(arrays.items(), shards):
        kind, name = key.split("/")
        corners = [hdf5.array_attribute(what, "i64", numpy.array(value, "<i8"))
                   for what, value in (("global_shape", array.shape), ("lo", shard.lo), ("hi", shard.hi))]
        header = hdf5.dataset(dtype, array.shape, shard.offset, shard.bytes,
                              [hdf5.text_attribute("dtype", dtype), *corners,
                               hdf5.number_attribute("chunk_bytes", shard.chunk_bytes),
                               hdf5.array_attribute("chunk_xxh3_64", "u64", shard.hashes)])
        box = "_".join("0" for _ in shard.lo) or "scalar"
        kinds.setdefault(kind, {})[name] = place(hdf5.group({box: place(header)}))
    links = {kind: place(hdf5.group(names)) for kind, names in kinds.items()}
    root = place(hdf5.group(links, [hdf5.text_attribute("format", "cairn-checkpoint"), hdf5.number_attribute("version", 1),
                                    hdf5.number_attribute("step", step)]))
    end = max(_PAGE, len(out))
    out.extend(bytes(end - len(out)))
    for shard in shards:
        shard.offset = end + (-end % (_PAGE if shard.bytes >= _PAGE else 8))
        end = shard.offset + shard.bytes
    out[:hdf5.SUPERBLOCK_BYTES] = hdf5.superblock(root, end)
    return bytes(out), end


def _about(step, like, metrics, origin):
    body = {"samples": 0, "tokens": 0, "run": {"name": "", "id": "", "parents": []}, "recipe": "{}", "recipe_hash": "0" * 16,
            "mesh": {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1, "virtual_stages": 1, "world": 1, "zero": 0,
                     "precision": "fp32"}, "state": {}, "metrics": {}, "extra": {}}
    if like is not None:
        body.update({key: like.manifest[key] for key in _LIKE})
    if metrics is not None:
        body["metrics"] = {name: float(value) for name, value in metrics.items()}
    return {**body, "step": step, "created_unix_ms": time.time_ns() // 1000000, "origin": origin,
            "writer": {"program": "cairn.write", "host": socket.gethostname()}}


def _writer():
    """Host, process and counter, by which a later start of a run removes what a dead writer left."""
    with open("/proc/self/stat") as stat:
        started = stat.read().rsplit(")", 1)[1].split()[19]
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64]
    return f"{host}.{os.getpid()}.{started}.{next(_counter)}"


def _write_file(path, data):
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
