"""export --hdf5: one file that safetensors and HDF5 readers open, checked with h5py and with a safetensors reader as strict
as the library's own: every byte belongs to exactly one tensor."""

import json
import os
import struct
import sys

from program import ProgramTest, main

try:
    import h5py
    import numpy as np
    import xxhash
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}


def read_safetensors(path, offsets=None):
    """{name: array}, as the safetensors library would: no holes, no overlaps, nothing behind the last tensor."""
    with open(path, "rb") as f:
        data = f.read()
    (length,) = struct.unpack_from("<Q", data)
    assert length <= 100_000_000 and data[8:9] == b"{"
    header = json.loads(data[8:8 + length], object_pairs_hook=no_key_twice)
    header.pop("__metadata__", None)
    at, out = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert sorted(entry) == ["data_offsets", "dtype", "shape"]
        begin, end = entry["data_offsets"]
        assert begin == at, f"{name} begins at {begin}, the one before ends at {at}"
        kind = np.dtype(DTYPES[entry["dtype"]])
        assert end - begin == kind.itemsize * int(np.prod(entry["shape"], dtype=np.int64)), name
        if offsets is not None:
            offsets[name] = 8 + length + begin
        out[name] = np.frombuffer(data, kind, (end - begin) // kind.itemsize, 8 + length + begin).reshape(entry["shape"])
        at = end
    assert 8 + length + at == len(data), f"the tensors end at {8 + length + at}, the file at {len(data)}"
    return out


def no_key_twice(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


class DualTest(ProgramTest):
    def export(self, golden, *args):
        self.cairn("import", os.path.join(GOLDEN, golden), "run")
        self.cairn("export", "run", "plain", *args)
        self.cairn("export", "run", "dual", "--hdf5", *args)

    def compare(self, name):
        """The dual file, through both readers, against the plain export."""
        plain = read_safetensors(self.path("plain/" + name))
        self.offsets = {}
        dual = read_safetensors(self.path("dual/" + name), self.offsets)
        ours = {key: value for key, value in dual.items() if key.startswith("__hdf5__.")}
        self.assertEqual(set(dual) - set(ours), set(plain))
        self.assertTrue(all(value.dtype == np.uint8 and value.ndim == 1 for value in ours.values()))
        second = self.path("dual/" + name.replace(".safetensors", ".h5"))
        self.assertEqual(os.stat(second).st_ino, os.stat(self.path("dual/" + name)).st_ino)  # no second copy
        with h5py.File(second, "r") as h5:
            self.assertGreaterEqual(h5.userblock_size, 4096)
            self.assertEqual(h5.attrs["format"], b"cairn-checkpoint")
            at = {}  # datasets by their place in the file: they may have Cairn's names
            h5["weight"].visititems(lambda _, item: at.update({item.id.get_offset(): item})
                                    if isinstance(item, h5py.Dataset) else None)
            self.assertEqual(len(at), len(plain))
            for key, value in plain.items():
                dataset = at[self.offsets[key]]
                self.assertEqual(dataset.shape, value.shape)
                payload = value.tobytes()
                self.assertEqual(dual[key].tobytes(), payload, key)
                self.assertEqual(dataset[()].tobytes(), payload, key)
                step = int(dataset.attrs["chunk_bytes"])
                self.assertEqual(list(dataset.attrs["chunk_xxh3_64"]),
                                 [xxhash.xxh3_64_intdigest(payload[i:i + step]) for i in range(0, len(payload), step)])
        return plain

    def test_a_model_of_one_file(self):
        for golden in ("hf-gpt2-tied", "hf-llama-tied-bias"):
            with self.subTest(golden):
                self.setUp()
                self.export(golden)
                self.assertGreater(len(self.compare("model.safetensors")), 10)
                # Cairn's own reader takes it for what it is, and leaves HDF5's bytes alone.
                self.cairn("import", "dual", "again")
                self.cairn("export", "again", "back")
                with open(self.path("back/model.safetensors"), "rb") as a, open(self.path("plain/model.safetensors"), "rb") as b:
                    self.assertEqual(a.read(), b.read())

    def test_a_folder_that_is_a_checkpoint_is_exported_without_writing_weights(self):
        self.export("hf-llama-tied-bias")
        self.assertTrue(self.cairn_json("ckpt", "verify", "dual")["whole"])
        seen = self.cairn_json("ckpt", "inspect", "dual")
        self.assertEqual(list(seen["kinds"]), ["weight"])
        done = self.cairn_json("export", "dual", "again", "--hdf5")
        self.assertTrue(done["linked"])
        first, second = self.path("dual/model.h5"), self.path("again/model.safetensors")
        self.assertEqual(os.stat(first).st_ino, os.stat(second).st_ino)
        self.assertTrue(self.cairn_json("ckpt", "verify", "again")["whole"])
        for name in sorted(set(os.listdir(self.path("dual"))) - {"README.md"}):  # the card has the folder's name
            with open(self.path("dual/" + name), "rb") as a, open(self.path("again/" + name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)
        self.assertEqual(sorted(os.listdir(self.path("dual"))), sorted(os.listdir(self.path("again"))))
        # Other weights are written, not linked.
        self.assertFalse(self.cairn_json("export", "dual", "half", "--hdf5", "--dtype", "bf16")["linked"])
        # A flipped bit of a weight, and one of HDF5's own bytes, are found and named.
        for at in (-5000, 4096):
            with open(first, "r+b") as f:
                f.seek(at, 2 if at < 0 else 0)
                byte = f.read(1)
                f.seek(-1, 1)
                f.write(bytes([byte[0] ^ 1]))
            self.assertFalse(self.cairn_json("ckpt", "verify", "dual", code=65)["whole"])
            with open(first, "r+b") as f:
                f.seek(at, 2 if at < 0 else 0)
                f.write(byte)
        self.assertTrue(self.cairn_json("ckpt", "verify", "dual")["whole"])

    def test_dual_files_of_other_dtypes_and_of_several_shards(self):
        self.export("hf-llama-gqa-sharded", "--dtype", "bf16", "--max-shard-size", "20KB")
        names = [name for name in os.listdir(self.path("plain")) if name.endswith(".safetensors")]
        self.assertGreater(len(names), 2)
        for name in names:
            self.compare(name)
        # Replacing it by an export without HDF5 leaves no stale second name.
        self.cairn("export", "run", "dual", "--overwrite")
        self.assertEqual([name for name in os.listdir(self.path("dual")) if name.endswith(".h5")], [])


main()
