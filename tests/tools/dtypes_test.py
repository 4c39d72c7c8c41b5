"""ckpt cat, inspect --stats, diff, average and prune --archive on every stored dtype and on values at its ends, against NumPy."""

import os
import sys
import unittest

import numpy

from program import ProgramTest, main

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
try:
    from plain_checkpoint import NUMPY, write_checkpoint
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SPECIAL = {"f32": [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 3.4e38, -3.4e38, 1e-45],
           "f64": [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 1.7e308, -1.7e308, 5e-324],
           "f16": [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 65504, -65504, 6e-8]}


def as_floats(dtype, array):
    """What the stored elements are; of integers as they are."""
    if dtype != "bf16":
        return array
    return (array.astype(numpy.uint32) << 16).view(numpy.float32)


class DtypesTest(ProgramTest):
    def arrays(self, seed=0):
        draw = numpy.random.default_rng(seed)
        out = {}
        for dtype in NUMPY:
            stored = numpy.dtype(NUMPY[dtype])
            raw = draw.integers(0, 256, (37, 61, stored.itemsize), dtype=numpy.uint8)
            array = raw.view(stored)[..., 0].copy()  # every pattern of bits
            if dtype in SPECIAL:
                array[0, :8] = SPECIAL[dtype]
            if stored.kind in "iu":
                array[0, :2] = numpy.iinfo(stored).min, numpy.iinfo(stored).max
            out[dtype] = array
        return out

    def tensors(self, arrays):
        return {f"weight/t.{dtype}": (dtype, array) for dtype, array in arrays.items()}

    def cat(self, path, name, *more):
        self.cairn("ckpt", "cat", path, name, "--out", "x.npy", *more)
        return numpy.load(self.path("x.npy"))

    def same_bits(self, a, b):
        self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
        self.assertEqual(a.tobytes(), b.tobytes())

    def test_cat_and_statistics(self):
        arrays = self.arrays()
        write_checkpoint(self.path("steps"), 1, {**self.tensors(arrays), "weight/one": ("i64", numpy.array(-5))}, rows=5)
        write_checkpoint(self.path("steps"), 2, {"weight/one": ("u8", numpy.array(1))})
        step = "steps/step-00000001"
        for archived in (False, True):
            if archived:
                done = self.cairn_json("ckpt", "prune", "steps", "--keep", "last(1)", "--archive", "--yes")["archived"]
                self.assertEqual([(one["step"], one["left_alone"]) for one in done], [(1, "")])
            for dtype, array in arrays.items():
                with self.subTest(dtype=dtype, archived=archived):
                    expected = as_floats(dtype, array)
                    self.same_bits(self.cat(step, f"t.{dtype}"), expected)
                    self.same_bits(self.cat(step, f"t.{dtype}", "--slice", "3:-2, 7"), expected[3:-2, 7].copy())
            self.assertEqual(self.cat(step, "one"), -5)
            told = {t["name"]: t["stats"] for t in self.cairn_json("ckpt", "inspect", step, "--stats")["tensors"]}
            text = self.cairn("ckpt", "inspect", step, "--stats").stdout
            for dtype, array in arrays.items():
                with self.subTest(dtype=dtype, archived=archived):
                    x, stats = as_floats(dtype, array), told[f"t.{dtype}"]
                    whole = x.dtype.kind in "iu"
                    finite = x if whole else x[numpy.isfinite(x)]
                    self.assertEqual(stats["zeros"], int((x == 0).sum()))
                    self.assertEqual(stats["nans"], 0 if whole else int(numpy.isnan(x).sum()))
                    self.assertEqual(stats["infs"], 0 if whole else int(numpy.isinf(x).sum()))
                    self.assertEqual((stats["min"], stats["max"]), (finite.min().item(), finite.max().item()))
                    wide = finite.astype(numpy.longdouble)
                    scale = float(abs(wide).max())
                    self.assertAlmostEqual(stats["mean"] / scale, float(wide.mean() / scale), delta=1e-12)
                    self.assertAlmostEqual(stats["std"] / scale, float(wide.std() / scale), delta=1e-12)
                    if whole:
                        self.assertIn(f"min {x.min()}  max {x.max()}", text)

    def test_an_average_of_what_is_not_finite_warns(self):
        weights = {f"weight/{name}": ("f32", numpy.ones((7, 9), numpy.float32)) for name in ("fine", "hurt")}
        write_checkpoint(self.path("a"), 1, weights)
        weights["weight/hurt"][1][3, 4] = numpy.nan
        hurt = write_checkpoint(self.path("b"), 2, weights)
        done = self.cairn("ckpt", "average", "a", "b", "--to", "m")
        self.assertIn("warning: 1 of 2 weights have elements that are not finite", done.stderr)
        self.assertIn("hurt: b/step-00000002\n", done.stderr)
        self.assertEqual(numpy.isnan(self.cat("m", "hurt")).sum(), 1)
        told = self.cairn_json("ckpt", "average", "a", "b", "--to", "n")
        self.assertEqual(told["not_finite"], [{"tensor": "hurt", "sources": ["b/step-00000002"]}])
        self.assertEqual(hurt.name, "step-00000002")
        done = self.cairn("ckpt", "average", "a", "a", "--to", "o")
        self.assertEqual((done.stderr, self.cairn_json("ckpt", "average", "a", "a", "--to", "p")["not_finite"]), ("", []))

    def test_a_difference_is_the_one_of_numbers(self):
        two53 = 1 << 53
        left = {"weight/near": ("i64", numpy.array([two53, 4])), "weight/far": ("i64", numpy.array([-1 << 63, 4])),
                "weight/large": ("f64", numpy.array([1.5e308, 1, numpy.inf])),
                "weight/recast": ("i64", numpy.array([two53 + 1])),
                "weight/nan": ("f32", numpy.array([numpy.nan, 1], numpy.float32)),
                "weight/zero": ("f16", numpy.array([0.0, 1], numpy.float16)),
                "weight/inf": ("f32", numpy.array([numpy.inf, 1], numpy.float32)),
                "weight/shape": ("f32", numpy.zeros((2, 3), numpy.float32)),
                "weight/left": ("i8", numpy.zeros(3, numpy.int8)), "weight/equal": ("u16", numpy.arange(9))}
        right = {"weight/near": ("i64", numpy.array([two53 + 1, 4])), "weight/far": ("i64", numpy.array([(1 << 63) - 1, 4])),
                 "weight/large": ("f64", numpy.array([-1.5e308, 1, numpy.inf])),
                 "weight/recast": ("f64", numpy.array([float(two53)])),
                 "weight/nan": ("f32", numpy.array([numpy.nan, numpy.nan], numpy.float32)),
                 "weight/zero": ("f16", numpy.array([-0.0, 1], numpy.float16)),
                 "weight/inf": ("f32", numpy.array([-numpy.inf, 1], numpy.float32)),
                 "weight/shape": ("f16", numpy.zeros((3, 2), numpy.float16)),
                 "weight/right": ("i8", numpy.zeros(3, numpy.int8)), "weight/equal": ("u16", numpy.arange(9))}
        write_checkpoint(self.path("l"), 1, left)
        write_checkpoint(self.path("r"), 1, right)
        told = self.cairn_json("ckpt", "diff", "l", "r")
        found = {t["name"]: t for t in told["tensors"]}
        self.assertEqual({name: (t["what"], t.get("differing"), t.get("nans"), t.get("max_abs"), t.get("max_rel"))
                          for name, t in found.items()},
                         {"near": ("differs", 1, 0, 1, 1 / (two53 + 1)), "far": ("differs", 1, 0, (1 << 64) - 1, 2 - 2**-63),
                          "large": ("differs", 1, 0, "3e+308", 2), "recast": ("differs", 1, 0, 1, 1 / (two53 + 1)),
                          "nan": ("differs", 1, 1, 0, 0), "zero": ("differs", 1, 0, 0, 0), "inf": ("differs", 1, 0, "inf", 1),
                          "shape": ("other_shape", None, None, None, None), "left": ("only_left", None, None, None, None),
                          "right": ("only_right", None, None, None, None)})
        self.assertEqual((told["equal"], told["equal_tensors"]), (False, 1))
        text = self.cairn("ckpt", "diff", "l", "r").stdout
        for words in ("near: 1 of 2 elements differ, at most by 1 (at [0])", "at most by 18446744073709551615 (at [0]), 2 relative",
                      "at most by 3e+308 (at [0]), 2 relative", "recast: i64 on the left, f64 on the right; 1 of 1 elements differ",
                      "nan: 1 of 2 elements differ, 1 of them NaN on a side", "at most by 0 (at [0]), 0 relative",
                      "shape: f32 on the left, f16 on the right; shape [2, 3] on the left, [3, 2] on the right"):
            self.assertIn(words, text)


if __name__ == "__main__":
    main()
