"""Reads the file of an offline run of Weights & Biases by its format (tools/track/wandb_file.h), without its client."""

import json
import struct
import zlib

BLOCK = 32768


def records(raw):
    """The records of a file, complete; fails on a wrong mark, checksum or order of pieces."""
    assert raw[:7] == b":W&B\xe1\xbe\x00", raw[:7]
    at, parts, out = 7, [], []
    while at < len(raw):
        left = BLOCK - at % BLOCK
        if left < 7:
            assert raw[at:at + left] == bytes(len(raw[at:at + left]))
            at += left
            continue
        checksum, size, kind = struct.unpack_from("<IHB", raw, at)
        data = raw[at + 7:at + 7 + size]
        assert len(data) == size and 7 + size <= left, (at, size, left)
        assert zlib.crc32(bytes([kind]) + data) == checksum, at
        assert kind in ((1, 2) if not parts else (3, 4)), (at, kind)
        parts.append(data)
        if kind in (1, 4):
            out.append(b"".join(parts))
            parts = []
        at += 7 + size
    assert not parts
    return out


def fields(message):
    """[(field, value)] of a protobuf message: integers and bytes."""
    def varint(at):
        value, shift = 0, 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    at, out = 0, []
    while at < len(message):
        tag, at = varint(at)
        if tag & 7 == 0:
            value, at = varint(at)
        else:
            assert tag & 7 == 2, tag
            size, at = varint(at)
            value, at = message[at:at + size], at + size
        out.append((tag >> 3, value))
    return out


def items(message, field=1):
    """{key: value} of repeated items with their values as JSON."""
    out = {}
    for name, value in fields(message):
        if name == field:
            item = dict(fields(value))
            key = item[1].decode()
            assert key not in out, key
            out[key] = json.loads(item[16])
    return out


def read(path):
    """{"run": {...}, "history": [{...}], "exit": [code]} of a file, whose records are numbered from 1."""
    out = {"run": None, "history": [], "exit": [], "header": 0}
    with open(path, "rb") as f:
        raw = f.read()
    for number, record in enumerate(records(raw), 1):
        content = dict(fields(record))
        assert content.pop(1) == number, (number, content)
        (kind, body), = content.items()
        if kind == 21:
            out["header"] += 1
        elif kind == 17:
            run = fields(body)
            one = dict(run)
            out["run"] = {"id": one[1].decode(), "entity": one.get(2, b"").decode(), "project": one[3].decode(),
                          "name": one[8].decode(), "tags": [v.decode() for k, v in run if k == 10],
                          "config": items(one[4])}
        elif kind == 2:
            row = items(body)
            step = dict(fields(dict(fields(body))[2]))[1]
            assert step == row["_step"], (step, row)
            out["history"].append(row)
        elif kind == 18:
            out["exit"].append(dict(fields(body)).get(1, 0))
        else:
            raise AssertionError(f"a record of kind {kind}")
    return out
