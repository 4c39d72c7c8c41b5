#!/usr/bin/python3
"""An independent reader of Cairn checkpoints, written from docs/format.md alone: h5py, numpy, json and XXH3.

  reader.py STEP_DIR [--expect DIR]     reads everything, checks every checksum, assembles whole tensors; with --expect
                                        compares them with DIR/<kind>.<name>.bin
  reader.py --make PROGRAM [--cold] [--damage N] lets PROGRAM (make_checkpoint) write a checkpoint, reads it, then flips N bytes,
                                        one at a time, and demands that each is noticed

Exit 0: all holds. 1: it does not. 77: h5py is missing, nothing was checked.
"""
import argparse
import ctypes
import json
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

try:
    import xxhash

    def xxh3(data):
        return xxhash.xxh3_64_hexdigest(data)
except ImportError:
    _lib = ctypes.CDLL("libxxhash.so.0")
    _lib.XXH3_64bits.restype = ctypes.c_uint64
    _lib.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def xxh3(data):
        return f"{_lib.XXH3_64bits(bytes(data), len(data)):016x}"


def unzstd(data, size):
    """One zstd frame of `size` bytes, by the system's library: Debian has no Python module that every test may need."""
    lib = ctypes.CDLL("libzstd.so.1")
    lib.ZSTD_decompress.restype = lib.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t
    lib.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    lib.ZSTD_findFrameCompressedSize.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    demand(lib.ZSTD_findFrameCompressedSize(data, len(data)) == len(data), "not exactly one zstd frame")
    out = ctypes.create_string_buffer(max(1, size))
    demand(lib.ZSTD_decompress(out, size, data, len(data)) == size, "zstd")
    return out.raw[:size]


def undo_chunk(stored, mask, chunk_bytes, item_bytes):
    plain = stored if mask & 2 else unzstd(stored, chunk_bytes)
    demand(len(plain) == chunk_bytes, "size of a chunk")
    return plain if mask & 1 else np.frombuffer(plain, np.uint8).reshape(item_bytes, -1).T.tobytes()


class Damaged(Exception):
    pass


def demand(condition, message):
    if not condition:
        raise Damaged(message)


