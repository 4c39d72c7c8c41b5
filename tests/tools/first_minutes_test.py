"""A new user's first steps: the commands that `cairn init` prints, words of other trainers, a narrow terminal."""

import json
import os
import re
import struct
import subprocess

from program import ProgramTest, main

# GPT-2's letters for bytes: those that print stand for themselves, the others for letters from 256 on.
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [chr(b) if b in PLAIN else chr(256 + sum(c not in PLAIN for c in range(b))) for b in range(256)]


class FirstMinutesTest(ProgramTest):
    def hf_folder(self, name, eos=True):
        """A llama of one layer, with a tokenizer of 256 bytes and the token that ends a document."""
        shapes = {"model.embed_tokens.weight": (257, 16), "model.norm.weight": (16,), "lm_head.weight": (257, 16)}
        layer = "model.layers.0."
        for part in "qkvo":
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (16, 16)
        for part, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24))):
            shapes[f"{layer}mlp.{part}_proj.weight"] = shape
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (16,)
        header, data = {}, b""
        for tensor, shape in shapes.items():
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            values = [1.0 if len(shape) == 1 else ((7 * k) % 31 - 15) / 40 for k in range(count)]
            header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * count]}
            data += struct.pack(f"<{count}f", *values)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.write(f"{name}/model.safetensors", struct.pack("<Q", len(text)) + text + data)
        self.write(f"{name}/config.json", json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32"}))
        self.write(f"{name}/tokenizer.json", json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": 256, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {letter: k for k, letter in enumerate(BYTES)}, "merges": []}}))
        self.write(f"{name}/tokenizer_config.json", json.dumps({"eos_token": "<end>"} if eos else {}))
        return name

    def follow(self, said, shorter=""):
        """Pastes what stands behind "next:" into a shell, where `cairn` is the program; `shorter` joins the training."""
        block = said.split("next:")[1].splitlines()
        lines = [line.strip() for line in block if line.strip().startswith(("cairn ", "cd "))]
        self.assertTrue(lines[-1].startswith("cairn train "), said)
        script = "\n".join(["set -e", f"cairn() {{ '{self.program}' \"$@\"; }}", *lines[:-1], f"{lines[-1]} {shorter}"])
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=self.folder.name, timeout=100,
                              stdin=subprocess.DEVNULL)

    def test_the_commands_that_init_prints_work_where_they_are_pasted(self):
        for words, folder in (((), "."), (("a new/one",), "a new/one")):
            done = self.follow(self.cairn("init", *words).stdout, "--nproc 1 --set 'stop=T.steps(3)'")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("done: 3 steps", done.stdout)
            self.assertTrue(os.path.exists(self.path(f"{folder}/data/text.idx")))

    def test_a_demo_learns_its_text_by_the_commands_that_it_prints(self):
        said = self.cairn("init", "demo", "--demo").stdout
        lines = [line.strip() for line in said.split("next:")[1].splitlines()][:-1]
        self.assertEqual([line.split()[:2] for line in lines[1:]],
                         [["cairn", "data"], ["cairn", "train"], ["cairn", "generate"], ["cairn", "report"]])
        lines[2] += " --set 'stop=T.steps(100)'"
        script = "\n".join(["set -e", f"cairn() {{ '{self.program}' \"$@\"; }}", *lines])
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=self.folder.name, timeout=100,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(self.path("demo/runs/demo/metrics.jsonl")) as f:
            self.assertLess(json.loads(f.readlines()[-1])["loss"], 1.6)  # 5.5 at first; by the frequency of bytes: 2.9
        with open(self.path("demo/data/sample.txt")) as f:
            text = f.read()
        self.assertEqual(len(set(text.splitlines())), 10000)
        self.assertIn("\nninety-nine plus two is one hundred one.\n", text)
        self.assertIn("--from excludes --demo", self.cairn("init", "x", "--demo", "--from", "y", code=2).stderr)

    def test_init_keeps_a_text_that_took_the_place_of_its_sample(self):
        self.write("data/sample.txt", "mine\n")
        self.cairn("init")
        with open(self.path("data/sample.txt")) as f:
            self.assertEqual(f.read(), "mine\n")

    def test_a_recipe_from_a_model_evaluates_saves_and_separates_the_documents_that_its_commands_end(self):
        self.hf_folder("it's a model")
        for words in ((), ("tuned",)):
            said = self.cairn("init", *words, "--from", "it's a model").stdout
            self.assertIn(" --eod", said)
            done = self.follow(said, "--nproc 1 --set 'stop=T.steps(60)' --set 'checkpoint.save={ T.every { steps = 40 } }'")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            folder = "/".join([*words, "runs/it-s-a-model-tuned"])
            with open(self.path(f"{folder}/metrics.jsonl")) as f:
                steps = [line for line in map(json.loads, f) if "step" in line]
            self.assertEqual([s["step"] for s in steps if "valid_loss" in s], [50, 60])
            self.assertLess(steps[0]["lr"], steps[2]["lr"])  # warms up
            self.assertGreater(steps[2]["lr"], steps[59]["lr"])
            self.assertIn("step-00000040", os.listdir(self.path(f"{folder}/checkpoints")))
            with open(self.path(f"{folder}/recipe.resolved.json")) as f:
                self.assertEqual(json.load(f)["objective"]["document_end"], 256)

    def test_the_commands_for_a_model_of_a_long_context_work_too(self):
        self.hf_folder("long")
        with open(self.path("long/config.json")) as f:
            config = json.load(f)
        self.write("long/config.json", json.dumps({**config, "max_position_embeddings": 131072}))
        done = self.follow(self.cairn("init", "a", "--from", "long").stdout, "--nproc 1 --set 'stop=T.steps(1)' --threads 2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_model_without_the_token_that_ends_documents_or_without_tokenizer_has_a_recipe_too(self):
        self.hf_folder("plain", eos=False)
        said = self.cairn("init", "a", "--from", "plain").stdout
        self.assertNotIn("--eod", said)
        done = self.follow(said, "--nproc 1 --set 'stop=T.steps(2)'")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        os.remove(self.path("plain/tokenizer.json"))
        done = self.cairn("init", "b", "--from", "plain")
        self.assertIn("has no tokenizer.json and no tokenizer.model", done.stderr)
        self.assertIn("--tokenizer TOKENIZER", done.stdout)

    def test_what_is_written_has_its_missing_folders_made_or_names_what_stands_in_the_way(self):
        self.cairn("init")
        self.hf_folder("model")
        self.write("t.txt", "a text\n" * 50)
        self.cairn("data", "tokenize", "t.txt", "--out", "new/one/text")
        self.cairn("data", "info", "new/one/text")
        self.cairn("plan", "train.lua", "--svg", "new/two/plan.svg")
        self.cairn("import", "model", "new/three/a/checkpoints")
        step = "new/three/a/checkpoints/step-00000000"
        self.cairn("ckpt", "cat", step, "final_norm.weight", "--out", "new/four/t.npy")
        self.cairn("ckpt", "reshard", step, "new/five/b", "--mesh", "tp=2")
        self.cairn("ckpt", "average", step, step, "--to", "new/six/c")
        self.cairn("export", step, "new/seven/hf")
        self.assertEqual(sorted(os.listdir(self.path("new"))), sorted(["one", "two", "three", "four", "five", "six", "seven"]))
        for words in (("data", "tokenize", "t.txt", "--out", "t.txt/x"), ("plan", "train.lua", "--svg", "t.txt/x/y"),
                      ("ckpt", "cat", step, "final_norm.weight", "--out", "t.txt/x/y")):
            done = subprocess.run([self.program, *words], capture_output=True, text=True, cwd=self.folder.name)
            self.assertNotIn(done.returncode, (0, 70), done.stderr)
            self.assertIn("t.txt", done.stderr)

    def test_words_of_other_trainers_lead_to_a_field_or_a_command(self):
        for words, wanted in ((("epochs",), "stop"), (("accumulate",), "batch.micro"), (("learning_rate",), "optimizer.peak_lr"),
                              (("Grad-Clip",), "optimizer.clip"), (("lora",), "no adapters"), (("chat",), "cairn data chat"),
                              (("spike",), "watch"), (("wandb",), "T.wandb"), (("dataset",), "cairn data tokenize"),
                              (("held-out",), "eval"), (("packing",), "objective.document_end"), (("fsdp",), "optimizer.zero"),
                              (("gradient", "checkpointing"), "recompute"), (("gradient checkpointing",), "recompute")):
            self.assertIn(wanted, self.cairn("help", *words).stdout)
        self.assertIn("Usage: cairn ckpt ls", self.cairn("help", "ckpt", "ls").stdout)
        self.assertIn("did you mean the command train?", self.cairn("help", "trian", code=2).stderr)
        self.assertIn("the nearest is optimizer.clip", self.cairn("help", "grad_cilp", code=2).stderr)
        self.assertIn("did you mean `train`?", self.cairn("trian", code=2).stderr)
        self.assertIn("cairn generate", self.cairn("inference", code=2).stderr)
        self.assertIn("cairn ckpt ls", self.cairn("ckpt", "list", code=2).stderr)
        done = self.cairn("train", "x.lua", "--learning-rate", "1", code=2)
        self.assertIn("--learning-rate: no such option; here it is optimizer.peak_lr", done.stderr)
        self.assertIn("--set FIELD=VALUE", done.stderr)
        self.assertIn("no adapters", self.cairn("train", "x.lua", "--lora-rank", "8", code=2).stderr)

    def test_a_recipe_with_words_of_other_trainers_names_what_they_are_called(self):
        self.cairn("init")
        with open(self.path("train.lua")) as f:
            text = f.read()
        self.write("epochs.lua", text.replace("stop = T.steps(500)", "stop = T.steps(500), epochs = 3"))
        self.assertIn("accepted: stop", self.cairn("check", "epochs.lua", "--recipe-only", code=2).stderr)
        self.write("size.lua", text.replace("samples = 16", "samples = 16, size = 3"))
        self.assertIn("accepted: batch.samples", self.cairn("check", "size.lua", "--recipe-only", code=2).stderr)
        self.write("norm.lua", text.replace("clip = 1.0", "max_grad_norm = 1.0"))
        self.assertIn("accepted: optimizer.clip", self.cairn("check", "norm.lua", "--recipe-only", code=2).stderr)

    def test_every_command_that_a_word_leads_to_exists(self):
        page = self.cairn("help", "--commands").stdout
        for word in ("epochs", "oom", "torchrun", "autotune", "jsonl", "perplexity", "merge", "backup", "list", "delete", "wandb",
                     "benchmark", "timeout", "nccl", "compare", "install", "config", "earlystopping", "ema"):
            for command in re.findall(r"(cairn [a-z][a-z -]*[a-z]) --help", self.cairn("help", word).stdout):
                self.assertIn(f"\n## {command}\n", page)

    def narrow(self, *words, columns):
        """Lines of the program on a terminal of this width, without colours."""
        text = self.on_terminal(*words, env={"LC_ALL": "C.UTF-8"}, columns=columns)
        return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n").splitlines()

    def test_tables_and_sentences_break_between_words_on_a_narrow_terminal(self):
        self.cairn("init")
        self.cairn("data", "tokenize", "data/sample.txt", "--out", "data/text")
        self.cairn("train", "train.lua", "--nproc", 1, "--set", "stop=T.steps(60)", "--set",
                   "checkpoint.save={ T.every { steps = 20 } }")
        for words in (("plan", "train.lua"), ("train", "train.lua", "--dry-run", "--run", "new"), ("ckpt", "ls", "runs/first"), ("train", "--help"), ("help", "optimizer"),
                      ("ckpt", "--help"), ("report", "runs/first")):
            wide = self.cairn(*words).stdout
            for columns in (80, 60):
                lines = self.narrow(*words, columns=columns)
                for line in lines:
                    self.assertTrue(len(line) <= columns or " " not in line.strip(), (words, line))
                if words[-1] not in ("runs/first", "new") or words[0] == "ckpt":  # a curve, and the memory that is free
                    ages = r"\b\d+(\.\d+)?\s+(s|ms|min)\b(\s+\d+\s+s\b)?"
                    self.assertEqual(re.sub(ages, "", " ".join(lines)).split(), re.sub(ages, "", wide).split(), words)

    def test_the_curve_of_a_report_fits_and_has_its_steps_below(self):
        lines = [{"schema": 1, "run": "r"}]
        for step in range(1, 1001):
            lines.append({"step": step, "samples": step, "tokens": step, "time": 1.7e9 + step, "loss": 12000 / step, "grad_norm": 1,
                          "lr": 1e-3, "tokens_per_s": 1, "step_ms": 1, "checkpoint_lost_ms": 0})
        self.write("run/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        for columns in (40, 80, 120):
            said = self.narrow("report", "run", columns=columns)
            self.assertLessEqual(max(map(len, said)), columns)
            self.assertGreater(len(said[0]), 30)
            self.assertRegex("\n".join(said), r"\n +└[─┬]+\n +step 1 .* 1000\n")

    def test_a_report_counts_the_snapshots_that_were_left_out(self):
        lines = [{"schema": 1, "run": "r"}]
        for step in range(1, 7):
            lines.append({"step": step, "samples": step, "tokens": step, "time": 1.7e9 + step, "loss": 1, "grad_norm": 1, "lr": 1e-3,
                          "tokens_per_s": 1, "step_ms": 1, "checkpoint_lost_ms": 0.5})
            if step % 3 > 0:
                lines[-1]["snapshot_left_out"] = True
        self.write("run/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        told = self.cairn_json("report", "run")
        self.assertEqual((told["snapshots"], told["snapshots_left_out"]), (2, 4))
        self.assertIn("2 snapshots, 0.50 ms of training lost to each (0.00 s in all); 4 more were due and left out",
                      self.cairn("report", "run").stdout)


if __name__ == "__main__":
    main()
