"""ckpt diff, cat, average, prune, inspect --stats, verify of several: on a small run and its resharded twin."""

import fcntl
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import termios
import time

import numpy

from program import ProgramTest, main

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

RECIPE = """local T = require "cairn"
return T.recipe { name = "small", seed = 7, stop = T.steps(%d),
  model = T.gpt { layers = 2, width = 32, heads = 4, context = 16, vocab = 257 },
  tokenizer = T.bytes, data = T.megatron { prefix = "t", split = { 90, 10 } },
  batch = { samples = 4, micro = 2 }, optimizer = T.adamw { peak_lr = 1e-3 },
  mesh = { tp = 2 } }
"""


def room(bytes_):
    """Files of at most so many bytes, as on a full disk."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))

    return limit


class CkptToolsTest(ProgramTest):
    def steps_in(self, run):
        """Names of its steps; labels.json lies beside them."""
        return sorted(name for name in os.listdir(self.path(f"{run}/checkpoints")) if name.startswith("step-"))

    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.TemporaryDirectory(prefix="cairn-tools-run-")
        cls.addClassCleanup(cls.made.cleanup)
        with open(os.path.join(cls.made.name, "t.txt"), "w", encoding="utf-8") as f:
            f.write("the quick brown fox jumps over the lazy dog. " * 500)
        cls.run_made("data", "tokenize", "t.txt", "--out", "t")
        for stop in (2, 4, 6):  # the end of a run is always saved, however slow the disk
            with open(os.path.join(cls.made.name, "r.lua"), "w", encoding="utf-8") as f:
                f.write(RECIPE % stop)
            cls.run_made("train", "r.lua", "--run", "a", "--nproc", "2")
        cls.run_made("ckpt", "reshard", "a", "b", "--mesh", "pp=2,dp=2", "--zero", "1")

    @classmethod
    def run_made(cls, *args):
        done = subprocess.run([ProgramTest.program, *args], cwd=cls.made.name, capture_output=True, text=True,
                              timeout=300, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise AssertionError(f"{args}: {done.stdout}{done.stderr}")

    def setUp(self):
        super().setUp()
        for name in "ab":
            shutil.copytree(os.path.join(self.made.name, name), self.path(name))
        for name in ("t.bin", "t.idx"):  # a start, and a dry run of it, opens the data
            shutil.copy(os.path.join(self.made.name, name), self.path(name))

    def step(self, run, step):
        return f"{run}/checkpoints/step-{step:08d}"

    def array(self, path, tensor, *more):
        out = self.path("out.npy")
        self.cairn("ckpt", "cat", path, tensor, "--out", out, *more)
        return numpy.load(out)

    def tensors_of(self, path):
        seen = self.cairn_json("ckpt", "inspect", path, "--tensors")
        return [(t["kind"], t["name"], t["shape"]) for t in seen["tensors"]]

    def text(self, name):
        with open(self.path(name), encoding="utf-8") as f:
            return f.read()

    def names_below(self, folder):
        return sorted(os.path.join(root, name) for root, folders, files in os.walk(self.path(folder))
                      for name in folders + files)

    def killed_at_its_shards(self, *args):
        """The system kills the program on its way: a file larger than the limit, as only those of tensors are."""
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        self.cairn(*args, code=-signal.SIGXFSZ, preexec_fn=limit)

    def test_cat_gives_what_numpy_would_slice(self):
        whole = {}
        for kind, name, shape in self.tensors_of("a")[::3]:
            whole[kind, name] = self.array("a", f"{kind}/{name}")
            self.assertEqual(list(whole[kind, name].shape), shape)
            # The other layout has cut it elsewhere, and it is the same.
            numpy.testing.assert_array_equal(whole[kind, name], self.array("b", name, "--kind", kind))
        (_, name), two = next((k, v) for k, v in whole.items() if v.ndim == 2 and min(v.shape) > 8)
        for text, cut in (("3:7", two[3:7]), (":, -1", two[:, -1]), ("2, 1:5", two[2, 1:5]), ("-4:, :3", two[-4:, :3]),
                          ("1,2", two[1, 2])):
            numpy.testing.assert_array_equal(self.array("b", name, "--slice", text), cut)
        for text, words in (("0:0", "empty"), ("0,0,0", "only 2 dims"), ("x", "no index"), ("::2", "no range"),
                            ("99999", "entries")):
            self.assertIn(words, self.cairn("ckpt", "cat", "a", name, "--slice", text, "--out", "x", code=2).stderr)
        self.assertIn("did you mean", self.cairn("ckpt", "cat", "a", name + "x", "--out", "x", code=2).stderr)
        self.assertIn("kind", self.cairn("ckpt", "cat", "a", "nothing/" + name, "--out", "x", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("x")))
        piped = subprocess.run([self.program, "ckpt", "cat", "a", name], cwd=self.folder.name, capture_output=True,
                               timeout=60)
        numpy.testing.assert_array_equal(numpy.load(io.BytesIO(piped.stdout)), whole["weight", name])
        self.assertIn("--out", self.cairn("ckpt", "cat", "a", name, "--json", code=2).stderr)

    def test_statistics_are_those_of_numpy(self):
        seen = self.cairn_json("ckpt", "inspect", "b", "--stats", "--only", "weight/*", "--only", "exp_avg/*")
        self.assertEqual({t["kind"] for t in seen["tensors"]}, {"weight", "exp_avg"})
        for tensor in seen["tensors"][::4]:
            x = self.array("b", f"{tensor['kind']}/{tensor['name']}").astype(numpy.float64)
            for key, expected in (("min", x.min()), ("max", x.max()), ("mean", x.mean()), ("std", x.std())):
                self.assertAlmostEqual(tensor["stats"][key], expected, delta=1e-12 * max(1, abs(x).max()))
            self.assertEqual((tensor["stats"]["zeros"], tensor["stats"]["nans"]), (int((x == 0).sum()), 0))
        text = self.cairn("ckpt", "inspect", "a", "--stats", "--recipe").stdout
        for words in ("std", "layers", "\"vocab\"", "exp_avg_sq", "metric"):
            self.assertIn(words, text)
        self.assertIn("no tensor matches", self.cairn("ckpt", "inspect", "a", "--only", "zzz", code=2).stderr)

    def test_diff_says_what_differs_and_by_how_much(self):
        same = self.cairn_json("ckpt", "diff", "a", "b")
        self.assertTrue(same["tensors_equal"])
        self.assertFalse(same["equal"])  # the mesh is part of the recipe
        self.assertIn("mesh.pp", {c["path"] for c in same["recipe"]})
        self.assertEqual(same["state"], [])
        self.assertTrue(self.cairn_json("ckpt", "diff", "a", "a")["equal"])
        self.cairn("ckpt", "diff", "a", "a", "--exit-code")
        told = self.cairn_json("ckpt", "diff", self.step("a", 2), "b", "--memory", "16MiB")
        self.assertGreater(len(told["tensors"]), 5)
        for tensor in told["tensors"][::5]:
            full = f"{tensor['kind']}/{tensor['name']}"
            x, y = (self.array(path, full).astype(numpy.float64) for path in (self.step("a", 2), "b"))
            apart = abs(x - y)
            self.assertEqual(tensor["differing"], int((x != y).sum()))
            self.assertEqual(tensor["max_abs"], apart.max())
            larger = numpy.maximum(abs(x), abs(y))
            self.assertAlmostEqual(tensor["max_rel"], (apart / numpy.where(larger > 0, larger, 1)).max(), delta=1e-12)
            self.assertEqual(apart[tuple(json.loads(tensor["max_abs_at"]))], apart.max())
        text = self.cairn("ckpt", "diff", self.step("a", 2), "b", "--exit-code", code=1).stdout
        self.assertIn("elements differ, at most by", text)
        # A reshard is confirmed by its tensors: its recipe has another mesh.
        self.cairn("ckpt", "diff", "a", "b", "--exit-code", code=1)
        alone = self.cairn("ckpt", "diff", "a", "b", "--exit-code", "--tensors-only").stdout
        self.assertNotIn("mesh.pp", alone)
        self.assertIn("tensors equal bit for bit, 0 differ", alone)
        alone = self.cairn_json("ckpt", "diff", self.step("a", 2), "b", "--exit-code", "--tensors-only", code=1)
        self.assertEqual((alone["equal"], "recipe" in alone, "state" in alone), (False, False, False))
        self.assertTrue(self.cairn_json("ckpt", "diff", "a", "b", "--tensors-only")["equal"])
        self.assertIn("no tensor", self.cairn("ckpt", "diff", "a", "b", "--only", "zzz", code=2).stderr)

    def test_average_is_the_mean_and_a_checkpoint(self):
        made = self.cairn_json("ckpt", "average", self.step("a", 2), self.step("a", 4), "b", "--weights", "1,1,2",
                               "--to", "m", "--memory", "32MiB")
        self.assertTrue(self.cairn_json("ckpt", "verify", "m")["whole"])
        seen = self.cairn_json("ckpt", "inspect", "m", "--tensors")
        self.assertEqual({t["kind"] for t in seen["tensors"]}, {"weight"})
        self.assertEqual((seen["step"], seen["mesh"]["pp"], seen["mesh"]["dp"]), (6, 2, 2))
        self.assertIn("step 2 x 0.25", seen["origin"])
        ids = [self.cairn_json("ckpt", "inspect", run)["run"]["id"] for run in "ab"]
        self.assertEqual(seen["run"]["parents"], ids)
        self.assertEqual(made["parents"], ids)
        for tensor in seen["tensors"][::4]:
            parts = [self.array(path, tensor["name"]).astype(numpy.float64)
                     for path in (self.step("a", 2), self.step("a", 4), "b")]
            expected = (parts[0] * 0.25 + parts[1] * 0.25 + parts[2] * 0.5).astype(numpy.float32)
            numpy.testing.assert_array_equal(self.array("m", tensor["name"]), expected)
        # With the moments of the last one it is a state to train on from.
        self.cairn("ckpt", "average", "a", "--last", "2", "--to", "n", "--moments", "last")
        self.assertIn("2 ranks", self.cairn("resume", "n", "--dry-run").stdout)
        kinds = {t["kind"]: t for t in self.cairn_json("ckpt", "inspect", "n", "--tensors")["tensors"]}
        self.assertEqual(set(kinds), {"weight", "exp_avg", "exp_avg_sq"})
        name = kinds["exp_avg"]["name"]
        numpy.testing.assert_array_equal(self.array("n", "exp_avg/" + name), self.array("a", "exp_avg/" + name))
        for args, words in ((["a", "--to", "x"], "two checkpoints"), (["a", "b", "--weights", "1", "--to", "x"], "1 number for 2 checkpoints"),
                            (["a", "b", "--weights", "1,-1", "--to", "x"], "positive"),
                            (["a", "--last", "9", "--to", "x"], "3 complete"),
                            (["a", "b", "--to", "a"], "belongs to"), (["a", "b", "--to", "m"], "is there already")):
            self.assertIn(words, self.cairn("ckpt", "average", *args, code=2).stderr)

    def test_merge_joins_what_checkpoints_have_learned_since_a_base(self):
        base, first, second = self.step("a", 2), self.step("a", 4), "b"  # b has another layout
        on_base = ["--base", base, "--density", "0.4,0.7", "--weights", "1,2"]
        made = self.cairn_json("ckpt", "merge", first, second, "--method", "ties", *on_base, "--to", "m", "--memory", "32MiB")
        self.assertTrue(self.cairn_json("ckpt", "verify", "m")["whole"])
        self.assertRegex(made["origin"], r"^ties of .* step 4 x 1, .* step 6 x 2 on .* step 2 \(density 0.4, 0.7\)$")
        self.assertEqual((made["step"], made["base"]), (6, base))
        self.cairn("ckpt", "merge", first, "a", "--method", "dare_linear", *on_base, "--to", "d", "--seed", "3")
        self.cairn("ckpt", "merge", first, second, "--method", "dare_linear", *on_base, "--to", "e", "--seed", "3")
        self.cairn("ckpt", "diff", "d", "e", "--tensors-only", "--exit-code")  # whatever the layouts
        self.cairn("ckpt", "merge", first, second, "--method", "dare_linear", *on_base, "--to", "f", "--seed", "4")
        self.cairn("ckpt", "diff", "e", "f", "--tensors-only", "--exit-code", code=1)
        self.cairn("ckpt", "merge", first, second, "--method", "slerp", "--t", "0.3", "--to", "s")
        for tensor in self.cairn_json("ckpt", "inspect", "m", "--tensors")["tensors"][::4]:
            one, two, root = (self.array(path, tensor["name"]).astype(numpy.float64) for path in (first, second, base))
            deltas = []
            for source, density, weight in ((one, 0.4, 1), (two, 0.7, 2)):
                size = numpy.abs((source - root).astype(numpy.float32))
                least = numpy.sort(size, axis=None)[::-1][max(1, int(density * size.size)) - 1]
                deltas.append(numpy.where(size >= least, source - root, 0) * weight)
            up = sum(deltas) >= 0
            agree = [(delta != 0) & ((delta > 0) == up) for delta in deltas]
            weights = agree[0] * 1 + agree[1] * 2
            expected = root + sum(d * a for d, a in zip(deltas, agree)) / numpy.where(weights == 0, 1, weights)
            numpy.testing.assert_allclose(self.array("m", tensor["name"]), expected, rtol=2e-7, atol=1e-12)
            cosine = (one * two).sum() / numpy.sqrt((one ** 2).sum() * (two ** 2).sum())
            angle = numpy.arccos(min(1, cosine))
            factors = (0.7, 0.3) if cosine > 0.9995 else (numpy.sin(angle * 0.7) / numpy.sin(angle),
                                                          numpy.sin(angle * 0.3) / numpy.sin(angle))
            numpy.testing.assert_allclose(self.array("s", tensor["name"]), factors[0] * one + factors[1] * two,
                                          rtol=2e-7, atol=1e-12)
        for args, words in ((["a", "b", "--method", "ties", "--density", "0.5"], "name the base"),
                            (["a", "b", "--method", "ties", "--base", base], "--density"),
                            (["a", "b", "--method", "linear", "--base", base], "reads no base"),
                            (["a", "b", "--method", "slerp", "--weights", "1,1"], "--weights: slerp does not read it"),
                            (["a", "b", "--method", "linear", "--weights", "1,-1"], "add up to 0"),
                            (["a", "--method", "slerp"], "two checkpoints"),
                            (["a", "b", "--method", "mean"], "--method"),
                            (["b", "--method", "task_arithmetic", "--base", "a", "--density", "1"], "does not read it")):
            self.assertIn(words, self.cairn("ckpt", "merge", *args, "--to", "x", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("x")))

    def test_edit_moves_layers_and_adds_rows(self):
        for source in "ab":  # one file a tensor parallel rank; stages and ZeRO
            made = self.cairn_json("ckpt", "edit", source, "--to", f"m{source}", "--layers", "1,0,1..1,1", "--vocab", "300",
                                   "--memory", "16MiB")
            self.assertEqual((made["layers"], made["vocab"], made["new_rows"], made["step"]), (4, 300, 43, 6))
            self.assertTrue(self.cairn_json("ckpt", "verify", f"m{source}")["whole"])
        self.cairn("ckpt", "diff", "ma", "mb", "--tensors-only", "--exit-code")
        seen = self.cairn_json("ckpt", "inspect", "mb", "--tensors")
        self.assertEqual((seen["mesh"]["pp"], seen["mesh"]["dp"]), (2, 2))
        names = [tensor["name"] for tensor in seen["tensors"]]
        self.assertEqual({tensor["kind"] for tensor in seen["tensors"]}, {"weight"})
        for name in ["embed.tokens", *names[::7]]:
            place = re.match(r"layers\.(\d)\.", name)
            old = name if not place else f"layers.{[1, 0, 1, 1][int(place[1])]}.{name[place.end():]}"
            before, after = self.array("a", old), self.array("mb", name)
            numpy.testing.assert_array_equal(after[:257] if name == "embed.tokens" else after, before, name)
        table = self.array("a", "embed.tokens")
        rows = numpy.broadcast_to(table.mean(axis=0, dtype=numpy.float64).astype(numpy.float32), (43, table.shape[1]))
        numpy.testing.assert_allclose(self.array("mb", "embed.tokens")[257:], rows, rtol=1e-6)
        self.cairn("ckpt", "edit", "a", "--to", "z", "--vocab", "260", "--new-rows", "zero")
        self.assertEqual(numpy.count_nonzero(self.array("z", "embed.tokens")[257:]), 0)
        # Back again: the weights that the run had, so the same model.
        self.cairn("ckpt", "edit", "mb", "--to", "back", "--layers", "1,0", "--vocab", "257")
        self.cairn("ckpt", "reshard", "a", "weights", "--mesh", "pp=2,dp=2", "--weights-only")
        self.cairn("ckpt", "diff", "back", "weights", "--tensors-only", "--exit-code")
        with open(self.path("short.txt"), "w", encoding="utf-8") as f:
            f.write("the quick brown fox")
        said = [self.cairn_json("eval", run, "--text", "short.txt")["sets"][0]["loss"] for run in ("back", "a")]
        self.assertEqual(*said)
        self.bring_data("r.lua")
        self.assertIn("step 1/1", self.cairn(
            "train", "r.lua", "--run", "on", "--nproc", "2", "--init-from", "mb", "--init-weights-only", "--set", "stop=T.steps(1)",
            "--set", "model.layers=4", "--set", "model.vocab=300").stdout)
        for args, words in ((["--layers", "0,2"], "layer 2: the model has layers 0 to 1"), ([], "nothing to edit"),
                            (["--layers", "1..0"], "'1..0': expected layers"), (["--layers", "0,"], "'': expected layers"),
                            (["--layers", "-1"], "expected layers"), (["--vocab", "0"], "--vocab"),
                            (["--layers", "99999999999999999999"], "expected layers")):
            self.assertIn(words, self.cairn("ckpt", "edit", "a", "--to", "x", *args, code=2).stderr)
        self.assertIn("ckpt reshard", self.cairn("ckpt", "edit", "b", "--to", "x", "--layers", "0", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("x")))

    def test_weights_only_are_begun_with_and_not_resumed(self):
        self.bring_data("r.lua")
        begin = r"cairn (train RECIPE --run NEW_RUN --init-from \S+ --init-weights-only)"
        said = self.cairn("ckpt", "average", "a", "--last", "2", "--to", "m").stdout
        self.assertIn("m --init-weights-only", re.search(begin, said)[1])
        alone = self.cairn_json("ckpt", "reshard", "a", "w", "--mesh", "tp=1", "--weights-only")
        self.assertTrue(alone["weights_only"])
        self.assertEqual({kind for kind, name, shape in self.tensors_of("w")}, {"weight"})
        self.assertTrue(self.cairn_json("ckpt", "diff", "a", "w", "--only", "weight/*", "--tensors-only")["equal"])
        self.assertEqual(self.cairn_json("ckpt", "inspect", "w")["state"], self.cairn_json("ckpt", "inspect", "a")["state"])
        self.assertFalse(self.cairn_json("ckpt", "reshard", "a", "whole", "--mesh", "tp=1")["weights_only"])
        for source in ("a", "w", "m"):
            flags = ["--weights-only"] if source == "a" else []
            said = self.cairn("ckpt", "reshard", source, f"{source}2", "--mesh", "dp=2", *flags).stdout
            self.assertNotIn("cairn resume", said)
            self.assertIn(f"{source}2 --init-weights-only", re.search(begin, said)[1])
        for run in ("m", "w", "m2"):
            said = self.cairn("resume", run, code=2).stderr
            self.assertIn(f"{run}/checkpoints/step-00000006: weights only", said)
            self.assertNotIn("missing", said)
            words = re.search(begin, said)[1].replace("RECIPE", "r.lua").replace("NEW_RUN", f"{run}-on").split()
            self.assertIn("step 1/1", self.cairn(*words, "--nproc", "2", "--set", "stop=T.steps(1)").stdout)
        for last in ("m", "w"):
            said = self.cairn("ckpt", "average", "a", last, "--to", "x", "--moments", "last", code=2).stderr
            self.assertIn(f"{last}/checkpoints/step-00000006: weights only", said)
        self.assertFalse(os.path.exists(self.path("x")))
        self.cairn("ckpt", "average", "m", "a", "--to", "x", "--moments", "last")
        self.assertIn("2 ranks", self.cairn("resume", "x", "--dry-run").stdout)

    def test_resume_refuses_a_folder_that_is_no_run(self):
        os.makedirs(self.path("empty/checkpoints"))
        shutil.copytree(self.path(self.step("a", 6)), self.path("fetched/step-00000006"))
        os.makedirs(self.path("hurt/checkpoints/step-00000006"))
        for run, words in (("nowhere", "no such folder"), ("empty", "no run to resume"),
                           ("a/checkpoints/", "give the run's folder"), (self.step("a", 6), "give the run's folder"),
                           ("fetched", "fetched holds step-00000006, and a run keeps its checkpoints in"),
                           ("hurt", "manifest.json")):
            said = self.cairn("resume", run, "--dry-run", code=2)
            self.assertIn(words, said.stderr)
            self.assertIn(run, said.stderr)
        self.assertEqual(os.listdir(self.path("empty")), ["checkpoints"])

    def test_a_source_is_known_by_whatever_path_it_is_called(self):
        before = os.stat(self.path(self.step("a", 6))).st_ino
        os.symlink(self.step("a", 6), self.path("newest"))
        for last in (self.step("a", 6) + "/", self.step("a", 6) + "/.", "newest", "newest/"):
            for args in (["average", self.step("a", 4) + "/", last, "--to", "a"], ["reshard", last, "a", "--mesh", "tp=1"]):
                self.assertIn("belongs to", self.cairn("ckpt", *args, "--overwrite", code=2).stderr)
        inside = subprocess.run([self.program, "ckpt", "average", "step-00000004", ".", "--to", "..", "--overwrite"],
                                cwd=self.path("a/checkpoints"), capture_output=True, text=True, timeout=60)
        self.assertIn("belongs to", inside.stderr)
        inside = subprocess.run([self.program, "ckpt", "average", "../step-00000004", ".", "--to", "../..", "--overwrite"],
                                cwd=self.path(self.step("a", 6)), capture_output=True, text=True, timeout=60)
        self.assertIn("belongs to", inside.stderr)
        self.assertEqual(os.stat(self.path(self.step("a", 6))).st_ino, before)
        self.assertEqual(self.cairn_json("ckpt", "verify", "a", "--all")["whole"], True)

    def test_a_runs_steps_that_are_links_are_its_own(self):
        recipe = self.text("a/recipe.resolved.json")
        os.rename(self.path("a/checkpoints"), self.path("archive"))
        os.mkdir(self.path("a/checkpoints"))
        for name in os.listdir(self.path("archive")):
            os.symlink(self.path(f"archive/{name}"), self.path(f"a/checkpoints/{name}"))
        average = ["average", "a", "--last", "2", "--to", "a"]
        for args in (average, ["reshard", "a", "a", "--mesh", "tp=1"],
                     ["reshard", "archive/step-00000006", "a", "--mesh", "tp=1"]):
            self.assertIn("belongs to", self.cairn("ckpt", *args, "--overwrite", code=2).stderr)
        self.assertIn("belongs to", self.cairn("ckpt", *average, code=2).stderr)
        for name in os.listdir(self.path("archive")):
            self.assertTrue(os.path.islink(self.path(f"a/checkpoints/{name}")))
        self.assertEqual(self.text("a/recipe.resolved.json"), recipe)
        self.assertTrue(self.cairn_json("ckpt", "verify", "a", "--all")["whole"])

    def test_a_target_has_its_recipe_before_its_step(self):
        os.makedirs(self.path("d/recipe.resolved.json"))  # it cannot be written
        reshard = ["ckpt", "reshard", "a", "d", "--mesh", "tp=1"]
        for args in (reshard, ["ckpt", "average", "a", "b", "--to", "d"]):
            self.cairn(*args, code=74)
            self.assertFalse(os.path.exists(self.path(self.step("d", 6))))
        os.rmdir(self.path("d/recipe.resolved.json"))
        # What a kill before the commit leaves: the recipe, and no step. Another mesh will do as well.
        self.write("d/recipe.resolved.json", "{}")
        self.cairn(*reshard)
        self.assertIn("1 rank", self.cairn("resume", "d", "--dry-run").stdout)
        for args in (reshard, ["ckpt", "average", "d", self.step("a", 6), "--to", "b"]):
            self.assertIn("--overwrite", self.cairn(*args, code=2).stderr)
        self.cairn(*reshard, "--overwrite")
        # A failure puts the recipe back.
        with open(self.path("d/recipe.resolved.json"), encoding="utf-8") as f:
            before = f.read()
        self.cairn("ckpt", "reshard", "a", "d", "--mesh", "tp=2", "--overwrite", "--memory", "1MiB", code=2)
        with open(self.path("d/recipe.resolved.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), before)

    def bring_data(self, *more):
        """What a training needs besides its run folder."""
        for name in ("t.bin", "t.idx", *more):
            shutil.copy(os.path.join(self.made.name, name), self.folder.name)

    def test_fetched_steps_are_not_begun_anew_beside(self):
        self.bring_data("r.lua")
        self.cairn("ckpt", "push", "a", "place")
        self.cairn("ckpt", "fetch", "place", "c")  # as after the loss of the whole folder: no checkpoints/ to fetch into
        fetched = self.names_below("c")
        train = ["train", "r.lua", "--run", "c", "--nproc", "2"]
        said = self.cairn(*train, code=2).stderr
        self.assertIn("c holds step-00000006, and a run keeps its checkpoints in c/checkpoints: move them there", said)
        self.assertEqual(self.names_below("c"), fetched)
        self.cairn("train", "r.lua", "--run", "c", "--nproc", "2", "--init-from", "c/step-00000006", "--init-weights-only",
                   "--set", "stop=T.steps(1)")  # begun from it by name: somebody knows where it lies
        shutil.rmtree(self.path("c/checkpoints"))
        os.remove(self.path("c/world"))
        os.mkdir(self.path("c/checkpoints"))
        os.rename(self.path("c/step-00000006"), self.path(self.step("c", 6)))
        self.assertIn("step 7/7", self.cairn(*train, "--set", "stop=T.steps(7)").stdout)
        self.assertEqual(self.steps_in("c"), ["step-00000006", "step-00000007"])

    def test_a_target_that_a_killed_reshard_left_is_not_trained_from_scratch(self):
        self.bring_data()
        for run, command in (("d", ["reshard", "a", "d", "--mesh", "tp=1"]),
                             ("e", ["average", "a", "--last", "2", "--to", "e"])):
            self.killed_at_its_shards("ckpt", *command)
            left = self.names_below(run)
            self.assertIn(self.path(f"{run}/recipe.resolved.json"), left)
            self.assertEqual([name[:18] for name in os.listdir(self.path(f"{run}/checkpoints"))], [".tmp-step-00000006"])
            said = self.cairn("resume", run, code=2).stderr
            self.assertIn("nothing was trained there and it has no checkpoint", said)
            self.assertIn("give that command again", said)
            self.assertEqual(self.names_below(run), left)
            self.cairn("ckpt", *command)
            self.assertEqual(os.listdir(self.path(f"{run}/checkpoints")), ["step-00000006"])

    def test_a_killed_one_leaves_the_recipe_of_the_steps_that_are_there(self):
        before = self.text("b/recipe.resolved.json")
        for command, ranks in ((["reshard", "a", "b", "--mesh", "tp=1"], "1 rank"),
                               (["average", self.step("a", 2), self.step("a", 6), "--to", "b", "--moments", "last"],
                                "2 ranks")):
            self.killed_at_its_shards("ckpt", *command, "--overwrite")
            self.assertEqual(self.text("b/recipe.resolved.json"), before)
            self.assertIn("4 ranks", self.cairn("resume", "b", "--dry-run").stdout)
            self.cairn("ckpt", *command, "--overwrite")
            self.assertNotEqual(self.text("b/recipe.resolved.json"), before)
            self.assertIn(ranks, self.cairn("resume", "b", "--dry-run").stdout)
            shutil.rmtree(self.path("b"))
            shutil.copytree(os.path.join(self.made.name, "b"), self.path("b"))

    def test_a_reshard_killed_behind_its_commit_leaves_the_recipe_of_its_step(self):
        strace = self.strace()
        for command, ranks in ((["reshard", "a", "b", "--mesh", "tp=1"], "1 rank"),
                               (["average", self.step("a", 2), self.step("a", 6), "--to", "b", "--moments", "last"],
                                "2 ranks")):
            before = os.stat(self.path(self.step("b", 6))).st_ino
            # Killed as the recipe is about to take its name, behind run.json and the recipe that is announced.
            killed = subprocess.run([strace, "-f", "-o", "/dev/null", "-e", "trace=rename", "-e",
                                     "inject=rename:signal=KILL:when=3", self.program, "ckpt", *command, "--overwrite"],
                                    cwd=self.folder.name, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
            self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
            self.assertNotEqual(os.stat(self.path(self.step("b", 6))).st_ino, before)
            self.assertIn(ranks, self.cairn("resume", "b", "--dry-run").stdout)
            self.cairn("ckpt", "average", "b", "a", "--to", "b", "--memory", "0", code=2)  # opens nothing
            self.cairn("ckpt", "average", "a", self.step("a", 4), "--to", "b", "--overwrite", "--memory", "0", code=2)
            self.assertIn(ranks, self.cairn("resume", "b", "--dry-run").stdout)
            self.assertNotIn(self.path("b/recipe.next.json"), self.names_below("b"))
            shutil.rmtree(self.path("b"))
            shutil.copytree(os.path.join(self.made.name, "b"), self.path("b"))

    def test_a_recipe_whose_step_cannot_be_read_just_now_waits(self):
        with open(self.path("b/recipe.resolved.json"), encoding="utf-8") as f:
            before = f.read()
        with open(self.path("a/recipe.resolved.json"), encoding="utf-8") as f:
            recipe = f.read()
        manifest = self.path(self.step("b", 6) + "/manifest.json")
        shutil.rmtree(self.path(self.step("b", 6)))
        shutil.copytree(self.path(self.step("a", 6)), self.path(self.step("b", 6)))  # whose writer was killed
        self.write("b/recipe.next.json", json.dumps({"step": 6, "before": 1, "recipe": recipe}))
        os.rename(manifest, manifest + ".away")
        os.symlink("manifest.json", manifest)  # as for whoever has no right to it, or no descriptor left
        opens = ["ckpt", "average", "a", self.step("a", 4), "--to", "b", "--overwrite", "--memory", "0"]
        self.assertIn("it is not known which recipe", self.cairn(*opens, code=74).stderr)
        self.assertTrue(os.path.exists(self.path("b/recipe.next.json")))
        with open(self.path("b/recipe.resolved.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), before)
        done = self.cairn("resume", "b", "--dry-run", code=74)
        self.assertIn("it is not known which recipe the run resumes with", done.stderr)
        os.rename(manifest + ".away", manifest)
        self.assertIn("2 ranks", self.cairn("resume", "b", "--dry-run").stdout)
        self.cairn(*opens, code=2)
        self.assertFalse(os.path.exists(self.path("b/recipe.next.json")))
        with open(self.path("b/recipe.resolved.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), recipe)

    def test_a_newer_step_in_the_target_is_told(self):
        older = ["ckpt", "reshard", self.step("a", 2), "c", "--mesh", "pp=2,dp=2", "--zero", "1"]
        self.cairn(*older)
        shutil.rmtree(self.path(self.step("c", 2)))
        shutil.copytree(self.path(self.step("b", 6)), self.path(self.step("c", 6)))
        self.assertIn("has step 6, which is newer", self.cairn(*older, code=2).stderr)
        self.assertFalse(os.path.exists(self.path(self.step("c", 2))))
        told = self.cairn(*older, "--overwrite").stdout
        self.assertIn("resumes from step 6", told)
        self.assertNotIn("go on with", told)

    def test_a_refusal_leaves_no_run_behind(self):
        before = sorted(os.listdir(self.folder.name))
        self.cairn("ckpt", "reshard", "a", "x/y/z", "--mesh", "tp=1", "--memory", "1MiB", code=2)
        self.cairn("ckpt", "average", "a", "b", "--to", "x", "--memory", "0", code=2)
        self.assertEqual(sorted(os.listdir(self.folder.name)), before)
        for args in (["reshard", "a", "x/y/z", "--mesh", "tp=1"], ["average", "a", "b", "--to", "x"]):
            for bytes_ in (0, 20, 200):  # not even for the lock; the run's id; the recipe
                self.cairn("ckpt", *args, code=74, preexec_fn=room(bytes_))
                self.assertEqual(sorted(os.listdir(self.folder.name)), before)
        os.mkdir(self.path("mine"))
        self.cairn("ckpt", "reshard", "a", "mine", "--mesh", "tp=1", code=74, preexec_fn=room(0))
        self.assertEqual(os.listdir(self.path("mine")), [])
        self.write("file", "")
        shutil.copytree(self.path("b"), self.path("c"))
        for target, words in (("file", "expected a folder"), ("c/checkpoints", "give a run's folder"),
                              (self.step("c", 6) + "/", "give a run's folder"),
                              (self.step("c", 8), "give a run's folder")):
            self.assertIn(words, self.cairn("ckpt", "average", "a", "b", "--to", target, code=2).stderr)
            self.assertIn(words, self.cairn("ckpt", "reshard", "a", target, "--mesh", "tp=1", code=2).stderr)
        self.assertIn("--to is given without a value", self.cairn("ckpt", "average", "a", "b", "--to", "", code=2).stderr)
        self.assertIn("no name", self.cairn("ckpt", "reshard", "a", "", "--mesh", "tp=1", code=2).stderr)
        self.assertEqual([name.replace("/c/", "/b/") for name in self.names_below("c")], self.names_below("b"))

    def test_no_run_begins_where_a_link_leads_to_nothing_and_the_link_stays(self):
        os.mkdir(self.path("mine"))
        os.symlink("away", self.path("disk"))  # that is not mounted
        os.symlink("../away", self.path("mine/checkpoints"))
        for name in ("t.bin", "t.idx", "r.lua"):
            shutil.copy(os.path.join(self.made.name, name), self.path(name))
        for run in ("disk", "mine"):
            for args in (["ckpt", "reshard", "a", run, "--mesh", "tp=1"], ["train", "r.lua", "--run", run]):
                self.assertIn("is a link to nothing", self.cairn(*args, code=2).stderr)
        self.assertTrue(os.path.islink(self.path("disk")))
        self.assertEqual(os.listdir(self.path("mine")), ["checkpoints"])

    def test_a_recipe_that_cannot_be_read_stays(self):
        recipe = self.path("b/recipe.resolved.json")
        os.remove(recipe)
        with socket.socket(socket.AF_UNIX) as unread:
            unread.bind(recipe)
        self.cairn("ckpt", "reshard", "a", "b", "--mesh", "tp=1", "--overwrite", code=74)
        self.assertTrue(os.path.exists(recipe))
        os.remove(recipe)
        os.symlink("/proc/self/mem", recipe)
        self.assertIn("recipe.resolved.json: cannot be read", self.cairn("resume", "b", "--dry-run", code=74).stderr)

    def test_what_a_dead_one_left_goes_and_what_can_be_gone_on_with_is_tried(self):
        host = re.sub("[^A-Za-z0-9]", "-", os.uname().nodename[:64])
        names = [f".tmp-step-{step:08d}.{host}.{2 ** 22 + step}.1.0" for step in (5, 6)]
        for args in (["average", "a", "b", "--to", "d"], ["reshard", "a", "e", "--mesh", "tp=1"]):
            for name in names:
                os.makedirs(self.path(f"{'d' if 'd' in args else 'e'}/checkpoints/{name}"))
            done = self.cairn_json("ckpt", *args)
            # A reshard looks into that of its own step before it removes it.
            self.assertEqual(done["cleaned"], names if "d" in args else names[1:])
        self.assertEqual(os.listdir(self.path("d/checkpoints")), ["step-00000006"])
        self.assertEqual(os.listdir(self.path("e/checkpoints")), ["step-00000006"])

    def test_too_little_memory_for_a_comparison_says_how_much_is_needed(self):
        for given in ("1", "8388607"):
            told = self.cairn("ckpt", "diff", "a", "b", "--memory", given, code=2).stderr
            self.assertIn(f"a comparison needs 8388608 bytes of memory, {given} are given", told)
        self.cairn("ckpt", "diff", "a", "b", "--memory", "8388608")

    def test_too_little_memory_for_an_average_says_how_much_is_needed(self):
        average = ["ckpt", "average", "a", "b", "--to", "d", "--memory"]
        told = self.cairn(*average, "0", code=2).stderr
        needed = re.search(r"a merge of 2 needs (\d+) bytes", told)
        self.assertTrue(needed, told)
        self.cairn(*average, needed[1])

    def test_an_average_of_the_last_ones_does_not_pass_over_one_that_cannot_be_read(self):
        manifest = self.path(self.step("a", 4) + "/manifest.json")
        with open(manifest, "r+b") as f:
            f.seek(39)
            f.write(b"2")
        said = self.cairn("ckpt", "average", "a", "--last", "2", "--to", "m", code=2).stderr
        self.assertIn("step 4 would be one of them and cannot be read", said)
        self.assertIn("read it with a newer build", said)
        said = self.cairn("ckpt", "average", "a", "--last", "3", "--to", "m", code=2).stderr  # nor if without it there are too few
        self.assertIn("step 4 would be one of them and cannot be read", said)
        self.cairn("ckpt", "average", self.step("a", 2), self.step("a", 6), "--to", "m")

    def strace(self):
        strace = shutil.which("strace")
        if strace is None or subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode != 0:
            self.skipTest("no strace")
        return strace

    def test_where_the_system_refuses_a_lock_an_owner_file_stands_in(self):
        for command in (["prune", "a", "--keep", "last(1)", "--yes"], ["reshard", "a", "d", "--mesh", "tp=1"]):
            done = subprocess.run([self.strace(), "-f", "-o", "/dev/null", "-e", "trace=flock", "-e",
                                   "inject=flock:error=ENOLCK:when=1", self.program, "ckpt", *command],
                                  cwd=self.folder.name, capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.steps_in("a")), 1)
        for run in ("a", "d"):
            self.assertEqual([name for name in os.listdir(self.path(run)) if name.startswith("run.owner")], [])

    def test_a_checkpoint_of_more_files_than_a_shell_lets_be_open_is_read_like_any_other(self):
        for name in ("t.bin", "t.idx"):
            shutil.copy(os.path.join(self.made.name, name), self.path(name))
        with open(self.path("wide.lua"), "w", encoding="utf-8") as f:
            f.write((RECIPE % 2).replace("samples = 4, micro = 2", "samples = 64, micro = 1"))
        self.cairn("train", "wide.lua", "--run", "wide", "--nproc", "2")
        self.cairn("ckpt", "reshard", "wide", "many", "--mesh", "dp=64", "--zero", "1")

        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        self.assertGreater(len(os.listdir(self.path(self.step("many", 2)))), 60)
        self.cairn("ckpt", "diff", "wide", "many", preexec_fn=limit)
        self.cairn("ckpt", "push", "many", "place", preexec_fn=limit)
        self.cairn("ckpt", "reshard", "many", "back", "--mesh", "tp=2", preexec_fn=limit)
        self.assertIn(" 0 differ", self.cairn("ckpt", "diff", "wide", "back").stdout)

        def hard_limit():  # less than two for each file of ten
            resource.setrlimit(resource.RLIMIT_NOFILE, (640, 640))

        self.cairn("ckpt", "average", *["many"] * 10, "--to", "mean", preexec_fn=hard_limit)
        self.cairn("ckpt", "diff", "many", "mean", "--only", "weight/*", "--tensors-only", "--exit-code")

    def test_prune_counts_what_is_gone_only(self):
        strace = self.strace()
        calls = "rename,renameat,renameat2"
        done = subprocess.run([strace, "-f", "-o", "/dev/null", "-e", f"trace={calls}", "-e",
                               f"inject={calls}:error=EIO:when=1", self.program, "ckpt", "prune", "a", "--keep",
                               "last(1)", "--yes", "--json"], cwd=self.folder.name, capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(done.returncode, 74, done.stdout + done.stderr)
        told = json.loads(done.stdout)
        size = {c["step"]: c["size_bytes"] for c in told["checkpoints"]}
        self.assertEqual(len(told["removed"]), 1)
        self.assertEqual(told["freed_bytes"], size[told["removed"][0]])
        self.assertEqual(told["freed_bytes"] + told["kept_bytes"], sum(size.values()))

    def test_every_folder_of_a_new_run_is_made_durable(self):
        strace = self.strace()
        subprocess.run([strace, "-f", "-y", "-e", "trace=fsync", "-o", self.path("calls"), self.program, "ckpt", "reshard",
                        "a", "new/er/run", "--mesh", "tp=1"], cwd=self.folder.name, capture_output=True, check=True,
                       timeout=60)
        with open(self.path("calls"), encoding="utf-8") as f:
            synced = re.findall(r"fsync\(\d+<([^>]*)>", f.read())
        at = os.path.realpath(self.folder.name)
        for folder in ("", "/new", "/new/er", "/new/er/run", "/new/er/run/checkpoints"):
            self.assertIn(at + folder, synced)
        # After the renames of the run's own files, too, and before the step is renamed into its place.
        run = at + "/new/er/run"
        written = [i for i, path in enumerate(synced) if path.startswith(run + "/.new-")]
        self.assertGreaterEqual(len(written), 2)  # run.json and the recipe
        for i in written:
            self.assertEqual(synced[i + 1], run)
        self.assertIn(run + "/checkpoints", synced[written[0]:])

    def test_weights_whose_sum_is_no_number_are_refused(self):
        done = self.cairn("ckpt", "average", "a", "b", "--weights", "1e308,1e308", "--to", "x", code=2)
        self.assertIn("sum of the weights", done.stderr)

    def test_cat_replaces_files_only(self):
        name = "weight/layers.0.attn.q.weight"
        expected = self.array("a", name)
        os.mkfifo(self.path("pipe"))
        reader = subprocess.Popen(["cat", self.path("pipe")], stdout=subprocess.PIPE)
        try:
            self.cairn("ckpt", "cat", "a", name, "--out", "pipe")
            self.assertTrue(stat.S_ISFIFO(os.stat(self.path("pipe")).st_mode))
            out, _ = reader.communicate(timeout=30)
        finally:
            reader.kill()
            reader.wait()
        numpy.testing.assert_array_equal(numpy.load(io.BytesIO(out)), expected)
        self.write("there.npy", "old")
        for link, to in (("link", "there.npy"), ("dangling", "new.npy")):
            os.symlink(to, self.path(link))
            self.cairn("ckpt", "cat", "a", name, "--out", link)
            self.assertTrue(os.path.islink(self.path(link)))
            numpy.testing.assert_array_equal(numpy.load(self.path(to)), expected)
        self.assertFalse([file for file in os.listdir(self.folder.name) if file.endswith(".part")])

    def test_cat_leaves_the_old_file_and_no_other_when_it_fails_or_is_stopped(self):
        name = min((shape, f"{kind}/{name}") for kind, name, shape in self.tensors_of("a") if len(shape) == 1)[1]
        self.array("a", name)
        self.write("there.npy", "old")
        before = self.names_below("")

        def check():
            self.assertEqual(self.names_below(""), before)
            self.assertEqual(self.text("there.npy"), "old")

        cat = ["ckpt", "cat", "a", name, "--out", "there.npy"]
        self.assertIn("File too large", self.cairn(*cat, code=74, preexec_fn=room(64)).stderr)  # told when it is closed
        check()
        strace = [self.strace(), "-f", "-o", "/dev/null"]
        for inject, code, words in (("rename:error=EIO:when=1", 74, "Input/output error"),
                                    ("fsync:error=EIO:when=1", 74, "Input/output error"),
                                    ("fsync:signal=SIGINT:when=1", 75, "stopped by a signal"),
                                    ("write:signal=SIGTERM:when=1", 75, "stopped by a signal")):
            with self.subTest(inject):
                done = subprocess.run([*strace, "-e", "trace=rename,fsync,write", "-e", f"inject={inject}", self.program,
                                       *cat], cwd=self.folder.name, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr)
                check()
        with open(self.path("calls"), "w", encoding="utf-8") as calls:
            subprocess.run([self.strace(), "-f", "-y", "-o", calls.name, "-e", "trace=rename,fsync", self.program, *cat],
                           cwd=self.folder.name, check=True, timeout=60)
        order = re.findall(r"(fsync|rename)\(.*?(\.part|there|>)", self.text("calls"))
        self.assertEqual([call for call, _ in order], ["fsync", "rename", "fsync"])  # file, name, folder

    def test_two_cats_into_one_file_leave_one_or_the_other(self):
        first, second = sorted(name for kind, name, shape in self.tensors_of("a") if kind == "weight")[:2]
        arrays = [self.array("a", name) for name in (first, second)]
        for _ in range(10):
            both = [subprocess.Popen([self.program, "ckpt", "cat", "a", name, "--out", "both.npy"], cwd=self.folder.name,
                                     stderr=subprocess.PIPE, text=True) for name in (first, second)]
            self.assertEqual([(cat.communicate(timeout=60)[1], cat.returncode) for cat in both], [("", 0)] * 2)
            found = numpy.load(self.path("both.npy"))
            self.assertTrue(any(found.shape == a.shape and (found == a).all() for a in arrays))
        self.cairn("ckpt", "cat", "a", first, "--out", "n" * 255)  # as long as a name may be
        numpy.testing.assert_array_equal(numpy.load(self.path("n" * 255)), arrays[0])
        self.assertFalse([file for file in os.listdir(self.folder.name) if file.endswith(".part")])

    def damaged_tensor(self, step):
        """Of a step in whose first file a byte is changed for it: kind/name."""
        name = sorted(n for n in os.listdir(self.path(step)) if n.endswith(".h5"))[0]
        path = self.path(f"{step}/{name}")
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) // 2)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 1]))
        (damage,) = self.cairn_json("ckpt", "verify", step, code=65)["damages"]
        return f"{damage['kind']}/{damage['tensor']}"

    def test_nothing_is_put_into_a_checkpoint(self):
        step = self.step("a", 6)
        os.symlink(self.path(step), self.path("link"))
        before = {name: self.names_below(name) for name in "ab"}
        manifest = self.text(f"{step}/manifest.json")
        for inside in (step, "link"):
            for words in (["cat", "a", "embed.tokens", "--out", f"{inside}/manifest.json"],
                          ["cat", "a", "embed.tokens", "--out", f"{inside}/new.npy"],
                          ["reshard", "a", f"{inside}/run", "--mesh", "tp=1"],
                          ["average", "a", "b", "--to", f"{inside}/deep/run"], ["push", "a", f"{inside}/place"],
                          ["push", "b", f"{inside}/place"], ["fetch", "b/checkpoints", f"{inside}/place"]):
                self.assertIn("lies in the folder of a checkpoint, ", self.cairn("ckpt", *words, code=2).stderr)
        self.assertEqual(before, {name: self.names_below(name) for name in "ab"})
        self.assertEqual(self.text(f"{step}/manifest.json"), manifest)

    def test_an_archive_takes_no_files_of_a_person_along(self):
        step = self.step("a", 2)
        self.write(f"{step}/notes.txt", "mine\n")
        before = self.names_below(step)
        for yes in ([], ["--yes"]):
            told = self.cairn_json("ckpt", "prune", "a", "--keep", "last(2)", "--archive", *yes)["archived"]
            self.assertEqual([(a["step"], a["left_alone"]) for a in told],
                             [(2, "it holds what is no part of it and would go: notes.txt")])
        self.assertEqual(self.names_below(step), before)

    def test_cat_leaves_nothing_where_a_link_leads_when_it_fails(self):
        damaged = self.damaged_tensor(self.step("a", 6))
        os.mkdir(self.path("far"))
        for link, to in (("link", "new.npy"), ("other", "far/new.npy"), ("far/up", "../up.npy"), ("second", "link")):
            os.symlink(to, self.path(link))
        before = self.names_below("")
        for link in ("link", "other", "far/up", "second"):
            self.cairn("ckpt", "cat", "a", damaged, "--out", link, code=65)
            self.assertEqual(self.names_below(""), before)
        for link, to in (("other", "far/new.npy"), ("far/up", "up.npy"), ("second", "new.npy")):
            self.cairn("ckpt", "cat", "b", damaged, "--out", link)
            self.assertTrue(os.path.islink(self.path(link)))
            self.assertFalse(os.path.islink(self.path(to)))
            numpy.testing.assert_array_equal(numpy.load(self.path(to)), self.array("b", damaged))

    def test_prune_asks_first_and_spares_a_run_at_work(self):
        def steps():
            return [c["step"] for c in self.cairn_json("ckpt", "ls", "a")["checkpoints"]]

        self.assertEqual(steps(), [2, 4, 6])
        plan = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", "--keep-step", "2")
        self.assertEqual([(c["step"], c["stays"]) for c in plan["checkpoints"]], [(2, True), (4, False), (6, True)])
        self.assertEqual((plan["done"], plan["removed"]), (False, []))
        self.assertIn("nothing was removed", self.cairn("ckpt", "prune", "a", "--keep", "last(1)").stdout)
        self.assertEqual(steps(), [2, 4, 6])
        with open(self.path("a/run.lock"), "r+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertIn("in use", self.cairn("ckpt", "prune", "a", "--keep", "last(1)", "--yes", code=73).stderr)
        self.assertEqual(steps(), [2, 4, 6])
        self.assertIn("removed", self.cairn("ckpt", "prune", "a", "--keep", "last(1)", "--keep-step", "2", "--yes").stdout)
        self.assertEqual(steps(), [2, 6])
        os.makedirs(self.path("a/checkpoints/.tmp-step-00000007.nohost.1.2.3"))
        told = self.cairn_json("ckpt", "prune", "a", "--leftovers", "--yes")
        self.assertEqual(len(told["leftovers"]["removed"] + told["leftovers"]["left"]), 1)
        self.assertEqual(steps(), [2, 6])
        for args, words in (([], "say what stays"), (["--keep", "newest(3)"], "newest"), (["--keep-step", "5"], "--keep-step 5: a/checkpoints has no such step"),
                            (["--keep", "fractions(4)"], "of the whole run (--run-steps)")):
            self.assertIn(words, self.cairn("ckpt", "prune", "a", *args, code=2).stderr)

    def test_leftovers_of_other_hosts_go_when_the_user_says_that_they_are_gone(self):
        own = re.sub("[^A-Za-z0-9]", "-", socket.gethostname())[:64]
        with open("/proc/self/stat", encoding="utf-8") as f:
            start = f.read().rsplit(")", 1)[1].split()[19]
        dead, alive, pod = (f".tmp-step-00000007.{writer}.0" for writer in
                            (f"{own}.{os.getpid()}.1", f"{own}.{os.getpid()}.{start}", "pod-7.1.2"))
        for name in (dead, alive, pod):
            self.write(f"a/checkpoints/{name}/shard.h5", b"x" * 2048)
        left = {x["name"]: (x["writer_alive"], x["other_host"])
                for x in self.cairn_json("ckpt", "ls", "a")["leftovers"]}
        self.assertEqual(left, {dead: (False, False), alive: (True, False), pod: (True, True)})
        self.assertIn("may be at work on pod-7; if it is gone, prune --leftovers --other-hosts removes it",
                      self.cairn("ckpt", "ls", "a").stdout)
        before = self.names_below("a")
        prune = ["ckpt", "prune", "a", "--leftovers"]
        said = self.cairn(*prune).stdout
        self.assertIn(f"{dead}: would go, 2.00 KiB\n", said)
        self.assertIn(f"left: {pod}: process 1 of pod-7, another host, may still be at work; if it is gone, "
                      "`cairn ckpt prune --leftovers --other-hosts --yes` removes this", said)
        said = self.cairn(*prune, "--other-hosts").stdout
        self.assertIn(f"{pod}: would go, 2.00 KiB, of another host, pod-7\n", said)
        self.assertIn(f"left: {alive}: process {os.getpid()} of {own} may still be at work\n", said)
        self.assertEqual(sorted(self.cairn_json(*prune, "--other-hosts")["leftovers"]["would_go"]), sorted([dead, pod]))
        self.assertEqual(self.names_below("a"), before)
        self.assertIn("give --leftovers too", self.cairn("ckpt", "prune", "a", "--keep", "last(9)", "--other-hosts",
                                                         code=2).stderr)
        self.assertEqual(self.cairn_json(*prune, "--yes")["leftovers"]["removed"], [dead])
        self.assertEqual(self.cairn_json(*prune, "--other-hosts", "--yes")["leftovers"]["removed"], [pod])
        self.assertEqual([x["name"] for x in self.cairn_json("ckpt", "ls", "a")["leftovers"]], [alive])

    def test_prune_removes_just_the_steps_that_are_named(self):
        def steps():
            return [c["step"] for c in self.cairn_json("ckpt", "ls", "a")["checkpoints"]]

        prune = ["ckpt", "prune", "a"]
        for args, words in ((["--step", "2", "--yes"], "--step 2: say --keep-step 2 .*, or --remove-step 2 "),
                            (["--remove-step", "5", "--yes"], "--remove-step 5: a/checkpoints has no such step"),
                            (["--remove-step", "2", "--keep", "last(1)", "--yes"], "without --keep, "),
                            (["--remove-step", "2", "--keep-step", "4", "--yes"], "without --keep, "),
                            (["--remove-step", "2", "--archive", "--yes"], "without --keep, "),
                            (["--remove-step", "2", "--remove-step", "6", "--yes"],
                             "a/checkpoints: step 6 stays, for it is the newest complete one")):
            self.assertRegex(self.cairn(*prune, *args, code=2).stderr, words)
            self.assertEqual(steps(), [2, 4, 6])
        self.write(self.step("a", 4) + "/references", "step-00000002\n")
        for yes in ([], ["--yes"]):
            said = self.cairn(*prune, "--remove-step", "2", *yes, code=2).stderr
            self.assertIn("step 2 stays: step 4 refers to it", said)
            self.assertEqual(steps(), [2, 4, 6])
        os.remove(self.path(self.step("a", 4) + "/references"))
        plan = self.cairn_json(*prune, "--remove-step", "4")
        self.assertEqual([(c["step"], c["stays"]) for c in plan["checkpoints"]], [(2, True), (4, False), (6, True)])
        self.assertEqual((plan["done"], plan["removed"], steps()), (False, [], [2, 4, 6]))
        os.truncate(self.path(self.step("a", 6) + "/manifest.json"), 100)  # damaged: then 4 is the newest complete one
        self.assertIn("step 4 stays", self.cairn(*prune, "--remove-step", "4", "--yes", code=2).stderr)
        done = self.cairn_json(*prune, "--remove-step", "6", "--remove-step", "2", "--yes")
        self.assertEqual((done["removed"], steps()), ([2, 6], [4]))
        self.assertEqual(done["freed_bytes"], sum(c["size_bytes"] for c in done["checkpoints"] if not c["stays"]))
        self.assertEqual(self.steps_in("a"), ["step-00000004"])
        os.truncate(self.path(self.step("a", 4) + "/manifest.json"), 100)
        self.assertIn("no checkpoint is complete", self.cairn(*prune, "--remove-step", "4", "--yes", code=2).stderr)
        self.assertEqual(steps(), [4])
        self.assertNotIn("--step ", self.cairn(*prune, "--help").stdout)

    def test_damaged_labels_stop_each_command_that_relies_on_them(self):
        self.cairn("ckpt", "label", "a", "2", "good", "--why", "kept by hand")
        for labels in ("{", '{"schema": 99}', "[]"):
            self.write("a/checkpoints/labels.json", labels)
            for args in (["ckpt", "prune", "a", "--keep", "last(1)"], ["ckpt", "prune", "a", "--keep", "last(1)", "--yes"],
                         ["ckpt", "prune", "a", "--remove-step", "4", "--yes"], ["ckpt", "push", "a", "pushed"], ["export", "a", "exported"],
                         ["ckpt", "push", self.step("a", 4), "pushed"], ["ckpt", "average", "a", "--last", "2", "--to", "averaged"],
                         ["generate", "a", "--prompt", "x"]):
                self.assertIn("labels.json", self.cairn(*args, code=65).stderr, args)
            self.assertIn("labels.json", self.cairn("ckpt", "ls", "a").stderr)
            with open(self.path("a/checkpoints/labels.json"), encoding="utf-8") as file:
                self.assertEqual(file.read(), labels)
        self.assertEqual(self.steps_in("a"), [f"step-0000000{step}" for step in (2, 4, 6)])
        self.assertTrue(self.cairn_json("ckpt", "verify", "a")["whole"])  # whatever labels say
        for made in ("pushed", "exported", "averaged"):
            self.assertFalse(os.path.exists(self.path(made)), made)

    def test_prune_counts_the_last_ones_as_a_run_does(self):
        os.truncate(self.path(self.step("a", 4) + "/manifest.json"), 100)
        for keep, stays in (("last(2)", [2, 4, 6]), ("last(1), every(2)", [2, 6])):
            told = self.cairn_json("ckpt", "prune", "a", "--keep", keep)["checkpoints"]
            self.assertEqual([c["step"] for c in told if c["stays"]], stays)

    def test_prune_archives_in_place(self):
        before = {step: self.array(f"a/checkpoints/step-{step:08d}", "weight/layers.0.attn.q.weight") for step in (2, 4)}
        plan = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", "--keep-step", "4", "--archive")
        self.assertEqual([(a["step"], a["bytes_after"]) for a in plan["archived"]], [(2, 0)])
        self.assertIn("would be compressed", self.cairn("ckpt", "prune", "a", "--keep", "last(1)", "--archive").stdout)
        self.assertIn("say what stays", self.cairn("ckpt", "prune", "a", "--archive", "--leftovers", code=2).stderr)
        held = sum(c["size_bytes"] for c in plan["checkpoints"])
        self.assertEqual((plan["freed_bytes"], plan["kept_bytes"]), (0, held))  # not known before it is done
        told = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", "--archive", "--yes")
        done = told["archived"]
        self.assertEqual(told["freed_bytes"], sum(a["bytes_before"] - a["bytes_after"] for a in done))
        self.assertEqual(told["kept_bytes"], held - told["freed_bytes"])
        self.assertEqual([a["step"] for a in done], [2, 4])
        for archived in done:
            self.assertLess(archived["bytes_after"], archived["bytes_before"])
        listed = self.cairn_json("ckpt", "ls", "a")["checkpoints"]
        self.assertEqual([(c["step"], c["complete"]) for c in listed], [(2, True), (4, True), (6, True)])
        self.cairn("ckpt", "verify", "a", "--all")
        for step, array in before.items():
            numpy.testing.assert_array_equal(
                self.array(f"a/checkpoints/step-{step:08d}", "weight/layers.0.attn.q.weight"), array)
        again = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", "--archive", "--yes")["archived"]
        self.assertEqual([a["left_alone"] for a in again], ["it is compressed already"] * 2)

    def archive_with(self, inject, code, *more):
        """`prune --archive` with a call of the system that fails: what it says, and which files it made."""
        done = subprocess.run([self.strace(), "-f", "-o", self.path("calls"), "-e", "trace=openat,renameat2,fsync,mkdir",
                               "-e", f"inject={inject}", self.program, "ckpt", "prune", "a", "--keep", "last(1)",
                               "--archive", "--yes", *more], cwd=self.folder.name, capture_output=True, text=True,
                              timeout=60)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done, re.findall(r'"([^"]*)", [A-Z_|]*O_CREAT', self.text("calls"))

    def test_archiving_compresses_nothing_where_names_cannot_be_exchanged(self):
        before = self.names_below("a")
        for more in ([], ["--json"]):
            done, made = self.archive_with("renameat2:error=EINVAL", 2, *more)
            self.assertFalse([name for name in made if "shard-" in name], made)
            self.assertEqual(self.names_below("a"), before)
            self.assertRegex(done.stderr, "step-00000002: not compressed: its file system cannot exchange two names.*"
                             "`cairn ckpt reshard a/checkpoints/step-00000002 NEW_RUN --mesh ... --compress zstd`")
        told = json.loads(done.stdout)
        self.assertEqual(len(told["problems"]), 1)
        self.assertIn("cannot exchange two names", told["problems"][0])

    def test_archiving_reports_what_was_compressed_before_an_error(self):
        done, _ = self.archive_with("renameat2:error=EIO:when=4", 74, "--json")  # a step: one to look, one to commit
        told = json.loads(done.stdout)
        first, second = told["archived"]
        self.assertEqual((first["step"], first["left_alone"], second["step"]), (2, "", 4))
        self.assertLess(first["bytes_after"], first["bytes_before"])
        self.assertEqual(told["freed_bytes"], first["bytes_before"] - first["bytes_after"])
        for said in (second["left_alone"], told["problems"][0], done.stderr):
            self.assertIn("Input/output error", said)
        self.cairn("ckpt", "verify", "a", "--all")
        self.assertEqual(self.cairn_json("ckpt", "ls", "a")["leftovers"], [])
        done, _ = self.archive_with("renameat2:error=EIO:when=2", 74)
        self.assertIn("left alone: failed: ", done.stdout)
        self.assertIn("Input/output error", done.stderr)

    def test_archiving_first_removes_what_a_killed_one_left(self):
        own = re.sub("[^A-Za-z0-9]", "-", socket.gethostname())[:64]
        writer = f"{own}.{os.getpid()}.1"
        shutil.copytree(self.path(self.step("a", 2)), self.path("raw"))
        prune = ["ckpt", "prune", "a", "--keep", "last(1)", "--archive"]
        self.cairn(*prune, "--yes")
        os.rename(self.path("raw"), self.path(f"a/checkpoints/.tmp-step-00000002.{writer}.0"))  # behind the exchange
        for name in (f".tmp-step-00000004.{writer}.1/shard-00000-of-00001.h5",  # before it
                     f".tmp-step-00000004.{writer}.2/shard-00000-of-00001.h5.done",  # a reshard goes on from it
                     f".tmp-step-00000006.{writer}.3/shard-00000-of-00001.h5", ".tmp-step-00000004.pod-7.1.2.4/x"):
            self.write(f"a/checkpoints/{name}", b"x" * 100)
        mine = [f".tmp-step-0000000{step}.{writer}.{count}" for step, count in ((2, 0), (4, 1))]
        before = self.names_below("a")
        self.assertEqual(self.cairn_json(*prune)["leftovers"]["would_go"], mine)
        self.assertEqual(self.names_below("a"), before)
        raw = sum(os.path.getsize(self.path(f"a/checkpoints/{mine[0]}/{name}"))
                  for name in os.listdir(self.path(f"a/checkpoints/{mine[0]}")))
        told = self.cairn_json(*prune, "--yes")
        self.assertEqual(told["leftovers"], {"put_back": [], "removed": mine, "left": [], "freed_bytes": raw + 100})
        self.assertEqual([a["left_alone"] for a in told["archived"]], ["it is compressed already"] * 2)
        self.assertEqual(len(self.cairn_json("ckpt", "ls", "a")["leftovers"]), 3)
        # Room is made before it is needed, not behind: a step that cannot be compressed finds them gone.
        self.write(f"a/checkpoints/.tmp-step-00000009.{writer}.5/shard.h5", b"x" * 100)
        shutil.rmtree(self.path(self.step("a", 2)))
        shutil.copytree(os.path.join(self.made.name, self.step("a", 2)), self.path(self.step("a", 2)))
        done, _ = self.archive_with("renameat2:error=EINVAL", 2, "--leftovers")
        self.assertIn(f".tmp-step-00000009.{writer}.5: removed, 100 B\n", done.stdout)

    def test_steps_that_a_newer_builds_step_refers_to_stay_as_they_are(self):
        late = self.step("a", 4)
        with open(self.path(f"{late}/manifest.json"), "r+b") as f:
            text = f.read()
            f.seek(0)
            f.write(text.replace(b'"version":1', b'"version":2', 1))
        self.write(f"{late}/references", "step-00000002\n")
        for yes in ([], ["--yes"]):
            told = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", "--archive", *yes)
            self.assertEqual([(a["step"], a["left_alone"]) for a in told["archived"]],
                             [(2, "it shares files with other steps")])
        for yes in ([], ["--yes"]):
            told = self.cairn_json("ckpt", "prune", "a", "--keep", "last(1)", *yes)
            self.assertEqual([(c["step"], c["stays"]) for c in told["checkpoints"]], [(2, True), (4, True), (6, True)])
            self.assertEqual((told["freed_bytes"], told["removed"]), (0, []))
            self.assertRegex(self.cairn("ckpt", "prune", "a", "--keep", "last(1)", *yes).stdout,
                             "step-00000002 .* stays: step 4 refers to it")

    def test_a_damaged_step_does_not_keep_others_from_being_archived(self):
        prune = ["ckpt", "prune", "a", "--keep", "last(1)", "--archive"]
        shutil.copytree(self.path("a"), self.path("whole"))
        for hurt, words in ((lambda: os.truncate(self.path(self.step("a", 2) + "/manifest.json"), 100), "cut short"),
                            (lambda: self.damaged_tensor(self.step("a", 2)), "checksum")):
            hurt()
            before = self.names_below(self.step("a", 2))
            told = self.cairn_json(*prune, "--yes", code=65)["archived"]
            self.assertEqual([one["step"] for one in told], [2, 4])
            self.assertIn("it is damaged: ", told[0]["left_alone"])
            self.assertIn(words, told[0]["left_alone"])
            self.assertEqual(told[1]["left_alone"], "")
            self.assertLess(told[1]["bytes_after"], told[1]["bytes_before"])
            self.assertEqual(self.names_below(self.step("a", 2)), before)
            said = self.cairn(*prune, "--yes", code=65).stdout
            self.assertRegex(said, "step-00000002 .*left alone: it is damaged: ")
            self.assertRegex(said, "step-00000004 .*left alone: it is compressed already")
            shutil.rmtree(self.path("a"))
            shutil.copytree(self.path("whole"), self.path("a"))

    def test_ls_shows_the_loss_and_verify_takes_several(self):
        listed = self.cairn_json("ckpt", "ls", "a")["checkpoints"]
        losses = [c["metrics"]["loss"] for c in listed]
        self.assertTrue(all(0 < x < 20 for x in losses))
        self.assertIn(f"{losses[-1]:.5g}", self.cairn("ckpt", "ls", "a").stdout)
        several = self.cairn_json("ckpt", "verify", "a", "b", "--all")
        self.assertEqual((several["whole"], len(several["checkpoints"])), (True, 4))
        tensor = self.damaged_tensor(self.step("a", 4))
        several = self.cairn_json("ckpt", "verify", "a", "--all", code=65)
        bad = [c for c in several["checkpoints"] if not c["whole"]]
        self.assertEqual(len(bad), 1)
        (damage,) = bad[0]["damages"]
        self.assertIn(damage["tensor"], damage["message"])
        # What reads a tensor checks it: nobody gets the damaged bytes.
        done = self.cairn("ckpt", "cat", self.step("a", 4), tensor, "--out", "x", code=65)
        self.assertIn("checksum", done.stderr)
        self.assertFalse(os.path.exists(self.path("x")))
        self.assertEqual(self.cairn("ckpt", "diff", self.step("a", 4), "b", code=65).stdout, "")

    def test_a_step_that_goes_while_it_is_verified_is_not_damaged(self):
        gone = self.path(self.step("a", 4))
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # stands still at it, having found all that it was asked for
        verify = subprocess.Popen([self.program, "ckpt", "verify", *[self.step("b", 6)] * 300, self.step("a", 4)],
                                  cwd=self.folder.name, text=True, stdin=subprocess.DEVNULL, stdout=writer,
                                  stderr=subprocess.PIPE)
        self.addCleanup(verify.kill)
        os.close(writer)
        with open(reader, "rb") as said:
            said.read(1)
            os.rename(gone, gone + ".trash")  # as retention does it
            shutil.rmtree(gone + ".trash")
            said.read()
        _, refused = verify.communicate(timeout=300)
        self.assertEqual(verify.returncode, 69, refused)
        self.assertIn("step-00000004: was removed meanwhile", refused)

    def test_a_step_that_retention_removes_meanwhile_is_not_damaged(self):
        for name in os.listdir(self.path(self.step("a", 2))):
            if name.endswith(".h5"):
                with open(self.path(f"{self.step('a', 2)}/{name}"), "r+b") as f:
                    f.write(bytes(os.path.getsize(f.name)))
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        verify = subprocess.Popen([self.program, "ckpt", "verify", "a", "--all"], cwd=self.folder.name, stdout=write,
                                  stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        os.close(write)
        self.addCleanup(verify.kill)
        end, waiting = time.monotonic() + 60, bytearray(4)
        while int.from_bytes(waiting, "little") < 4096:  # it has much to say of step 2, and nobody listens
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)
            fcntl.ioctl(read, termios.FIONREAD, waiting)
        shutil.rmtree(self.path(self.step("a", 4)))
        with open(read, encoding="utf-8") as out:
            said = out.read()
        self.assertEqual((verify.wait(60), verify.stderr.read()), (65, ""))  # for step 2
        verify.stderr.close()
        self.assertIn(f"{self.step('a', 4)}: was removed meanwhile", said)
        self.assertIn(f"{self.step('a', 6)}: whole", said)

    def test_the_examples_of_cat_name_tensors_that_a_gpt_has(self):
        texts = {"cairn ckpt cat --help": self.cairn("ckpt", "cat", "--help").stdout}
        for name in ("docs/commands.md", "docs/operations/checkpoint-tools.md"):
            with open(os.path.join(ROOT, name), encoding="utf-8") as f:
                texts[name] = f.read()
        for where, text in texts.items():
            examples = re.findall(r"cairn (ckpt cat runs/[^`\n]+)", text)
            self.assertTrue(examples, where)
            for example in examples:
                with self.subTest(where=where, example=example):
                    words = shlex.split(example, comments=True)
                    words[2] = "a"
                    if ">" in words:
                        words[words.index(">")] = "--out"
                    elif "--out" not in words:
                        words += ["--out", "out.npy"]
                    self.cairn(*words)
                    self.assertGreater(numpy.load(self.path(words[words.index("--out") + 1])).size, 0)

    def test_help_shows_examples(self):
        for name in ("ls", "inspect", "verify", "diff", "cat", "average", "prune", "reshard"):
            self.assertIn(f"cairn ckpt {name} ", self.cairn("ckpt", name, "--help").stdout)
            self.assertIn(f"ckpt {name}", self.cairn("completion", "bash").stdout)


if __name__ == "__main__":
    main()
