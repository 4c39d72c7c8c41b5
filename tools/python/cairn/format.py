"""The files of a checkpoint as values: manifest.json and shards.bin. docs/format.md describes both."""

import json
import math
import re
import struct
from dataclasses import dataclass

import numpy

from .checksum import xxh3_hex
from .errors import CairnError, demand

STORED_AS = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<u2", "u8": "u1", "u16": "<u2", "u32": "<u4", "i8": "i1",
             "i16": "<i2", "i32": "<i4", "i64": "<i8"}
MANIFEST_KEYS = {"step", "samples", "tokens", "created_unix_ms", "run", "recipe", "recipe_hash", "mesh", "state", "metrics",
                 "writer", "origin", "extra", "tensors", "files", "shards"}
NAME, KIND = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,255}"), re.compile(r"[a-z0-9_]{1,32}")
FILE = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,252}\.h5")
HEADER = re.compile(rb'\{"format":"cairn-checkpoint","version":(\d+)')
REST = re.compile(rb',"body_bytes":(\d+),"body_xxh3_64":"([0-9a-f]{16})"\}\n')
TABLE_HEADER, RECORD = struct.Struct("<8sIIQQQQQQ"), struct.Struct("<IIQQIBBH")
RECORDS = numpy.dtype([("tensor", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("bytes", "<u8"), ("chunk_bytes", "<u4"),
                       ("dims", "u1"), ("codec", "u1"), ("zero", "<u2")])
STORED = numpy.dtype([("at", "<u8"), ("bytes", "<u4"), ("mask", "<u4")])


@dataclass
class Shard:
    """A box of a tensor. `lo`, `hi` in elements; `offset`, `bytes`, `chunk_bytes` in bytes; `stored`: None in a raw shard."""
    tensor: int
    file: int
    offset: int
    bytes: int
    chunk_bytes: int
    lo: tuple
    hi: tuple
    hashes: numpy.ndarray
    stored: object


def step_name(step):
    return f"step-{step:08d}"


def canonical(value):
    """JSON in the one spelling that the format allows: keys in byte order, no spaces."""
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: item[0].encode())
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{canonical(v)}" for k, v in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, float):
        demand(math.isfinite(value), f"{value}: a checkpoint has finite numbers only", CairnError)
        if 1e15 <= abs(value) < 1e16:  # Python spells these without an exponent, Cairn with one
            digits = f"{value:.16e}"
            for places in range(17):
                digits = f"{value:.{places}e}"
                if float(digits) == value:
                    break
            return digits
    return json.dumps(value, ensure_ascii=False)


def encode_manifest(body):
    text = (canonical(body) + "\n").encode()
    head = f'{{"format":"cairn-checkpoint","version":1,"body_bytes":{len(text)},"body_xxh3_64":"{xxh3_hex(text)}"}}\n'
    return head.encode() + text


def decode_manifest(raw, where):
    """The manifest's object. Errors: Damaged, CairnError of another version."""
    head = HEADER.match(raw)
    demand(head, f"{where}: byte 0: not the header of a checkpoint")
    demand(int(head[1]) == 1, f"{where}: byte 39: format version {int(head[1])}, this reader knows 1", CairnError)
    rest = REST.match(raw, head.end())
    demand(rest, f"{where}: byte {head.end()}: the header is damaged")
    body = raw[rest.end():]
    demand(len(body) == int(rest[1]), f"{where}: a body of {len(body)} bytes, and the header has {int(rest[1])}")
    demand(xxh3_hex(body) == rest[2].decode(), f"{where}: checksum {xxh3_hex(body)}, the header has {rest[2].decode()}")
    value = json.loads(body)
    demand(set(value) == MANIFEST_KEYS, f"{where}: keys {sorted(set(value) ^ MANIFEST_KEYS)} are missing or unknown")
    for index, tensor in enumerate(value["tensors"]):
        at = f"{where}: tensors[{index}]"
        demand(KIND.fullmatch(tensor["kind"]) and NAME.fullmatch(tensor["name"]), f"{at}: a name that is not allowed")
        demand(tensor["dtype"] in STORED_AS, f"{at}: dtype {tensor['dtype']} is not known to this reader", CairnError)
        demand(len(tensor["shape"]) <= 8 and all(n >= 1 for n in tensor["shape"]), f"{at}: shape {tensor['shape']}")
    for index, file in enumerate(value["files"]):
        demand(FILE.fullmatch(file["name"]), f"{where}: files[{index}]: a name that is not allowed")
        demand(0 <= file.get("step", 0) <= value["step"], f"{where}: files[{index}]: of a later step")
    return value


