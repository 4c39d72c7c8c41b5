"""init, check, help, explain, diff and plan on real recipes."""

import json
import os
import pathlib
import re
import xml.etree.ElementTree

from program import ProgramTest, main

BIG = """
local T = require "cairn"
return T.recipe {
  name = "big", seed = 1, stop = T.tokens(270e9),
  model = T.gpt { layers = 105, width = 20480, heads = 128, context = 2048, vocab = 51200 },
  tokenizer = T.bytes,
  data = T.megatron { prefix = "data/text" },
  batch = { samples = 1920, micro = 1 },
  optimizer = T.adamw { peak_lr = 5e-5, clip = 1.0, zero = 1 },
  precision = "bf16",
  mesh = T.mesh { tp = 8, pp = 35, sequence_parallel = true },
  checkpoint = T.checkpoint { save = { T.every { steps = 500 }, T.every { minutes = 30 } }, keep = { T.last(3) } },
}
"""


class RecipeTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.cairn("init")

    def test_init_from_a_folder_writes_a_recipe_of_its_very_model(self):
        golden = pathlib.Path(__file__).resolve().parents[1] / "golden"
        self.write("t.txt", bytes(range(1, 9)) * 6000)  # ids that the smallest vocabulary has
        self.cairn("data", "tokenize", "t.txt", "--out", "data/text", "--tokenizer", "bytes")
        families = set()
        for folder in sorted(golden.glob("hf-*")):
            if not (folder / "config.json").exists():
                continue
            with self.subTest(folder=folder.name):
                families.add(json.loads((folder / "config.json").read_text())["model_type"])
                done = self.cairn("init", f"from-{folder.name}", "--from", folder)
                self.assertIn("data tokenize", done.stdout)
                recipe = f"from-{folder.name}/train.lua"
                self.cairn("check", recipe, "--recipe-only", "--world", 1)
                # A start compares the recipe's model with the folder's.
                self.cairn("train", recipe, "--run", "never", "--nproc", 1, "--dry-run", "--set", "batch.samples=2")
                if not folder.name.startswith("hf-mixtral"):
                    continue
                with open(self.path(recipe)) as f:
                    self.assertEqual("aux_loss" in f.read(), folder.name == "hf-mixtral-balanced")
                # Another balancing loss is no other model.
                self.cairn("train", recipe, "--run", "never", "--nproc", 1, "--dry-run", "--set", "batch.samples=2",
                           "--set", "model.moe.aux_loss=0.25", "--set", 'model.moe.aux_scope="layer"')
        self.assertGreaterEqual(len(families), 11)
        self.assertIn("no folder", self.cairn("init", "nothing", "--from", "no-such-folder", code=2).stderr)
        self.assertFalse(os.path.exists(self.path("nothing")))

    def test_init_writes_what_check_accepts_and_never_destroys(self):
        self.cairn("check", "train.lua", "--world", 4, "--recipe-only")
        with open(self.path(".luarc.json")) as f:
            self.assertEqual(json.load(f)["runtime"]["version"], "Lua 5.4")
        with open(self.path("types/cairn.lua")) as f:
            self.assertIn("---@class", f.read())
        self.cairn("init")  # unchanged files: fine
        self.write("train.lua", "-- mine\n")
        os.remove(self.path(".luarc.json"))
        self.assertIn("train.lua", self.cairn("init", code=2).stderr)
        with open(self.path("train.lua")) as f:
            self.assertEqual(f.read(), "-- mine\n")
        self.assertFalse(os.path.exists(self.path(".luarc.json")))
        self.cairn("init", "--force")
        self.cairn("check", "train.lua", "--recipe-only")
        self.cairn("init", "a/new/folder")
        self.cairn("check", "a/new/folder/train.lua", "--recipe-only")
        self.write("taken/data", "")  # where a folder is needed
        os.makedirs(self.path("folder/train.lua"))  # and the other way round
        for folder, words, there in (("taken", "taken/data: is no folder", ["data"]),
                                     ("folder", "folder/train.lua: is a folder", ["train.lua"])):
            self.assertIn(words, self.cairn("init", folder, "--force", code=2).stderr)
            self.assertEqual(os.listdir(self.path(folder)), there)

    def test_check_says_fine_or_every_mistake(self):
        self.assertIn("train.lua: fine. first, 842K parameters", self.cairn("check", "train.lua", "--recipe-only").stdout)
        done = self.cairn("check", "train.lua", "--set", "model.heads=62", "--set", "optimizer.peak_lr=fast", code=2)
        self.assertEqual(done.stdout, "")
        self.assertIn("model.heads = 62 does not divide model.width = 128", done.stderr)
        self.assertIn("optimizer.peak_lr", done.stderr)
        self.assertIn("2 errors. Nothing was started.", done.stderr)

    def test_check_json_is_for_editors(self):
        fine = self.cairn_json("check", "train.lua", "--recipe-only")
        self.assertTrue(fine["ok"])
        self.assertEqual(fine["diagnostics"], [])
        self.assertEqual(fine["recipe"]["model"]["layers"], 4)
        self.assertRegex(fine["hash"], r"^[0-9a-f]{32}$")
        self.write("bad.lua", 'local T = require "cairn"\nreturn T.recipe {\n  modle = T.gpt {},\n}\n')
        wrong = self.cairn_json("check", "bad.lua", code=2)
        self.assertFalse(wrong["ok"])
        first = [d for d in wrong["diagnostics"] if d["code"] == "unknown_field"][0]
        self.assertEqual((first["file"], first["line"], first["path"], first["suggest"]), ("bad.lua", 3, "modle", "model"))

    def test_set_param_and_with_reach_the_recipe(self):
        self.write("small.lua", "return { model = { layers = 2 }, batch = { samples = 8 } }")
        got = self.cairn_json("check", "train.lua", "--recipe-only", "--with", "small.lua", "--set", "model.layers=3", "--set",
                              "checkpoint.save={ T.every { minutes = 10 } }", "--set", "stop=T.steps(70)")["recipe"]
        self.assertEqual(got["model"]["layers"], 3)
        self.assertEqual(got["batch"]["samples"], 8)
        self.assertEqual(got["checkpoint"]["save"][0]["seconds"], 600)
        self.assertEqual(got["stop"], {"unit": "steps", "value": 70})
        self.assertIn("peak", self.cairn("check", "train.lua", "--param", "peak=1", code=2).stderr)

    def test_help_knows_fields_and_subcommands(self):
        self.assertIn("optimizer.peak_lr", self.cairn("help", "optimizer.peak_lr").stdout)
        self.assertIn("Usage: cairn check", self.cairn("help", "check").stdout)
        self.assertIn("peak_lr", self.cairn("help", "optimizer.peek_lr", code=2).stderr)
        self.assertIn("optimizer.peak_lr", self.cairn("help", "--markdown").stdout)
        self.assertIn("---@class", self.cairn("help", "--types").stdout)
        self.cairn("help")
        self.cairn("help", "--types", "--markdown", code=2)

    def test_explain_tells_the_origin(self):
        self.assertRegex(self.cairn("explain", "train.lua", "optimizer.peak_lr").stdout, r"0\.001.*train\.lua:\d+")
        fields = self.cairn_json("explain", "train.lua", "model.layers", "--set", "model.layers=3")["fields"]
        self.assertEqual([(f["path"], f["value"], f["set_by"]) for f in fields], [("model.layers", "3", "--set")])
        self.assertIn("peak_lr", self.cairn("explain", "train.lua", "optimizer.peek_lr", code=2).stderr)
        error = self.cairn_json("explain", "train.lua", "nothing.here", code=2)["error"]
        self.assertEqual(error["exit_code"], 2)

    def test_diff_shows_only_what_differs(self):
        self.assertEqual(self.cairn("diff", "train.lua", "train.lua", "--exit-code").stdout, "no difference\n")
        with open(self.path("train.lua")) as f:
            self.write("other.lua", f.read().replace("T.steps(500)", "T.steps(600)").replace("clip = 1.0", "clip = 0.5"))
        self.assertEqual(self.cairn("diff", "train.lua", "other.lua").stdout,
                         "optimizer.clip: 1.0 -> 0.5\nstop: 500 steps -> 600 steps\n")
        self.assertEqual(len(self.cairn_json("diff", "train.lua", "other.lua", "--exit-code", code=1)["changes"]), 2)
        # A run folder and a resolved recipe stand for the recipe that they hold.
        resolved = self.cairn_json("check", "other.lua", "--recipe-only")["recipe"]
        self.write("run/recipe.resolved.json", json.dumps(resolved))
        self.assertEqual(self.cairn("diff", "other.lua", "run").stdout, "no difference\n")
        self.assertEqual(self.cairn("diff", "run/recipe.resolved.json", "run").stdout, "no difference\n")
        self.write("broken.json", "{")
        self.assertIn("broken.json", self.cairn("diff", "run", "broken.json", code=2).stderr)
        self.cairn("diff", "run", "no-such-run", code=2)

    def test_plan_agrees_with_itself(self):
        plan = self.cairn_json("plan", "train.lua", "--world", 8, "--set", "mesh.pp=2", "--set", "mesh.tp=2")
        self.assertEqual(plan["mesh"]["tp"] * plan["mesh"]["pp"] * plan["mesh"]["dp"], 8)
        batch = plan["batch"]
        self.assertEqual(batch["samples"], batch["micro"] * batch["accumulate"] * plan["mesh"]["dp"])
        self.assertEqual(plan["tokens_per_step"], batch["samples"] * 128)
        self.assertEqual(plan["checkpoint"]["bytes"], plan["parameters"] * 12)
        weights = sum(s["rank_weight_bytes"] for s in plan["stages"]) * 4  # of tp 2 x dp 2
        self.assertEqual(plan["shared_memory"]["bytes"], 3 * plan["checkpoint"]["bytes"] + weights)
        copied = ["plan", "train.lua", "--world", 8, "--set", "mesh.pp=2", "--set", "mesh.tp=2", "--set",
                  "checkpoint.snapshot_by=copy"]
        self.assertEqual(self.cairn_json(*copied)["shared_memory"]["bytes"], 3 * plan["checkpoint"]["bytes"])
        self.assertRegex(self.cairn(*copied).stdout, "shared memory 3 copies x .*, besides what stands above")
        self.assertEqual([s["chunks"][0]["end_layer"] for s in plan["stages"]], [2, 4])
        for stage in plan["stages"]:
            self.assertGreater(stage["rank_activation_bytes"], 0)
            self.assertGreaterEqual(stage["rank_weight_bytes"], 4 * stage["rank_parameters"])
            self.assertEqual(stage["rank_bytes"], sum(stage[f"rank_{k}_bytes"]
                                                      for k in ("weight", "grad", "optimizer", "activation")))
        # The ranks' shares add up to the checkpoint: tp 0 holds all that is replicated, so the sum lies just above.
        shares = sum(s["rank_snapshot_bytes"] for s in plan["stages"]) * 4
        self.assertGreaterEqual(shares, plan["checkpoint"]["bytes"])
        self.assertLess(shares, 1.1 * plan["checkpoint"]["bytes"])
        text = self.cairn("plan", "train.lua", "--world", 8, "--set", "mesh.pp=2", "--set", "mesh.tp=2").stdout
        self.assertIn("world 8 = pp 2 x dp 2 x tp 2", text)
        self.assertIn("batch 16 = micro 4 x accumulate 2 x dp 2", text)
        self.assertIn("stages [emb 2] [2 head]", text)
        self.assertIn("bubble at 2 micro-batches: 33.3%", text)

    def test_plan_draws_the_schedule(self):
        sets = ["--set", "mesh.pp=2", "--world", 2, "--set", "batch.micro=4"]
        lines = self.cairn("plan", "train.lua", *sets, "--draw").stdout.splitlines()
        self.assertEqual([line for line in lines if line.startswith("rank ")],
                         ["rank 0 0>1>....<0  2><1  3><2  ..<3  ",
                          "rank 1 ..0><0  1><1  2><2  3><3  ...."])
        self.assertIn("3 of 15 units idle on every rank: 20.0 %", "\n".join(lines))
        sets += ["--set", "schedule=interleaved", "--set", "mesh.virtual_stages=2"]
        out = self.cairn("plan", "train.lua", *sets, "--draw", "--svg", "s.svg").stdout
        self.assertIn("interleaved, 2 stages a rank; bubble at 4 micro-batches: 11.1%", out)
        self.assertIn("rank 1 ...0a>1a>0b><0b   1b><1b   2a><0a ", out)
        svg = xml.etree.ElementTree.parse(self.path("s.svg")).getroot()
        self.assertEqual(len(svg.findall("{http://www.w3.org/2000/svg}g")), 2 * 2 * 4 * 2)
        plan = self.cairn_json("plan", "train.lua", *sets)
        self.assertEqual([[c["first_layer"] for c in s["chunks"]] for s in plan["stages"]], [[0, 2], [1, 3]])
        zb_v = sets[:4] + ["--set", "batch.micro=4", "--set", "schedule=zb-v", "--set", "mesh.virtual_stages=2"]
        out = self.cairn("plan", "train.lua", *zb_v, "--draw", "--svg", "v.svg").stdout
        self.assertIn("zb-v, 2 stages a rank; bubble at 4 micro-batches: 4.0%", out)
        self.assertIn("rank 0 0a>1a>2a>0b><0b0bw1b><1b1bw", out)
        self.assertIn("rank 1 ...0a>0b>1a>1b><0b0bw2a><0a0aw", out)
        svg = xml.etree.ElementTree.parse(self.path("v.svg")).getroot()
        self.assertEqual(len(svg.findall("{http://www.w3.org/2000/svg}g")), 20 + 24)
        fills = {one.get("fill") for one in svg.iter() if one.get("fill")}  # SVG 1.1 knows names and #rrggbb
        self.assertEqual([fill for fill in fills if not re.fullmatch("white|#[0-9a-f]{6}", fill)], [])
        self.assertEqual(len(fills), 1 + 2 * 3)
        plan = self.cairn_json("plan", "train.lua", *zb_v)
        self.assertEqual([[c["first_layer"] for c in s["chunks"]] for s in plan["stages"]], [[0, 3], [1, 2]])
        self.assertEqual([[c["late_micro_batches"] for c in s["chunks"]] for s in plan["stages"]], [[0, 1], [2, 1]])
        self.assertIn("Not a directory", self.cairn("plan", "train.lua", *sets, "--svg", "train.lua/s.svg", code=2).stderr)
        self.assertIn("groups of mesh.pp = 2, and a step has 3",
                      self.cairn("plan", "train.lua", *sets, "--set", "batch.samples=12", code=2).stderr)

    def test_plan_refuses_a_world_that_does_not_fit(self):
        done = self.cairn("plan", "train.lua", "--world", 5, "--set", "mesh.tp=2", code=2)
        self.assertIn("a world of 4 or 6 ranks", done.stderr)

    def test_plan_of_3360_ranks_is_instant(self):
        self.write("big.lua", BIG)
        plan, seconds = self.cpu_seconds(lambda: self.cairn_json("plan", "big.lua", "--world", 3360))
        self.assertEqual(plan["mesh"]["dp"], 12)
        self.assertEqual(len(plan["stages"]), 35)
        self.assertGreater(plan["parameters"], 500e9)
        self.assertLess(seconds, 15 * self.small_plan_s())  # about 4
        text = self.cairn("plan", "big.lua", "--world", 3360).stdout
        self.assertIn("[emb 3] [3] x 33 [3 head]", text)
        self.assertIn("every 500 steps or 30 min; last(3): 3 to 5 at once", text)
        self.assertLess(len(text.splitlines()), 25)  # 35 stages, told as ranges
        print(f"plan of 3360 ranks: {seconds * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
