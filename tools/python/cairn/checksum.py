"""XXH3_64, zstd and HDF5's own checksum, over bytes or numpy arrays."""

import ctypes

import numpy

from .errors import demand
from .launcher import library


def _address(data):
    data = numpy.frombuffer(data, numpy.uint8)
    return data, data.ctypes.data if data.size else None


def xxh3(data):
    """XXH3_64 with seed 0, as a number, of contiguous bytes."""
    hasher = library("libxxhash.so.0").XXH3_64bits
    hasher.restype, hasher.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t]
    data, address = _address(data)
    return hasher(address, data.size)


def xxh3_hex(data):
    return f"{xxh3(data):016x}"


def unzstd(data, size, what):
    """The `size` bytes of the one zstd frame `data`. Errors: Damaged, which `what` names."""
    zstd = library("libzstd.so.1")
    zstd.ZSTD_decompress.restype = zstd.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t
    zstd.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    zstd.ZSTD_findFrameCompressedSize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    data, address = _address(data)
    demand(zstd.ZSTD_findFrameCompressedSize(address, data.size) == data.size, f"{what}: not exactly one zstd frame")
    out = numpy.empty(size, numpy.uint8)
    demand(zstd.ZSTD_decompress(out.ctypes.data, size, address, data.size) == size, f"{what}: the zstd frame is damaged")
    return out


def lookup3(data):
    """HDF5's checksum of metadata: Bob Jenkins's lookup3, hashlittle() from 0."""
    mask = 0xFFFFFFFF

    def rotate(x, k):
        return ((x << k) | (x >> (32 - k))) & mask

    a = b = c = (0xDEADBEEF + len(data)) & mask
    at = 0
    while len(data) - at > 12:
        a = (a + int.from_bytes(data[at:at + 4], "little")) & mask
        b = (b + int.from_bytes(data[at + 4:at + 8], "little")) & mask
        c = (c + int.from_bytes(data[at + 8:at + 12], "little")) & mask
        a = ((a - c) & mask) ^ rotate(c, 4); c = (c + b) & mask
        b = ((b - a) & mask) ^ rotate(a, 6); a = (a + c) & mask
        c = ((c - b) & mask) ^ rotate(b, 8); b = (b + a) & mask
        a = ((a - c) & mask) ^ rotate(c, 16); c = (c + b) & mask
        b = ((b - a) & mask) ^ rotate(a, 19); a = (a + c) & mask
        c = ((c - b) & mask) ^ rotate(b, 4); b = (b + a) & mask
        at += 12
    if at == len(data):
        return c
    tail = data[at:].ljust(12, b"\0")
    a = (a + int.from_bytes(tail[:4], "little")) & mask
    b = (b + int.from_bytes(tail[4:8], "little")) & mask
    c = (c + int.from_bytes(tail[8:], "little")) & mask
    c = ((c ^ b) - rotate(b, 14)) & mask
    a = ((a ^ c) - rotate(c, 11)) & mask
    b = ((b ^ a) - rotate(a, 25)) & mask
    c = ((c ^ b) - rotate(b, 16)) & mask
    a = ((a ^ c) - rotate(c, 4)) & mask
    b = ((b ^ a) - rotate(a, 14)) & mask
    return ((c ^ b) - rotate(b, 24)) & mask
