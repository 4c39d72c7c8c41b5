"""What check, train --dry-run, plan and data info find before a start, and that they write nothing."""

import fcntl
import json
import os
import random
import re
import struct

from program import ProgramTest, main

RECIPE = """
local T = require "cairn"
local p = T.params {{ context = T.param {{ 32 }} }}
return T.recipe {{
  name = "mine", seed = 7, stop = T.samples(160),
  model = T.llama {{ layers = 2, width = 32, heads = 4, context = p.context, vocab = 256 }},
  tokenizer = {tokenizer},
  data = {data},
  batch = {{ samples = 8, micro = 2 }},
  optimizer = T.adamw {{ peak_lr = 1e-3 }},
  log = {{ tensorboard = false }},
  {more}
}}
"""
EVAL = "eval = { at = T.every { steps = 5 }, steps = 2 },"


class StartTest(ProgramTest):
    def setUp(self):
        super().setUp()
        draw = random.Random(1)
        for name in ("text", "other"):
            self.write(name + ".txt", "".join(draw.choice("some words of a text\n") for _ in range(20000)))
            self.cairn("data", "tokenize", name + ".txt", "--out", name)
        self.recipe()

    def recipe(self, data='T.megatron { prefix = "text" }', more="", tokenizer="T.bytes"):
        self.write("r.lua", RECIPE.format(data=data, more=more, tokenizer=tokenizer))

    def tokens(self, name, change):
        """A copy of the set `text` with other tokens."""
        with open(self.path("text.bin"), "rb") as f:
            raw = bytearray(f.read())
        change(raw)
        self.write(name + ".bin", bytes(raw))
        with open(self.path("text.idx"), "rb") as f:
            self.write(name + ".idx", f.read())

    def test_what_a_launcher_says_of_hosts_counts_and_what_cannot_work_is_refused(self):
        short = ("train", "r.lua", "--nproc", 1, "--set", "stop=T.samples(16)")
        for environment in ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}, {"SLURM_NNODES": "2"},
                            {"SLURM_JOB_NUM_NODES": "2"}):
            with self.subTest(environment=environment):
                refused = self.cairn(*short, env=environment, code=2)
                self.assertEqual(refused.stderr.count("this is one of 2 nodes of a Slurm job"), 1)
        self.cairn(*short, "--hosts", "localhost", env={"SLURM_NNODES": "2"})
        step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a[1-2]"}
        found = self.cairn(*short, "--dry-run", env=step)
        self.assertIn("2 hosts x 1 rank, from Slurm step 12.0; this is 1 (a2), leader a1:", found.stdout)
        crowd = self.cairn(*short, env={**step, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, code=2)
        self.assertIn("Slurm step 12.0 has 8 tasks on 1 node; one agent a host, ranks by --nproc", crowd.stderr)
        for nodes in ("1", ""):
            alone = self.cairn(*short, "--dry-run", env={"SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes})
            self.assertNotIn("Slurm", alone.stdout + alone.stderr)
        absurd = self.cairn(*short, "--dry-run", env={"SLURM_JOB_NUM_NODES": "2x"}, code=2)
        self.assertIn("SLURM_JOB_NUM_NODES = `2x`, expected a whole number", absurd.stderr)

    def test_hosts_that_make_no_sense_are_refused(self):
        self.write("hosts", "h0\n\n# the second rack\nh1 slots=8\n")
        self.write("none", "# nobody\n")
        self.write("cluster.lua", 'local T = require "cairn"\nreturn T.hosts { names = { "a", "b" }, ranks_per_hosts = 1 }\n')
        self.write("wire.lua", 'local T = require "cairn"\nreturn T.hosts { names = { "localhost", "b" }, '
                               'ranks_per_host = 1, interface = "nowire7" }\n')
        for words, told in ((("--hosts", "a,b", "--host-file", "hosts"), "give one of them"),
                            (("--host-file", "hosts"), "line 4: 'h1 slots=8': expected one host name a line"),
                            (("--host-file", "none"), "names no host"),
                            (("--host-file", "missing"), "missing"),
                            (("--hosts", "a[1-"), "--hosts"),
                            (("--hosts", "a,b", "--host-index", "2"), "2"),
                            (("--hosts", "a,b", "--host-index", "0", "--spares", "1"), "--spares"),
                            (("--hosts", "a,b", "--host-index", "0", "--hosts-min", "3"), "--hosts-min 3: 2 hosts train"),
                            (("--hosts", "a,b", "--host-index", "0", "--cluster", "cluster.lua"), "cluster.lua:2"),
                            (("--cluster", "wire.lua", "--host-index", "0"), "interfaces here: ")):
            with self.subTest(words=words):
                refused = self.cairn("train", "r.lua", "--nproc", 1, *words, code=2)
                self.assertIn(told, refused.stderr)

    def everything(self):
        """Each path below the test's folder, with its content."""
        found = {}
        for folder, folders, files in os.walk(self.folder.name):
            for name in folders:
                found[os.path.join(folder, name)] = None
            for name in files:
                if os.path.islink(os.path.join(folder, name)):
                    found[os.path.join(folder, name)] = os.readlink(os.path.join(folder, name))
                    continue
                with open(os.path.join(folder, name), "rb") as f:
                    found[os.path.join(folder, name)] = f.read()
        return found

    def refused(self, *extra, run=None, code=2):
        """Returns the refusal that check and --dry-run print without having written a byte. `code`: how the start would end."""
        before = self.everything()
        run_words = ["--run", run] if run else []
        checked = self.cairn("check", "r.lua", *run_words, *extra, code=2)
        dry = self.cairn("train", "r.lua", "--dry-run", *run_words, *extra, code=code)
        self.assertEqual(self.everything(), before)
        self.assertRegex(checked.stderr, r"\d+ problems?\. Nothing was started\.\n$")
        free = r"[\d.]+ [KMGT]iB (of memory|are free|are available|are missing)"  # others use the disk too
        self.assertEqual(re.sub(free, "", checked.stderr), re.sub(free, "", dry.stderr))
        said = self.cairn_json("check", "r.lua", *run_words, *extra, code=2)
        self.assertFalse(said["ok"])
        self.assertGreaterEqual(len(said["diagnostics"]), 1)
        return checked.stderr

    def test_a_fine_start_is_told_with_its_data_and_nothing_is_written(self):
        self.recipe(data='T.megatron { prefix = "text", split = { 90, 10 } }', more=EVAL)
        before = self.everything()
        said = self.cairn("check", "r.lua").stdout
        self.assertIn("r.lua: fine. mine,", said)
        self.assertRegex(said, r"text  18K tokens, 562 windows to train on: 160 samples, 0\.285 epochs; 62 windows to "
                               r"validate on; largest id 120")
        self.assertIn("largest id 120", self.cairn("train", "r.lua", "--dry-run").stdout)
        (source,) = self.cairn_json("check", "r.lua")["data"]["sources"]
        self.assertEqual((source["train_windows"], source["valid_windows"], source["samples"]), (562, 62, 160))
        self.assertEqual(source["scanned"], 1)
        self.assertEqual(self.everything(), before)

    def test_a_set_that_is_not_there_is_refused_with_the_recipes_line(self):
        self.recipe(data='T.megatron { prefix = "nowhere" }')
        self.assertRegex(self.refused(), r"^r\.lua:8: data: source nowhere: .*nowhere\.idx: No such file")
        self.cairn("check", "r.lua", "--recipe-only")
        self.assertFalse(os.path.exists(self.path("runs")))
        self.cairn("train", "r.lua", code=2)
        self.assertFalse(os.path.exists(self.path("runs")))  # refused before the folder is made

    def test_check_reports_all_problems_of_a_start_at_once(self):
        self.write("short.bin", b"\x01\x00" * 20)
        self.recipe(data='T.blend { sources = { T.megatron { prefix = "nowhere" }, T.token_files { train = "short.bin" }, '
                         'T.megatron { prefix = "gone", weight = 2 } } }')
        said = self.refused()
        for part in ("nowhere.idx", "gone.idx", "short: 20 tokens to train on, and a sample of model.context = 32 needs 33",
                     "3 problems. Nothing was started."):
            self.assertIn(part, said)
        self.assertIn("data.sources[2]", said)

    def test_damaged_headers_are_refused(self):
        with open(self.path("text.idx"), "r+b") as f:
            f.truncate(40)
        self.assertIn("text.idx", self.refused(code=65))
        self.write("odd.bin", b"abc")
        self.recipe(data='T.token_files { train = "odd.bin" }')
        self.assertIn("3 bytes is no whole number of uint16 tokens", self.refused(code=65))

    def test_the_scan_of_ids_finds_one_beyond_the_rows_in_each_part(self):
        def far_in(raw):
            raw[-200:-198] = struct.pack("<H", 300)
        self.tokens("bad", far_in)
        place = "bad.bin: token 19900 (byte 39800) is 300, expected 0 to 255"
        self.recipe(data='T.megatron { prefix = "bad" }')
        self.assertIn(place, self.refused(code=65))
        self.recipe(data='T.megatron { prefix = "bad", split = { 90, 10 } }', more=EVAL)
        self.assertIn(place, self.refused(code=65))  # in the validation part
        self.recipe(data='T.megatron { prefix = "bad", split = { 90, 10 } }')  # which is not read without eval
        self.cairn("check", "r.lua")
        self.recipe(data='T.megatron { prefix = "bad" }')
        self.assertIn("--dry-run", self.cairn("train", "r.lua", "--dry-run", "--set", "model.vocab=301").stdout)

    def test_data_info_tells_the_largest_id_and_refuses_a_vocabulary(self):
        def high(raw):
            raw[:2] = struct.pack("<H", 300)
        self.tokens("bad", high)
        self.assertIn("largest id 300", self.cairn("data", "info", "bad").stdout)
        self.assertEqual(self.cairn_json("data", "info", "bad")["largest_token"], 300)
        self.cairn("data", "info", "bad", "--vocab", 301)
        done = self.cairn("data", "info", "bad", "--vocab", 300, code=2)
        self.assertIn("bad.bin: token 0 (byte 0) is 300, expected 0 to 299", done.stderr)
        said = self.cairn_json("data", "info", "bad", "--vocab", 256, code=2)
        self.assertEqual((said["outside"], said["largest_token"]), (1, 300))

    def test_validation_parts_are_counted(self):
        self.recipe(data='T.megatron { prefix = "text", split = { 999, 1 } }', more=EVAL)
        said = self.refused()
        self.assertIn("validation parts hold 0 windows", said)
        self.assertIn("give `split` of T.megatron a greater second part", said)
        self.assertNotIn("valid file", said)
        self.recipe(data='T.blend { sources = { T.megatron { prefix = "text", split = { 90, 10 }, weight = 1 }, '
                         'T.megatron { prefix = "other" } } }', more=EVAL)
        for words in (("check", "r.lua"), ("train", "r.lua", "--dry-run"), ("plan", "r.lua")):
            self.assertRegex(self.cairn(*words).stdout, "warning: .*source other has no validation part")
        (warning,) = self.cairn_json("check", "r.lua")["warnings"]
        self.assertEqual((warning["path"], warning["file"]), ("data.sources[2]", "r.lua"))
        self.recipe(data='T.blend { sources = { T.megatron { prefix = "text", split = { 90, 10 }, weight = 1 }, '
                         'T.megatron { prefix = "other", split = { 999, 1 } } } }', more=EVAL)
        self.assertIn("other has 20 tokens in its validation part, and a window needs 33",
                      self.cairn("check", "r.lua").stdout)
        many = ", ".join(f'T.megatron {{ prefix = "text", name = "s{k}", split = {{ 90, 10 }} }}' for k in range(20))
        self.recipe(data=f"T.blend {{ sources = {{ {many} }} }}", more=EVAL)  # an evaluation has 16 windows
        self.assertIn("source s16 has so little weight (0.05)", self.cairn("check", "r.lua").stdout)
        self.assertEqual(len(self.cairn_json("check", "r.lua")["warnings"]), 4)
        self.recipe(data='T.blend { sources = { T.megatron { prefix = "text", split = { 90, 10 }, weight = 1 }, '
                         'T.megatron { prefix = "other", split = { 90, 10 } } } }', more=EVAL)
        self.assertEqual(self.cairn_json("check", "r.lua")["warnings"], [])

    def test_plan_shows_samples_and_epochs_of_each_source(self):
        self.recipe(data='T.blend { sources = { T.megatron { prefix = "text", weight = 3 }, '
                         'T.megatron { prefix = "gone" } } }')
        said = self.cairn("plan", "r.lua").stdout
        self.assertIn("data text  20K tokens, 624 windows to train on: 120 samples, 0.192 epochs (75 %)", said)
        self.assertRegex(said, r"data gone  40 samples are to come of it, but it cannot be opened: .*gone\.idx")
        text, gone = self.cairn_json("plan", "r.lua")["data"]["sources"]
        self.assertEqual((text["samples"], text["train_windows"], text["there"]), (120, 624, True))
        self.assertEqual((gone["samples"], gone["there"]), (40, False))

    def test_best_that_no_save_meets_is_told(self):
        data = 'T.megatron { prefix = "text", split = { 90, 10 } }'
        keep = ('checkpoint = T.checkpoint {{ save = {{ T.every {{ steps = {} }} }}, keep = {{ T.last(1), '
                'T.best {{ metric = "valid_loss" }} }} }},')
        self.recipe(data, EVAL + keep.format(4))  # meets at 20, the last of 20 steps
        for words in (("check", "r.lua"), ("train", "r.lua", "--dry-run")):
            self.assertRegex(self.cairn(*words).stdout, "r.lua:.*warning: checkpoint.keep: T.best by valid_loss never finds")
        self.recipe(data, EVAL + keep.format(10))
        said = self.cairn_json("check", "r.lua")
        self.assertEqual((said["warnings"], [f for f in said["facts"] if "T.best" in f]), ([], []))
        self.recipe(data, EVAL + keep.format(2))
        self.assertIn("T.best by valid_loss chooses among 1 of 9 saves", self.cairn("check", "r.lua").stdout)

    def test_tokenizer_and_init_are_opened(self):
        self.recipe(tokenizer='T.sentencepiece "no.model"')
        self.assertRegex(self.cairn("check", "r.lua").stdout, "warning: tokenizer: .*no.model")
        self.recipe(more='init = T.init_from { path = "no/such/run" },')
        self.assertIn("no/such/run", self.refused())
        self.recipe()
        self.assertIn("no/such/run", self.cairn("train", "r.lua", "--dry-run", "--init-from", "no/such/run", code=2).stderr)

    def test_a_folder_that_cannot_be_taken_is_refused(self):
        self.write("file", "")
        self.assertIn("it is a file, and a folder is needed", self.refused(run="file/run"))
        self.assertIn("cannot be written", self.refused(run="/proc/run"))
        os.symlink("nowhere", self.path("link"))
        self.assertIn("it is a link to nothing", self.refused(run="link"))
        os.makedirs(self.path("held/checkpoints"))
        self.write("held/run.lock", json.dumps({"host": "there", "pid": 12, "since": "now", "token": "x"}) + "\n")
        with open(self.path("held/run.lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertIn("held is in use by another cairn (pid 12 on there, since now)", self.refused(run="held", code=73))
            for dry in ([], ["--dry-run"]):  # whatever else is wrong
                self.cairn("train", "r.lua", "--run", "held", "--set", "model.width=65536", *dry, code=73)
        self.cairn("check", "r.lua", "--run", "held")
        self.write("lost/events.jsonl", '{"event":"saved","step":30}\n')
        self.assertIn("step 30 was saved there, and no checkpoint is there any more", self.refused(run="lost"))
        os.makedirs(self.path("beside/step-00000010"))
        self.assertIn("move them there", self.refused(run="beside"))

    def test_a_start_that_does_not_fit_into_memory_or_on_disk_is_refused(self):
        self.assertRegex(self.refused("--set", "model.width=65536", "--set", "model.layers=64", code=74),
                         "snapshots need .* GiB .* are missing")
        self.recipe(more="checkpoint = T.checkpoint { save = { T.every { steps = 1 } } },")
        self.assertRegex(self.refused("--set", "stop=T.steps(1000000000)", "--set", "model.width=256", code=74),
                         "kept .* are missing. Make room")

    def test_a_run_with_stages_is_counted_to_the_end_of_its_stages(self):
        # 5,120 tokens are 20 steps of 8 samples of 32; behind the stage a step has 16, all of `other`.
        blend = ('T.blend { sources = { T.megatron { prefix = "text", name = "web", weight = 1 }, '
                 'T.megatron { prefix = "other", name = "qa", weight = 0 } } }')
        self.recipe(data=blend, more='stages = { T.stage { at = T.fraction(0.8), batch = { samples = 16 }, '
                    'data = { weights = { web = 0, qa = 1 } } } },')
        whole = ("--set", "stop=T.tokens(5120)")
        plan = self.cairn_json("plan", "r.lua", *whole)
        self.assertEqual(plan["steps"], 18)
        self.assertEqual([(s["stage"], s["first_step"], s["last_step"], s["samples"], s["tokens_per_step"], s["sources"])
                          for s in plan["segments"]],
                         [(0, 1, 16, 128, 256, {"web": 1, "qa": 0}), (1, 17, 18, 32, 512, {"web": 0, "qa": 1})])
        self.assertEqual([(p["stage"], p["first_step"], p["samples"]) for p in plan["phases"]], [(1, 17, 16), (0, 1, 8)])
        self.assertEqual(plan["batch"]["samples"], 16)  # of a step that happens: the last
        self.assertEqual({s["name"]: s["samples"] for s in plan["data"]["sources"]}, {"web": 128, "qa": 32})
        text = self.cairn("plan", "r.lua", *whole).stdout
        self.assertIn("5.12K tokens in 18 steps", text)
        self.assertIn("from step 17 (stages[1]): 16 samples", text)
        self.assertRegex(text, r"qa .* 32 samples, .*\(20 %\), from a later stage on")
        said = self.cairn_json("train", "r.lua", *whole, "--dry-run", "--run", "new")
        self.assertEqual((said["steps"], said["start"]["steps"]), (18, 18))
        self.assertEqual({s["name"]: s["samples"] for s in said["data"]["sources"]}, {"web": 128, "qa": 32})
        text = self.cairn("train", "r.lua", *whole, "--dry-run", "--run", "new").stdout
        self.assertIn("18 steps of 256 to 512 tokens", text)
        self.assertIn("a fresh start: 18 steps, 16 of them until the next stage", text)
        self.assertIn("32 samples", self.cairn("check", "r.lua", *whole).stdout)
        # Behind the beginning of the stage, samples count as they were drawn.
        said = self.cairn("train", "r.lua", *whole, "--run", "new").stdout
        self.assertRegex(said, r"step +18/18 .*\n(.*\n)*done: 18 steps in ")
        said = self.cairn_json("check", "--run", "new")
        self.assertEqual({s["name"]: s["samples"] for s in said["data"]["sources"]}, {"web": 128, "qa": 32})

    def test_what_a_later_stage_cannot_do_is_refused_at_the_start(self):
        for name, windows in (("train", 400), ("valid", 12)):
            self.write(name + ".u16", struct.pack(f"<{32 * windows + 1}H", *[i % 200 for i in range(32 * windows + 1)]))
        self.recipe(data='T.token_files { train = "train.u16", valid = "valid.u16" }',
                    more=EVAL + "stages = { T.stage { at = T.steps(3), batch = { samples = 16 } } },")
        said = self.refused()
        self.assertIn("stages[1]: the validation parts hold 12 windows of 33 tokens, one batch needs 16; name a longer "
                      "file in `valid` of T.token_files, or take a smaller batch", said)
        self.assertNotIn("split", said)
        self.cairn("check", "r.lua", "--set", "stages={}")

    def test_dry_run_as_json_is_one_object(self):
        said = self.cairn_json("train", "r.lua", "--dry-run", "--run", "new")
        self.assertEqual((said["ok"], said["dry_run"], said["run"], said["steps"], said["world"], said["exit_code"]),
                         (True, True, "new", 20, 1, 0))
        said = self.cairn_json("train", "r.lua", "--dry-run", "--set", "data.prefix=gone", code=2)
        self.assertEqual((said["ok"], said["exit_code"]), (False, 2))
        self.assertIn("gone.idx", said["diagnostics"][0]["message"])

    def test_resume_set_names_the_command_that_does_it(self):
        done = self.cairn("resume", "a/run", "--set", "optimizer.peak_lr=1e-4", code=2)
        self.assertIn("`cairn train RECIPE --run a/run --set optimizer.peak_lr=1e-4`", done.stderr)
        self.assertNotIn("--set", self.cairn("resume", "--help").stdout)


if __name__ == "__main__":
    main()
