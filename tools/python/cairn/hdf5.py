"""The structure of a shard file: HDF5, superblock version 3, without libhdf5. Source: the HDF5 file format, version 3.0.

Groups keep their links, and datasets their attributes, in their own object headers: no heap and no index is needed.
"""

import struct

from .checksum import lookup3

UNDEFINED = 0xFFFFFFFFFFFFFFFF
SUPERBLOCK_BYTES = 48
_FLOATS = {"f32": (4, 31, 23, 8, 127), "f64": (8, 63, 52, 11, 1023), "f16": (2, 15, 10, 5, 15)}
_INTS = {"bf16": (2, 0), "u8": (1, 0), "u16": (2, 0), "u32": (4, 0), "i8": (1, 1), "i16": (2, 1), "i32": (4, 1), "i64": (8, 1),
         "u64": (8, 0)}


def _datatype(dtype):
    if dtype in _FLOATS:
        size, sign, mantissa, exponent, bias = _FLOATS[dtype]
        return struct.pack("<BBBBIHHBBBBI", 0x11, 0x20, sign, 0, size, 0, 8 * size, mantissa, exponent, 0, mantissa, bias)
    size, signed = _INTS[dtype]
    return struct.pack("<BBBBIHH", 0x10, 8 * signed, 0, 0, size, 0, 8 * size)


def _dataspace(shape):
    return struct.pack(f"<BBBB{len(shape or ())}Q", 2, len(shape or ()), 0, 0 if shape is None else 1, *(shape or ()))


def _attribute(name, datatype, shape, data):
    name, space = name.encode() + b"\0", _dataspace(shape)
    head = struct.pack("<BBHHHB", 3, 0, len(name), len(datatype), len(space), 0)
    return 0x0C, head + name + datatype + space + data


def text_attribute(name, text):
    return _attribute(name, struct.pack("<BBBBI", 0x13, 1, 0, 0, len(text)), None, text.encode())


def number_attribute(name, number):
    return _attribute(name, _datatype("i64"), None, struct.pack("<q", number))


def array_attribute(name, dtype, array):
    """`array`: numpy's, of one dim."""
    return _attribute(name, _datatype(dtype), (array.size,), array.tobytes())


def _header(messages):
    body = b"".join(struct.pack("<BHB", kind, len(data), 0) + data for kind, data in messages)
    head = b"OHDR" + struct.pack("<BBI", 2, 2, len(body)) + body
    return head + struct.pack("<I", lookup3(head))


def dataset(dtype, shape, address, size, attributes):
    """An object header: contiguous bytes at an address, allocated early, never filled."""
    return _header([(0x01, _dataspace(shape or None)), (0x03, _datatype(dtype)), (0x05, bytes([3, 0x05])),
                    (0x08, struct.pack("<BBQQ", 3, 1, address, size)), *attributes])


def group(links, attributes=()):
    """An object header. `links`: name to the address of what it names."""
    messages = [(0x02, struct.pack("<BBQQ", 0, 0, UNDEFINED, UNDEFINED)), (0x0A, bytes([0, 0]))]
    for name, address in links.items():
        name = name.encode()
        messages.append((0x06, struct.pack("<BBB", 1, 0, len(name)) + name + struct.pack("<Q", address)))
    return _header([*messages, *attributes])


def superblock(root, end):
    head = b"\x89HDF\r\n\x1a\n" + struct.pack("<BBBBQQQQ", 3, 8, 8, 0, 0, UNDEFINED, end, root)
    return head + struct.pack("<I", lookup3(head))
