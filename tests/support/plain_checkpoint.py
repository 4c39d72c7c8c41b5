"""Writes checkpoints of any tensors, from docs/format.md alone: for tests of tools on dtypes and values that no training makes.

The one file of each is plain payload without HDF5 around it, which all but `ckpt verify` read by its manifest.
"""

import json
import pathlib
import struct

import numpy
import xxhash

CHUNK_BYTES = 4096
NUMPY = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<u2", "u8": "u1", "u16": "<u2", "u32": "<u4", "i8": "i1",
         "i16": "<i2", "i32": "<i4", "i64": "<i8"}


def text_of(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def hex_of(data):
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def write_checkpoint(steps, step, tensors, recipe="{}", rows=1):
    """`tensors`: {"kind/name": (dtype, array)}, bf16 as the upper halves of float32; each cut into `rows` shards."""
    folder = pathlib.Path(steps) / f"step-{step:08d}"
    folder.mkdir(parents=True)
    payload, records, bounds, hashes, entries = bytearray(), b"", b"", b"", []
    shards = 0
    for index, (name, (dtype, array)) in enumerate(tensors.items()):
        array = numpy.ascontiguousarray(array, dtype=NUMPY[dtype])
        kind, name = name.split("/")
        entries.append({"kind": kind, "name": name, "dtype": dtype, "shape": list(array.shape)})
        cuts = min(rows, array.shape[0]) if array.ndim else 1
        for cut in range(cuts):
            lo, hi = [0] * array.ndim, list(array.shape)
            if array.ndim:
                lo[0], hi[0] = array.shape[0] * cut // cuts, array.shape[0] * (cut + 1) // cuts
            data = array[tuple(slice(a, b) for a, b in zip(lo, hi))].tobytes()
            records += struct.pack("<IIQQIBBH", index, 0, len(payload), len(data), CHUNK_BYTES, array.ndim, 0, 0)
            bounds += struct.pack(f"<{2 * array.ndim}q", *lo, *hi)
            for at in range(0, len(data), CHUNK_BYTES):
                hashes += struct.pack("<Q", xxhash.xxh3_64_intdigest(data[at:at + CHUNK_BYTES]))
            payload += data
            shards += 1
    table = struct.pack("<8sIIQQQQQQ", b"CAIRNTBL", 1, 0, shards, len(bounds) // 8, len(hashes) // 8, 0,
                        64 + len(records) + len(bounds) + len(hashes), 0) + records + bounds + hashes
    (folder / "plain.h5").write_bytes(payload)
    (folder / "shards.bin").write_bytes(table)
    body = {"step": step, "samples": 0, "tokens": 0, "created_unix_ms": 1700000000000 + step,
            "run": {"name": "plain", "id": "plain-1", "parents": []}, "recipe": recipe, "recipe_hash": "0" * 16,
            "mesh": {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "cp": 1, "virtual_stages": 1, "world": 1, "zero": 0,
                     "precision": "f32"},
            "state": {}, "metrics": {}, "writer": {"program": "test", "host": "here"}, "origin": "", "extra": {},
            "tensors": entries,
            "files": [{"name": "plain.h5", "size_bytes": len(payload), "rest_xxh3_64": hex_of(b"")}],
            "shards": {"size_bytes": len(table), "xxh3_64": hex_of(table), "count": shards, "chunks": len(hashes) // 8,
                       "payload_bytes": len(payload)}}
    text = (text_of(body) + "\n").encode()
    head = f'{{"format":"cairn-checkpoint","version":1,"body_bytes":{len(text)},"body_xxh3_64":"{hex_of(text)}"}}\n'
    (folder / "manifest.json").write_bytes(head.encode() + text)
    return folder