def decode_table(raw, manifest, where):
    """The shards of shards.bin, each fitting its tensor. Errors: Damaged."""
    info = manifest["shards"]
    demand(len(raw) == info["size_bytes"], f"{where}: {len(raw)} bytes, the manifest has {info['size_bytes']}")
    demand(xxh3_hex(raw) == info["xxh3_64"], f"{where}: checksum {xxh3_hex(raw)}, the manifest has {info['xxh3_64']}")
    demand(len(raw) >= TABLE_HEADER.size, f"{where}: no header")
    magic, version, zero, count, bounds, chunks, stored, size, zero2 = TABLE_HEADER.unpack_from(raw)
    demand((magic, version, zero, zero2) == (b"CAIRNTBL", 1, 0, 0), f"{where}: byte 0: not a table of version 1")
    demand(size == len(raw) == 64 + 32 * count + 8 * bounds + 8 * chunks + 16 * stored, f"{where}: byte 48: size of the file")
    records = numpy.frombuffer(raw, RECORDS, count, 64)
    boxes = numpy.frombuffer(raw, "<i8", bounds, 64 + 32 * count).tolist()
    hashes = numpy.frombuffer(raw, "<u8", chunks, 64 + 32 * count + 8 * bounds)
    places = numpy.frombuffer(raw, STORED, stored, 64 + 32 * count + 8 * bounds + 8 * chunks)
    shards, box_at, hash_at, place_at = [], 0, 0, 0
    for index, (tensor, file, offset, size, chunk_bytes, dims, codec, zero) in enumerate(records.tolist()):
        at = f"{where}: byte {64 + 32 * index}: shard {index}"
        demand(codec in (0, 1), f"{at}: codec {codec} is not known to this reader", CairnError)
        demand(tensor < len(manifest["tensors"]) and file < len(manifest["files"]) and zero == 0 and chunk_bytes > 0,
               f"{at}: of no tensor, of no file or without chunks")
        entry = manifest["tensors"][tensor]
        lo, hi = tuple(boxes[box_at:box_at + dims]), tuple(boxes[box_at + dims:box_at + 2 * dims])
        item = numpy.dtype(STORED_AS[entry["dtype"]]).itemsize
        demand(dims == len(entry["shape"]) and len(hi) == dims and
               all(0 <= a < b <= n for a, b, n in zip(lo, hi, entry["shape"])), f"{at}: leaves its tensor")
        demand(size == item * math.prod(b - a for a, b in zip(lo, hi)), f"{at}: {size} bytes do not fit its box")
        demand(chunk_bytes % item == 0, f"{at}: chunks cut elements")
        n = -(-size // chunk_bytes)
        shards.append(Shard(tensor, file, offset, size, chunk_bytes, lo, hi, hashes[hash_at:hash_at + n],
                            places[place_at:place_at + n] if codec == 1 else None))
        box_at, hash_at, place_at = box_at + 2 * dims, hash_at + n, place_at + (n if codec == 1 else 0)
    demand((box_at, hash_at, place_at) == (bounds, chunks, stored), f"{where}: numbers of bounds, hashes or stored chunks")
    return shards


def encode_table(shards):
    """shards.bin of raw shards."""
    records = b"".join(RECORD.pack(s.tensor, s.file, s.offset, s.bytes, s.chunk_bytes, len(s.lo), 0, 0) for s in shards)
    bounds = b"".join(struct.pack(f"<{2 * len(s.lo)}q", *s.lo, *s.hi) for s in shards)
    hashes = b"".join(s.hashes.astype("<u8").tobytes() for s in shards)
    size = 64 + len(records) + len(bounds) + len(hashes)
    return TABLE_HEADER.pack(b"CAIRNTBL", 1, 0, len(shards), len(bounds) // 8, len(hashes) // 8, 0, size,
                             0) + records + bounds + hashes


def tiles(shape, boxes):
    """Whether boxes of a tensor cover each element once: signs of corners add up to those of the whole."""
    signs = {}

    def add(lo, hi, sign):
        corners = [((), sign)]
        for a, b in zip(lo, hi):
            corners = [(at + (x,), s * f) for at, s in corners for x, f in ((a, 1), (b, -1))]
        for at, s in corners:
            signs[at] = signs.get(at, 0) + s

    for lo, hi in boxes:
        add(lo, hi, 1)
    add((0,) * len(shape), tuple(shape), -1)
    return not any(signs.values())
