"""tools/python/cairn: reads what the program writes, and writes what the program verifies."""

import io
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/python"))
import cairn  # noqa: E402
from cairn.format import canonical  # noqa: E402

PROGRAM = None
GOLDEN = ["checkpoint-v1/step-00000012", "checkpoint-v1-cold/step-00000012", "checkpoint-v1-cold/step-00000013"]


def run(*args, code=0):
    done = subprocess.run([str(a) for a in args], capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code, f"{args}: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
    return done.stdout


class PythonTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cairn-python-")
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def test_each_tensor_of_a_checkpoint_has_the_bytes_that_the_program_prints(self):
        for name in GOLDEN:
            checkpoint = cairn.open(ROOT / "tests/golden" / name)
            self.assertGreater(len(checkpoint), 3)
            for key in checkpoint:
                expected = numpy.load(io.BytesIO(run(PROGRAM, "ckpt", "cat", checkpoint.folder, key)))
                form = "float32" if expected.dtype == numpy.float32 else "uint16"
                found = checkpoint.tensor(key, bf16=form)
                self.assertEqual((found.shape, found.dtype), (expected.shape, expected.dtype), f"{name}: {key}")
                self.assertTrue(found.tobytes() == expected.tobytes(), f"{name}: {key}")  # some are NaN

    def test_a_flipped_bit_of_payload_or_of_a_table_is_found(self):
        draw = random.Random(1)
        for name in GOLDEN[:2]:
            folder = self.work / name.replace("/", "-")
            shutil.copytree(ROOT / "tests/golden" / name, folder / "step-00000012")
            for path in sorted((folder / "step-00000012").iterdir()):
                good = path.read_bytes()
                checkpoint = cairn.open(path.parent)
                shards = [s for group in checkpoint._shards.values() for s in group
                          if checkpoint.manifest["files"][s.file]["name"] == path.name]
                spans = [(s.offset, s.bytes) for s in shards if s.stored is None]
                spans += [(at, size) for s in shards if s.stored is not None for at, size, _ in s.stored.tolist()]
                for start, size in spans or [(0, len(good))] * 20:
                    at = start + draw.randrange(size)
                    path.write_bytes(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1:])
                    with self.assertRaises(cairn.CairnError, msg=f"{path}: byte {at}"):
                        for key in cairn.open(path.parent):
                            cairn.open(path.parent)[key]
                path.write_bytes(good)

    def test_a_written_checkpoint_is_verified_and_read_by_others(self):
        draw = numpy.random.default_rng(1)
        tensors = {"weight/matrix": draw.standard_normal((1200, 1200)).astype("f4"), "weight/half": draw.standard_normal(5).astype("f2"),
                   "weight/scalar": numpy.array(3.5), "exp_avg/upper": ("bf16", numpy.arange(12, dtype="u2").reshape(3, 4)),
                   "file/text": numpy.arange(9, dtype="u1"), "weight/fortran": numpy.asfortranarray(draw.standard_normal((7, 5)))}
        like = cairn.open(ROOT / "tests/golden" / GOLDEN[0])
        written = cairn.write(self.work / "steps", 7, tensors, like=like, metrics={"loss": 2.0})
        run(PROGRAM, "ckpt", "verify", written)
        checkpoint = cairn.open(self.work / "steps").checkpoint()
        expect = self.work / "expect"
        expect.mkdir()
        for key, value in tensors.items():
            value = value[1] if isinstance(value, tuple) else value
            self.assertTrue(numpy.array_equal(checkpoint.tensor(key, bf16="uint16"), value), key)
            (expect / f"{key.replace('/', '.')}.bin").write_bytes(value.tobytes())
        self.assertEqual(checkpoint.tensor("exp_avg/upper", bf16="float32")[2, 3], numpy.uint32(11 << 16).view("f4"))
        reader = subprocess.run([sys.executable, ROOT / "tests/ckpt/reader.py", written, "--expect", expect], capture_output=True)
        self.assertIn(reader.returncode, (0, 77), reader.stdout)  # 77: without h5py
        self.assertEqual(checkpoint.manifest["recipe"], like.manifest["recipe"])

    def test_a_checkpoint_that_exists_or_a_type_without_a_place_is_refused(self):
        cairn.write(self.work, 1, {"weight/w": numpy.ones(3)})
        before = sorted(self.work.rglob("*"))
        with self.assertRaisesRegex(cairn.CairnError, "step-00000001 exists; remove it"):
            cairn.write(self.work, 1, {"weight/w": numpy.zeros(3)})
        with self.assertRaisesRegex(cairn.CairnError, "weight/c: numpy's complex128 has no place in a checkpoint"):
            cairn.write(self.work, 2, {"weight/c": numpy.ones(3, complex)})
        with self.assertRaisesRegex(cairn.CairnError, "'w': expected kind/name"):
            cairn.write(self.work, 2, {"w": numpy.ones(3)})
        with self.assertRaisesRegex(cairn.CairnError, "finite numbers only"):
            cairn.write(self.work, 2, {"weight/w": numpy.ones(3)}, metrics={"loss": float("nan")})
        self.assertEqual(sorted(self.work.rglob("*")), before)
        with self.assertRaisesRegex(cairn.CairnError, r"no step 5; it has \[1\]"):
            cairn.open(self.work).checkpoint(5)
        with self.assertRaisesRegex(KeyError, "names are kind/name"):
            cairn.open(self.work).checkpoint()["w"]

    def test_numbers_have_the_one_spelling_that_the_program_reads(self):
        numbers = [1e15, 1234567890123456.5, 9.999999999999998e15, 1e16, 0.1, 1e-5, 1e-4, -0.0, 2.0, 1e300]
        written = cairn.write(self.work, 1, {"weight/w": numpy.ones(3)}, metrics={f"n{i}": n for i, n in enumerate(numbers)})
        run(PROGRAM, "ckpt", "verify", written)
        self.assertEqual(list(cairn.open(written).manifest["metrics"].values()), numbers)
        self.assertEqual(canonical({"é": 1, "b": [True, None]}), '{"b":[true,null],"é":1}')

    def test_metrics_leave_out_the_steps_that_a_resume_computes_again(self):
        (self.work / "metrics.jsonl").write_text('{"run":"a","schema":1}\n{"step":1,"loss":5.5}\n{"step":2,"loss":4.0}\n{"step":3,"loss":9}\n'
                                                 '{"resumed_at":1}\n{"step":2,"loss":4.5,"split_ms":{"forward":2.5}}\n{"step":3,"lo')
        metrics = cairn.metrics(self.work)
        self.assertEqual(metrics["step"].tolist(), [1, 2])
        self.assertEqual(metrics["loss"].tolist(), [5.5, 4.5])
        self.assertEqual(metrics["split_ms/forward"].tolist()[1], 2.5)
        (self.work / "events.jsonl").write_text('{"event":"start"}\n{"event"\n')
        with self.assertRaisesRegex(cairn.CairnError, "events.jsonl:2: "):
            cairn.events(self.work)


if __name__ == "__main__":
    PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
