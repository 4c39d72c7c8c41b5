"""cairn plan: the search for layouts, the step time on this machine. Published systems: published_test.py."""

import json
import pathlib

from program import ProgramTest, main

PUBLISHED = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "published"
NO_RAMP = ["--set", "batch.ramp-"]  # of GPT-3: one batch, one kind of step

SMALL = """
local T = require "cairn"
return T.recipe {
  name = "small", seed = 1, stop = T.steps(10),
  model = T.gpt { layers = 4, width = 32, heads = 4, context = 16, vocab = 300 },
  tokenizer = T.bytes,
  data = T.megatron { prefix = "data/text" },
  batch = { samples = 8, micro = 1 },
  optimizer = T.adamw { peak_lr = 1e-3, clip = 1.0, zero = 1 },
  mesh = T.mesh { tp = 2, pp = 2 },
}
"""


class PlanTest(ProgramTest):
    def test_a_search_finds_what_fits_and_says_why_the_others_lose(self):
        recipe = PUBLISHED / "gpt3_175b.lua"
        memory = 80 << 30
        search = ["plan", recipe, "--world", 1024, "--search", "--machine", "a100-80", *NO_RAMP]
        found, seconds = self.cpu_seconds(lambda: self.cairn_json(*search))
        self.assertLess(seconds, 250 * self.small_plan_s())  # about 80
        fitting = found["fitting"]
        self.assertGreater(len(fitting), 1)
        self.assertEqual([f["step_ms"] for f in fitting], sorted(f["step_ms"] for f in fitting))
        self.assertEqual(fitting[0]["loses"], "")
        for one in fitting:
            self.assertEqual(one["tp"] * one["pp"] * one["dp"], 1024)
            self.assertLessEqual(one["rank_bytes"], memory - found["machine"]["reserve_bytes"])
            self.assertAlmostEqual(sum(one["parts_ms"].values()), one["step_ms"], delta=1e-6 * one["step_ms"])
        for one in fitting[1:]:
            self.assertRegex(one["loses"], r"slower: [a-z]+ |as fast|even: \+\d")
            if one["loses"].startswith("even"):
                self.assertLess(one["step_ms"], fitting[0]["step_ms"] * (1 + found["machine"]["error"]))
        for one in found["too_large"]:
            self.assertLess(one["step_ms"], fitting[0]["step_ms"] * 1.000001)
            least = one.get("rank_bytes") or one["rank_bytes_at_least"]  # a bound is no size
            self.assertGreater(least, memory - found["machine"]["reserve_bytes"])
            self.assertIn("memory", one["loses"])
        # What the search reckons of its choice is what the plan says of it.
        best = fitting[0]
        sets = [f"mesh.tp={best['tp']}", f"mesh.pp={best['pp']}", f"mesh.dp={best['dp']}",
                f"mesh.virtual_stages={best['virtual_stages']}", f"batch.micro={best['micro']}",
                f"mesh.sequence_parallel={'true' if best['sequence_parallel'] else 'false'}",
                f"optimizer.zero={best['zero']}",
                f"schedule={best['schedule']}", f"recompute.mode={best['recompute']}",
                f"recompute.distribute={'true' if best['distribute'] else 'false'}"]
        plan = self.cairn_json("plan", recipe, "--world", 1024, "--machine", "a100-80", *NO_RAMP,
                               *[word for s in sets for word in ("--set", s)])
        self.assertEqual(best["rank_bytes"], max(stage["rank_bytes"] for stage in plan["stages"]))
        self.assertAlmostEqual(best["step_ms"], plan["step_time"]["ms"], delta=1e-6 * best["step_ms"])
        self.assertEqual(best["parts_ms"], plan["step_time"]["parts_ms"])
        self.assertAlmostEqual(best["mfu"], plan["step_time"]["mfu"])
        text = self.cairn(*search).stdout
        self.assertIn("--set mesh.tp=", text)
        # Why: each axis of the choice against its next best value.
        self.assertEqual([reason.split()[0] for reason in found["reasons"]],
                         ["tp", "pp", "schedule", "micro", "ZeRO", "recompute"])
        for reason in found["reasons"]:
            self.assertRegex(reason, r"instead of .*: (\d+\.\d % (slower|faster)|as fast|even: \+)")
            self.assertIn(reason, text)

    def test_a_search_takes_what_memory_asks_for(self):
        """Less memory: more is split, or computed again; the search knows every schedule and ZeRO stage."""
        recipe = PUBLISHED / "gpt3_175b.lua"
        seen = {}
        for gib in (141, 80, 40, 24):
            found = self.cairn_json("plan", recipe, "--world", 1024, "--search", "--machine", "a100-80", *NO_RAMP,
                                    "--memory", f"{gib}GiB")
            self.assertLessEqual(found["fitting"][0]["rank_bytes"], (gib - 3) << 30)
            seen[gib] = found["fitting"][0]["step_ms"]
        self.assertEqual(sorted(seen.values()), [seen[gib] for gib in (141, 80, 40, 24)])  # less memory, no faster
        found = self.cairn_json("plan", recipe, "--world", 1024, "--search", "--machine", "a100-80", *NO_RAMP,
                                "--memory", "13GiB")
        tried = found["fitting"] + found["too_large"]
        self.assertLessEqual({"none", "full"}, {one["recompute"] for one in tried})
        self.assertLessEqual({0, 3}, {one["zero"] for one in tried})
        self.assertIn("zb-v", {one["schedule"] for one in tried})

    def test_a_search_that_finds_nothing_says_what_is_missing(self):
        recipe = PUBLISHED / "gpt3_175b.lua"
        sheet = ["--search", "--machine", "a100-80"]
        done = self.cairn("plan", recipe, "--world", 8, *sheet, "--memory", "4GiB", code=1)
        self.assertRegex(done.stdout, "none fits: the smallest rank of any layout takes .* GiB")
        self.assertIn("expected bytes", self.cairn("plan", recipe, *sheet, "--memory", "lots", code=2).stderr)
        self.assertIn("kept for a device's own", self.cairn("plan", recipe, *sheet, "--memory", "2GiB", code=2).stderr)
        known = self.cairn("plan", recipe, "--machine", "abacus", code=2).stderr
        self.assertIn("abacus", known)
        self.assertIn("h100-80", known)

    def test_a_flag_that_has_no_use_is_refused(self):
        plan = ["plan", PUBLISHED / "gpt3_175b.lua", "--world", 1024]
        for more, words in ((["--memory", "80GiB"], "--memory is for --search"),
                            (["--pin", "tp=8"], "--pin is for --search"),
                            (["--force"], "--force goes on where a rank does not fit"),
                            (["--search", "--svg", "x.svg"], "--svg is for one layout"),
                            (["--search", "--draw"], "--draw is for one layout"),
                            (["--search", "--calibrate"], "--calibrate is for one layout"),
                            (["--machine", "a100-80", "--calibrate"], "give one of them")):
            self.assertIn(words, self.cairn(*plan, *more, code=2).stderr)

    def test_a_data_sheet_gives_a_step_time(self):
        plan = self.cairn_json("plan", PUBLISHED / "gpt3_175b.lua", "--world", 1024, "--machine", "a100-80")
        # 1,536 sequences take 1,024 of these between 25 and 60 s in every publication of such runs.
        self.assertGreater(plan["step_time"]["ms"], 15_000)
        self.assertLess(plan["step_time"]["ms"], 60_000)

    def test_a_step_time_says_what_it_rests_on(self):
        plan = ["plan", PUBLISHED / "gpt3_175b.lua", "--world", 1024, "--machine", "a100-80"]
        time = self.cairn_json(*plan)["step_time"]
        self.assertAlmostEqual(sum(time["parts_ms"].values()), time["ms"], delta=1e-6 * time["ms"])
        self.assertLess(time["low_ms"], time["ms"])
        self.assertGreater(time["high_ms"], time["ms"])
        self.assertIn("% of 312 TFLOP/s", time["assumes"])
        whole = self.cairn_json(*plan)
        flops = whole["flops_per_token"] * whole["tokens_per_step"]
        self.assertAlmostEqual(time["mfu"], flops / (time["ms"] / 1e3 * 1024 * 312e12), places=6)
        text = self.cairn(*plan).stdout
        self.assertRegex(text, r"step time \S+ ms \(\S+ to \S+\), MFU \d")
        self.assertIn("beside the last backward", text)
        # Storage: stated, or assumed and said so.
        self.assertIn("(assumed; --storage says another)", text)
        slow, fast = (self.cairn_json(*plan, "--storage", rate)["storage"] for rate in ("1GB/s", "4GB/s"))
        self.assertAlmostEqual(slow["save_s"], 4 * fast["save_s"])
        self.assertAlmostEqual(slow["save_s"], whole["checkpoint"]["bytes"] / 1e9 / 128)
        self.assertGreaterEqual(slow["load_s"], slow["save_s"] * 0.999)

    def test_a_rank_that_does_not_fit_is_refused_unless_forced(self):
        plan = ["plan", PUBLISHED / "gpt3_175b.lua", "--set", "mesh.pp=1", "--set", "mesh.dp=0", "--world", 64,
                "--machine", "a100-80"]
        done = self.cairn(*plan, code=2)
        self.assertRegex(done.stderr, r"a rank does not fit: it takes .* GiB of the 77.0 GiB of a100-80 .*--force")
        self.assertIn("step time", done.stdout)
        self.cairn(*plan, "--force", code=0)
        told = json.loads(self.cairn(*plan, "--json", code=2).stdout)["machine"]
        self.assertFalse(told["fits"])
        self.assertGreater(told["rank_bytes"], told["memory_bytes"] - told["reserve_bytes"])

    def test_figures_are_of_the_last_phase_and_all_phases_are_told(self):
        text = SMALL.replace("stop = T.steps(10)", "stop = T.steps(100)").replace(
            "batch = { samples = 8, micro = 1 }",
            "batch = { samples = 8, micro = 1, phases = { T.phase { at = T.steps(20), samples = 32, micro = 2 },"
            " T.phase { at = T.steps(500), samples = 64 } } }")
        recipe = self.write("phases.lua", text)
        plan = self.cairn_json("plan", recipe, "--world", 4, "--machine", "a100-80")
        self.assertEqual(plan["batch"], {"samples": 32, "micro": 2, "accumulate": 16})
        self.assertEqual([p["first_step"] for p in plan["phases"]], [21, 1])  # the last first, none after the stop
        self.assertEqual(plan["bubble"], plan["phases"][0]["bubble"])
        self.assertEqual(plan["step_time"], plan["phases"][0]["step_time"])
        self.assertGreater(plan["phases"][1]["bubble"], plan["bubble"])
        self.assertEqual(plan["phases"][1]["accumulate"], 8)
        lines = self.cairn("plan", recipe, "--world", 4).stdout.splitlines()
        self.assertIn("32 = micro 2 x accumulate 16", next(line for line in lines if line.startswith("batch")))
        self.assertIn("bubble at 16 micro-batches", next(line for line in lines if line.startswith("stages")))
        said = [line for line in lines if line.startswith("  from step")]
        self.assertIn("from step 21: 32 samples = micro 2 x accumulate 16", said[0])
        self.assertIn("from step 1: 8 samples = micro 1 x accumulate 8", said[1])

    def test_a_search_with_a_ramp_takes_about_two_seconds(self):
        recipe = self.write("ramp.lua", """local T = require "cairn"
return T.recipe { name = "ramp", stop = T.tokens(300e9), data = T.megatron { prefix = "x" }, precision = "bf16",
  model = T.gpt { layers = 96, width = 12288, heads = 96, context = 2048, vocab = 50257 },
  batch = { samples = 4096, micro = 1, ramp = { from = 32, by = 32, over = T.tokens(12e9) } },
  optimizer = T.adamw { peak_lr = 1e-4 }, mesh = T.mesh { tp = 8, pp = 8 } }""")
        found, seconds = self.cpu_seconds(
            lambda: self.cairn_json("plan", recipe, "--world", 1024, "--search", "--machine", "a100-80"))
        self.assertGreater(len(found["fitting"]), 1)
        self.assertLess(seconds, 450 * self.small_plan_s())  # about 140

    def test_a_search_reckons_with_this_host_and_keeps_to_its_pins(self):
        recipe = self.write("small.lua", SMALL)
        env = {"CAIRN_CALIBRATION": self.path("cache/calibration.json")}
        said = self.cairn("plan", recipe, "--world", 4, "--search", env=env, code=2).stderr
        self.assertIn("--calibrate", said)
        self.assertIn("a100-80", said)
        self.cairn("plan", recipe, "--calibrate", env=env)
        search = ["plan", recipe, "--world", 4, "--search", "--json"]
        found = json.loads(self.cairn(*search, env=env).stdout)
        self.assertIn("this host", found["machine"]["source"])
        self.assertGreater(found["layouts"], 10)
        pinned = json.loads(self.cairn(*search, "--pin", "tp=2,pp=1,zero=1", env=env).stdout)
        for one in pinned["fitting"] + pinned["too_large"]:
            self.assertEqual((one["tp"], one["pp"], one["dp"], one["zero"]), (2, 1, 2, 1))
        said = self.cairn(*search, "--pin", "tp=3", env=env, code=2).stderr
        self.assertIn("--pin tp=3: no layout of 4 ranks has all of that; there are, not in every mixture, tp 1, 2, 4;", said)
        self.assertIn("`cp=2`", self.cairn(*search, "--pin", "cp=2", env=env, code=2).stderr)

    def test_a_calibration_is_kept_and_gives_the_step_time_of_its_shapes(self):
        recipe = self.write("small.lua", SMALL)
        kept = self.path("cache/calibration.json")
        env = {"CAIRN_CALIBRATION": kept}
        self.assertIn("is not measured; --calibrate does", self.cairn("plan", recipe, env=env).stdout)
        measured = self.cairn("plan", recipe, "--calibrate", env=env)
        self.assertIn(kept, measured.stderr)
        with open(kept) as f:
            file = json.load(f)
        self.assertGreater(file["peak_f32_tflops"], 0)
        self.assertEqual(len(file["shapes"]), 1)
        shape = next(iter(file["shapes"].values()))
        self.assertEqual(len(shape["ms"]), 4)
        self.assertTrue(all(sum(parts) > 0 for parts in shape["ms"]))
        again = json.loads(self.cairn("plan", recipe, "--json", env=env).stdout)["step_time"]
        self.assertEqual(set(again["parts_ms"]), {"compute", "recompute", "bubble", "tensor", "pipeline", "reduce", "optimizer",
                                                  "gather", "offload", "other"})
        self.assertAlmostEqual(sum(again["parts_ms"].values()), again["ms"], delta=1e-6 * again["ms"])
        self.assertGreater(again["ms"], 0)
        # Times that are of the form the plan takes them to have: every depth is told, measured or not.
        depths, batches = shape["layers"], shape["micro_batches"]

        def planned(error, *sets):
            for k, (depth, batch) in enumerate((d, b) for d in depths for b in batches):
                forward = 1 + 2 * depth + 3 * batch + 4 * depth * batch
                shape["ms"][k] = [forward * (1 + error[k]), 0, 0, 0, 5 * depth, 0]
            with open(kept, "w") as f:
                json.dump(file, f)
            return json.loads(self.cairn("plan", recipe, "--json", *sets, env=env).stdout)["step_time"]["ms"]

        def formula(depth):
            return 1 + 2 * depth + 3 * batches[1] + 4 * depth * batches[1] + 5 * depth

        none, deeper = [0, 0, 0, 0], ["--set", "model.layers=8"]
        self.assertAlmostEqual(planned(none), formula(depths[1]), delta=1e-6)
        self.assertAlmostEqual(planned(none, *deeper), formula(8), delta=1e-6)
        # An error of one of the four stays an error of about its size, whichever it is: through all four it would grow.
        for k in range(4):
            error = [0.1 if i == k else 0 for i in range(4)]
            self.assertLess(abs(planned(error, *deeper) / formula(8) - 1), 0.12, k)
        # A pipeline of two stages is full from two micro-batches on: one says nothing about longer steps.
        two = ["--set", "mesh.tp=1", "--set", "mesh.pp=2", "--set", "batch.samples=2", "--world", "2"]
        self.cairn("plan", recipe, "--calibrate", *two, env=env)
        with open(kept) as f:
            file = json.load(f)
        self.assertIn([2, 2], [s["micro_batches"] for s in file["shapes"].values()])
        other = self.cairn("plan", recipe, "--set", "model.width=64", env=env).stdout
        self.assertIn("these shapes are not measured here", other)
        # Of another machine: not used. Torn: told.
        file["cpu"] = "another"
        with open(kept, "w") as f:
            json.dump(file, f)
        self.assertIn("is not measured", self.cairn("plan", recipe, env=env).stdout)
        with open(kept, "w") as f:
            f.write("{")
        self.assertIn("delete it and calibrate again", self.cairn("plan", recipe, env=env, code=65).stderr)


if __name__ == "__main__":
    main()