ITEM_BYTES = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "u8": 1, "u16": 2, "u32": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
STORED_AS = {"f32": "<f4", "f64": "<f8", "bf16": "<u2", "f16": "<f2", "u8": "u1", "u16": "<u2", "u32": "<u4",
             "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
HEADER = re.compile(rb'\{"format":"cairn-checkpoint","version":(\d+),"body_bytes":(\d+),"body_xxh3_64":"([0-9a-f]{16})"\}\n')


def read_manifest(step_dir):
    raw = (step_dir / "manifest.json").read_bytes()
    header = HEADER.match(raw)
    demand(header, "manifest.json: the first line is no header")
    demand(int(header[1]) == 1, f"manifest.json: version {int(header[1])}, this reader knows 1")
    body = raw[header.end():]
    demand(len(body) == int(header[2]), f"manifest.json: body of {len(body)} bytes, header says {int(header[2])}")
    demand(xxh3(body) == header[3].decode(), "manifest.json: checksum of the body")
    manifest = json.loads(body)
    manifest["shards"] = read_table((step_dir / "shards.bin").read_bytes(), manifest["shards"])
    return manifest


def read_table(raw, info):
    demand(len(raw) == info["size_bytes"] and xxh3(raw) == info["xxh3_64"], "shards.bin: size or checksum")
    magic, version, zero, count, bounds, chunks, stored, size, zero2 = struct.unpack_from("<8sIIQQQQQQ", raw)
    demand(magic == b"CAIRNTBL" and version == 1 and zero == 0 and zero2 == 0 and size == len(raw), "shards.bin: header")
    demand(count == info["count"] and chunks == info["chunks"], "shards.bin: counts")
    bounds_at = 64 + 32 * count
    hashes_at = bounds_at + 8 * bounds
    stored_at = hashes_at + 8 * chunks
    demand(stored_at + 16 * stored == len(raw), "shards.bin: sections")
    shards = []
    stored_bytes_at = stored_at
    for i in range(count):
        tensor, file, offset, size, chunk_bytes, dims, codec, zero = struct.unpack_from("<IIQQIBBH", raw, 64 + 32 * i)
        demand(zero == 0 and codec in (0, 1), f"shards.bin: shard {i}: codec {codec}, this reader knows 0 and 1")
        n = -(-size // chunk_bytes)
        box = struct.unpack_from(f"<{2 * dims}q", raw, bounds_at)
        hashes = [f"{h:016x}" for h in struct.unpack_from(f"<{n}Q", raw, hashes_at)]
        shards.append({"tensor": tensor, "file": file, "lo": list(box[:dims]), "hi": list(box[dims:]), "offset": offset,
                       "bytes": size, "chunk_bytes": chunk_bytes, "hashes": hashes, "stored": None})
        if codec == 1:
            shards[-1]["stored"] = [struct.unpack_from("<QII", raw, stored_bytes_at + 16 * c) for c in range(n)]
            stored_bytes_at += 16 * n
        bounds_at += 16 * dims
        hashes_at += 8 * n
    demand(hashes_at == stored_at and stored_bytes_at == len(raw), "shards.bin: number of hashes or stored chunks")
    demand(sum(s["bytes"] for s in shards) == info["payload_bytes"], "shards.bin: payload_bytes")
    return shards


def read_checkpoint(step_dir):
    """{(kind, name): array} with every checksum checked; bf16 stays as uint16."""
    manifest = read_manifest(step_dir)
    tensors = manifest["tensors"]
    whole = {}
    covered = {}
    for tensor in tensors:
        key = (tensor["kind"], tensor["name"])
        demand(key not in whole, f"{key} is there twice")
        whole[key] = np.zeros(tensor["shape"], STORED_AS[tensor["dtype"]])
        covered[key] = np.zeros(tensor["shape"], np.int32)

    for file_index, entry in enumerate(manifest["files"]):
        elsewhere = entry.get("step")
        path = step_dir / entry["name"] if elsewhere is None else step_dir.parent / f"step-{elsewhere:08d}" / entry["name"]
        demand(elsewhere is None or elsewhere < manifest["step"], f"{entry['name']}: of step {elsewhere}")
        demand(path.is_file(), f"{path} is missing")
        data = path.read_bytes()
        demand(len(data) == entry["size_bytes"], f"{entry['name']}: size")
        shards = [s for s in manifest["shards"] if s["file"] == file_index]
        extents = sorted(e for s in shards for e in ([(s["offset"], s["bytes"])] if s["stored"] is None else
                                                     [(at, size) for at, size, mask in s["stored"]]))
        rest, at = bytearray(), 0
        for offset, size in extents:
            demand(offset >= at, f"{entry['name']}: shards overlap")
            rest += data[at:offset]
            at = offset + size
        rest += data[at:]
        if elsewhere is not None:  # that file has more shards: what belongs to none is for its own manifest to say
            (other,) = [f for f in read_manifest(path.parent)["files"] if f["name"] == entry["name"]]
            demand(other["rest_xxh3_64"] == entry["rest_xxh3_64"], f"{entry['name']}: is not the file that was meant")
        else:
            demand(xxh3(bytes(rest)) == entry["rest_xxh3_64"], f"{entry['name']}: checksum of what is not payload")

        with h5py.File(path, "r") as h5:
            demand(h5.attrs["format"] == b"cairn-checkpoint" and h5.attrs["version"] == 1, "root attributes")
            demand(h5.attrs["step"] == (manifest["step"] if elsewhere is None else elsewhere), "root attribute step")
            for shard in shards:
                tensor = tensors[shard["tensor"]]
                lo, hi, dtype = shard["lo"], shard["hi"], tensor["dtype"]
                name = f"/{tensor['kind']}/{tensor['name']}/{'_'.join(map(str, lo)) if lo else 'scalar'}"
                extents = tuple(b - a for a, b in zip(lo, hi))
                step, stored = shard["chunk_bytes"], shard["stored"]
                demand(shard["bytes"] == ITEM_BYTES[dtype] * int(np.prod(extents, dtype=np.int64)), f"{name}: bytes")
                demand(len(shard["hashes"]) == -(-shard["bytes"] // step), f"{name}: number of chunks")
                if stored is None:
                    payload = data[shard["offset"]:shard["offset"] + shard["bytes"]]
                    lies = [payload[i * step:(i + 1) * step] for i in range(len(shard["hashes"]))]
                else:
                    lies = [data[at:at + size] for at, size, mask in stored]
                for chunk, expected in enumerate(shard["hashes"]):
                    demand(xxh3(lies[chunk]) == expected, f"{name}: chunk {chunk}")
                dataset = h5[name]
                demand(dataset.shape == extents and (dataset.chunks is None) == (stored is None), f"{name}: shape or layout")
                if stored is None:
                    demand(dataset.id.get_offset() == shard["offset"], f"{name}: offset")
                    demand(dataset[()].tobytes() == payload, f"{name}: h5py reads other bytes")
                else:
                    payload = b"".join(undo_chunk(b, s[2], step, ITEM_BYTES[dtype]) for b, s in zip(lies, stored))
                    payload = payload[:shard["bytes"]]
                    filters = dataset.id.get_create_plist()
                    demand([filters.get_filter(i)[0] for i in range(filters.get_nfilters())] == [2, 32015], f"{name}: filters")
                    demand(int(np.prod(dataset.chunks)) * ITEM_BYTES[dtype] == step, f"{name}: size of chunks")
                    demand(dataset.id.get_num_chunks() == len(stored), f"{name}: number of chunks")
                    for i, (at, size, mask) in enumerate(stored):
                        info = dataset.id.get_chunk_info(i)
                        demand((info.byte_offset, info.size, info.filter_mask) == (at, size, mask), f"{name}: place {i}")
                        element = np.ravel_multi_index(info.chunk_offset, extents)
                        demand(element * ITEM_BYTES[dtype] == i * step, f"{name}: order of chunks")
                        demand(dataset.id.read_direct_chunk(info.chunk_offset) == (mask, lies[i]), f"{name}: raw chunk {i}")
                demand(dataset.dtype == np.dtype(STORED_AS[dtype]), f"{name}: type {dataset.dtype}")
                demand(dataset.attrs["dtype"] == dtype.encode(), f"{name}: attribute dtype")
                for attribute, value in (("global_shape", tensor["shape"]), ("lo", lo), ("hi", hi)):
                    demand(list(dataset.attrs[attribute]) == value, f"{name}: attribute {attribute}")
                demand(dataset.attrs["chunk_bytes"] == step, f"{name}: attribute chunk_bytes")
                demand([f"{h:016x}" for h in dataset.attrs["chunk_xxh3_64"]] == shard["hashes"], f"{name}: attribute hashes")
                box = tuple(slice(a, b) for a, b in zip(lo, hi))
                key = (tensor["kind"], tensor["name"])
                whole[key][box] = np.frombuffer(payload, STORED_AS[dtype]).reshape(extents)
                covered[key][box] += 1
    for key, counts in covered.items():
        demand(bool(np.all(counts == 1)), f"{key}: shards do not tile the tensor")
    return manifest, whole


def check(step_dir, expect=None):
    manifest, tensors = read_checkpoint(step_dir)
    if expect:
        files = sorted(p.name for p in expect.iterdir())
        demand(files == sorted(f"{kind}.{name}.bin" for kind, name in tensors), "other tensors than expected")
        for (kind, name), array in tensors.items():
            demand((expect / f"{kind}.{name}.bin").read_bytes() == array.tobytes(), f"{kind} {name}: other contents")
    print(f"{step_dir.name}: step {manifest['step']}, {len(tensors)} tensors, {len(manifest['shards'])} shards in "
          f"{len(manifest['files'])} files: all checksums hold" + (", contents as expected" if expect else ""))


def check_damage(step_dir, rounds):
    """Every byte of a checkpoint is under a checksum, so any flipped byte must be noticed."""
    draw = random.Random(1)
    files = sorted(p for p in step_dir.iterdir() if p.name != "references")  # a note for who removes; not checked
    for _ in range(rounds):
        path = draw.choice(files)
        good = path.read_bytes()
        at = draw.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1:])
        try:
            read_checkpoint(step_dir)
        except Damaged:
            pass
        else:
            raise Damaged(f"{path.name}: a flipped bit in byte {at} was not noticed")
        finally:
            path.write_bytes(good)
    print(f"{rounds} flipped bits, each noticed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_dir", nargs="?", type=pathlib.Path)
    parser.add_argument("--expect", type=pathlib.Path)
    parser.add_argument("--make")
    parser.add_argument("--cold", action="store_true", help="let PROGRAM make a coded checkpoint and one that refers to it")
    parser.add_argument("--damage", type=int, default=0)
    args = parser.parse_args()
    try:
        if args.make:
            work = pathlib.Path(tempfile.mkdtemp(prefix="cairn-reader-"))
            try:
                command = [args.make, *["--cold"] * args.cold, work / "ck", work / "expect"]
                made = subprocess.run(command, check=True, capture_output=True, text=True)
                step_dir = pathlib.Path(made.stdout.strip())
                check(step_dir, work / "expect")
                check_damage(step_dir, args.damage)
                if args.cold:  # and the one that it refers to
                    check(step_dir.parent / "step-00000012")
                    check_damage(step_dir.parent / "step-00000012", args.damage)
            finally:
                shutil.rmtree(work)
        elif args.step_dir:
            check(args.step_dir, args.expect)
        else:
            parser.error("a directory or --make is needed")
    except Damaged as error:
        print(f"damaged: {error}")
        return 1
    return 0


sys.exit(main())
