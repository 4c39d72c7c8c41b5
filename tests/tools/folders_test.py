"""Folders of other programs, adapters, heads that score, and indexes of other writers: what each command says of them."""
import json
import os
import shutil
import struct

from program import ProgramTest, main

WIDTH, VOCAB, FFN = 16, 64, 24


def shapes(layers):
    out = {"model.embed_tokens.weight": [VOCAB, WIDTH], "model.norm.weight": [WIDTH], "lm_head.weight": [VOCAB, WIDTH]}
    for k in range(layers):
        layer = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH], "mlp.gate_proj": [FFN, WIDTH],
                 "mlp.up_proj": [FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]}
        layer.update({f"self_attn.{p}_proj": [WIDTH, WIDTH] for p in "qkvo"})
        out.update({f"model.layers.{k}.{name}.weight": shape for name, shape in layer.items()})
    return out


def safetensors(tensors):
    header, data = {}, b""
    for name, shape in sorted(tensors.items()):
        count = 1
        for extent in shape:
            count *= extent
        raw = struct.pack(f"<{count}f", *[((k * 7 + len(name.removeprefix("pretrained_model."))) % 11 - 5) / 16 for k in range(count)])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class FoldersTest(ProgramTest):
    def model(self, folder, tensors=None, layers=2, file="model.safetensors", **config):
        """A Llama of `layers` in config.json, with these tensors, else its own."""
        said = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH,
                "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": 2,
                "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False, **config}
        self.write(f"{folder}/config.json", json.dumps(said))
        if file:
            self.write(f"{folder}/{file}", safetensors(shapes(layers) if tensors is None else tensors))
        return folder

    def read(self, name):
        with open(self.path(name), "rb") as f:
            return f.read()

    def refused(self, *args):
        done = self.cairn(*args, code=2)
        return done.stdout + done.stderr

    def readers(self, folder):
        """Each command that reads a model, on this folder."""
        self.write("tokens.bin", struct.pack("<40H", *range(40)))
        self.write("start.lua", f"""local T = require "cairn"
return T.recipe {{ name = "a", stop = T.steps(1), data = T.token_files {{ train = "tokens.bin", dtype = "uint16" }},
  model = T.llama {{ layers = 2, width = 16, heads = 2, context = 8, vocab = 64 }}, batch = {{ samples = 1, micro = 1 }},
  optimizer = T.adamw {{ peak_lr = 1e-3 }}, init = T.hf "{folder}" }}""")
        return [("convert", "--check", folder), ("convert", folder, "out"), ("convert", folder, "out", "--to", "hf"),
                ("import", folder, "out"), ("eval", "--from", folder, "--data", "tokens.bin", "--dtype", "uint16"),
                ("generate", "--from", folder, "--prompt", "a", "--tokenizer", "bytes"), ("init", "new", "--from", folder),
                ("train", "start.lua", "--nproc", "1", "--run", "run"), ("export", folder, "out")]

    def every_reader_says(self, folder, *words):
        for command in self.readers(folder):
            if command[0] == "export" and os.path.exists(self.path(f"{folder}/config.json")):
                continue  # a model's folder is no checkpoint, and that is said
            with self.subTest(command=" ".join(command[:2])):
                said = self.refused(*command)
                for word in words:
                    self.assertIn(word, said)
        for made in ("out", "new", "run"):
            self.assertFalse(os.path.exists(self.path(made)), made)

    def test_an_adapter_is_refused_by_every_reader(self):
        self.model("beside")
        self.write("beside/adapter_config.json", json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
        self.every_reader_says("beside", "adapter_config.json: is a PEFT adapter of type LORA for org/base", "merge")
        self.write("by-itself/adapter_config.json", json.dumps({"peft_type": "LORA"}))
        self.write("by-itself/adapter_model.safetensors", safetensors({"base_model.model.x.lora_A.weight": [2, 2]}))
        self.every_reader_says("by-itself", "is a PEFT adapter", "merge")
        self.model("weights")  # its configuration was lost
        self.write("weights/adapter_model.bin", b"")
        self.assertIn("is a PEFT adapter", self.refused("convert", "--check", "weights"))

    def test_an_unmerged_adapter_among_the_tensors_is_named(self):
        tensors = shapes(2)
        name = "model.layers.0.self_attn.q_proj"
        tensors[f"{name}.base_layer.weight"] = tensors.pop(f"{name}.weight")
        tensors.update({f"{name}.lora_A.default.weight": [2, WIDTH], f"{name}.lora_B.default.weight": [WIDTH, 2]})
        said = self.refused("convert", "--check", self.model("unmerged", tensors))
        self.assertIn("adapter that was saved unmerged", said)
        self.assertIn("merge_and_unload", said)

    def test_folders_of_other_programs_are_named_with_the_way_on(self):
        kinds = {
            "hub/models--org--tiny": (["refs/main", "snapshots/0abc/config.json"], ["snapshots/0abc"]),
            "hub": ([], ["snapshots/0abc"]),
            "cut": (["config.json", "model.safetensors.incomplete"], ["cut off", "download it again"]),
            "cut-local": ([".cache/huggingface/download/x.incomplete"], ["cut off"]),
            "zero": (["global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"], ["DeepSpeed", "zero_to_fp32"]),
            "zero-inside": (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], ["DeepSpeed"]),
            "zero-0": (["mp_rank_00_model_states.pt"], ["DeepSpeed"]),
            "fp32": (["pytorch_model.bin/pytorch_model-00001-of-00001.bin", "config.json"],
                     ["pytorch_model.bin is a folder, as zero_to_fp32"]),
            "gguf": (["model-q4.gguf"], ["GGUF", "model-q4.gguf"]),
            "verl": (["model_world_size_2_rank_0.pt", "huggingface/config.json"], ["verl", "model_merger"]),
            "meta": (["consolidated.00.pth", "params.json"], ["Meta", "convert_llama_weights_to_hf"]),
            "mistral": (["consolidated.safetensors", "params.json"], ["Mistral"]),
            "mlx": (["weights.npz", "config.json"], ["MLX"]),
            "dcp": ([".metadata", "__0_0.distcp"], ["torch.distributed.checkpoint", "torchtitan"]),
            "megatron": (["latest_checkpointed_iteration.txt"], ["Megatron-LM", "megatron_gpt"]),
            "megatron-old": (["mp_rank_00/model_optim_rng.pt"], ["Megatron-LM"]),
            "torch-dist": (["iter_0000010/common.pt"], ["Megatron-LM"]),
            "nanotron": (["checkpoint_metadata.json", "model/x.safetensors"], ["Nanotron"]),
            "orbax": (["_CHECKPOINT_METADATA"], ["Orbax"]),
            "lightning": (["last.ckpt"], ["Lightning"]),
            "litgpt": (["lit_model.pth", "model_config.yaml"], ["LitGPT", "convert_from_litgpt"]),
            "openvino": (["openvino_model.xml", "openvino_model.bin"], ["OpenVINO"]),
            "engine": (["rank0.engine"], ["TensorRT-LLM"]),
            "trt": (["rank0.safetensors"], ["TensorRT-LLM"]),
            "ct2": (["model.bin", "shared_vocabulary.json"], ["CTranslate2"]),
            "torch": (["step.pt"], ["file of torch, step.pt", "pytorch_model.bin"]),
            "torch-pth": (["m.pth", "config.json"], ["file of torch, m.pth"]),
            "variant": (["model.fp16.safetensors"], ["another name: model.fp16.safetensors"]),
            "trainer": (["checkpoint-5/config.json"], ["trainer/checkpoint-5"]),
        }
        for folder, (files, words) in kinds.items():
            for file in files:
                if file == "refs/main":
                    self.write(f"{folder}/{file}", "0abc")
                elif file == "config.json":
                    self.model(folder, file=None)
                else:
                    self.write(f"{folder}/{file}", b"\0" * 8)
        os.makedirs(self.path("dangling"))
        self.model("dangling", file=None)
        os.symlink("../../blobs/none", self.path("dangling/model.safetensors"))
        kinds["dangling"] = ([], ["cut off: model.safetensors"])
        for folder, (_, words) in kinds.items():
            with self.subTest(folder=folder):
                said = self.refused("convert", "--check", folder)
                for word in words:
                    self.assertIn(word, said)
        self.every_reader_says("gguf", "GGUF")
        self.every_reader_says("hub/models--org--tiny", "snapshots/0abc")

    def test_paths_that_are_no_folder_are_named_too(self):
        self.write("a.bin", b"GGUF\3\0\0\0" + bytes(64))
        self.assertIn("is GGUF", self.refused("import", "a.bin", "out"))
        self.write("m/model.safetensors", b"")
        self.assertIn("give the folder", self.refused("convert", "--check", "m/model.safetensors"))
        said = self.refused("generate", "--from", "org/name", "--prompt", "a")
        self.assertIn("hf download org/name", said)

    def test_quantised_weights_of_other_programs_are_named(self):
        self.model("modelopt")
        self.write("modelopt/hf_quant_config.json", json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        self.assertIn("ModelOpt (NVFP4)", self.refused("convert", "--check", "modelopt"))
        self.write("modelopt/hf_quant_config.json", json.dumps({"quantization": {"quant_algo": None}}))
        self.cairn("convert", "--check", "modelopt")
        self.assertIn("MLX", self.refused("convert", "--check", self.model("mlx", quantization={"group_size": 64, "bits": 4})))

    def test_a_trainers_state_beside_weights_does_not_hide_them(self):
        self.model("trainer")
        self.write("trainer/latest", "global_step5")  # the folder of that name was removed to save room
        self.cairn("convert", "--check", "trainer")

    def test_tokenizers_of_other_programs_are_named(self):
        self.write("text.txt", "a b")
        self.write("tiktoken/tokenizer.model", "IQ== 0\nIg== 1\nIw== 2\n")
        self.write("slow/vocab.json", "{}")
        self.write("slow/merges.txt", "")
        self.write("bert/vocab.txt", "")
        self.write("t5/spiece.model", b"")
        self.write("hub/models--x--y/snapshots/0abc/tokenizer.json", "{}")
        for name, word in (("hub/models--x--y", "hub/models--x--y/snapshots/0abc"), ("hub", "models--x--y/snapshots/0abc"),
                           ("tiktoken", "tiktoken"), ("tiktoken/tokenizer.model", "tiktoken"), ("slow", "merges.txt"),
                           ("bert", "WordPiece"), ("t5", "give the file: t5/spiece.model")):
            for command in (("data", "tokenize", "text.txt", "--out", "set"), ("data", "encode", "a"),
                            ("generate", "--from", self.model("m"), "--prompt", "a")):
                with self.subTest(name=name, command=command[0]):
                    self.assertIn(word, self.refused(*command, "--tokenizer", name))

    def test_a_value_head_beside_the_model_is_left_out(self):
        self.model("plain")
        for prefix in ("", "pretrained_model."):
            for head in ("v_head.summary", "score", "value_head"):
                with self.subTest(head=head, prefix=prefix):
                    tensors = {prefix + name: shape for name, shape in shapes(2).items()}
                    tensors.update({f"{head}.weight": [1, WIDTH]})
                    self.model("ppo", tensors)
                    checked = self.cairn_json("convert", "--check", "ppo")
                    self.assertEqual(checked["ignored"], [f"{head}.weight"])
                    self.assertIn(f"{head}.weight: a value head", " ".join(checked["warnings"]))
                    shutil.rmtree(self.path("out"), ignore_errors=True)
                    self.cairn("convert", "ppo", "out", "--to", "hf")
                    self.assertEqual(self.read("out/model.safetensors")[-4096:], self.read("plain/model.safetensors")[-4096:])

    def test_a_reward_model_is_refused_by_name(self):
        tensors = shapes(2)
        del tensors["lm_head.weight"]
        tensors["score.weight"] = [1, WIDTH]
        said = self.refused("convert", "--check", self.model("reward", tensors))
        self.assertIn("reward model", said)
        self.assertIn("score.weight [1, 16]", said)
        self.assertNotIn("prefix", said)
        tied = self.model("tied", tensors, tie_word_embeddings=True, architectures=["LlamaForSequenceClassification"])
        self.assertIn("LlamaForSequenceClassification", self.refused("convert", "--check", tied))

    def test_another_number_of_layers_is_said_once(self):
        for said, held in ((1, 2), (3, 2)):
            with self.subTest(said=said, held=held):
                out = self.refused("convert", "--check", self.model("cut", shapes(held), layers=said))
                self.assertIn(f"config.json says {said} layers, the files have {held}", out)
                self.assertNotIn("unexpected", out)
                self.assertNotIn(": missing", out)

    def test_a_prefix_is_advised_only_where_it_is_one(self):
        tensors = {f"policy.{name}": shape for name, shape in shapes(2).items()}
        said = self.refused("convert", "--check", self.model("policy", tensors))
        self.assertIn("have \"policy.\" before them", said)
        self.assertNotIn("unexpected", said)
        tensors = shapes(2)
        del tensors["model.norm.weight"]
        tensors.update({"extra.one.weight": [4], "extra.two.weight": [4]})
        said = self.refused("convert", "--check", self.model("extra", tensors))
        self.assertIn("extra.one.weight: unexpected", said)
        self.assertNotIn("take it off", said)

    def test_an_index_may_name_files_below_and_leave_tensors_out(self):
        whole = shapes(2)
        self.model("plain")
        names = sorted(whole)
        parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
        for folder, place in (("dot", "./"), ("below", "shards/"), ("both", "./shards/../shards/")):
            self.model(folder, file=None)
            for file, part in parts.items():
                extra = {"other.model.weight": [3]} if file.startswith("a") else {}
                at = "shards/" if "shards" in place else ""
                self.write(f"{folder}/{at}{file}", safetensors({**{name: whole[name] for name in part}, **extra}))
            weight_map = {name: place + file for file, part in parts.items() for name in part}
            self.write(f"{folder}/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
            with self.subTest(folder=folder):
                checked = self.cairn_json("convert", "--check", folder)
                self.assertTrue(checked["ok"])
                self.assertIn("does not list other.model.weight", " ".join(checked["warnings"]))
                self.cairn("import", folder, f"{folder}.run")
                self.cairn("export", f"{folder}.run", f"{folder}.out")
                self.cairn("convert", folder, f"{folder}.hf", "--to", "hf", "--max-shard-size", "5GB")
                for made in ("out", "hf"):
                    self.assertIn(self.read("plain/model.safetensors")[-2000:], self.read(f"{folder}.{made}/model.safetensors")
                                  if os.path.exists(self.path(f"{folder}.{made}/model.safetensors")) else b"")
        for bad in ("../out.safetensors", "/etc/a.safetensors", "x/../../a.safetensors", "shards/"):
            weight_map = {name: bad for name in names}
            self.write("dot/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
            with self.subTest(bad=bad):
                self.assertIn("in this folder or below it", self.cairn("convert", "--check", "dot", code=65).stderr)

    def test_an_index_may_have_numbers_of_python_and_a_configuration_of_another_kind_is_named(self):
        self.model("sharded", file="part.safetensors")
        self.write("sharded/model.safetensors.index.json", json.dumps(
            {"metadata": {"loss": float("nan")}, "weight_map": {name: "part.safetensors" for name in shapes(2)}}))
        self.cairn("import", "sharded", "out")
        self.cairn("export", "out", "back")
        config = self.read("sharded/config.json")
        for content, word in ((config.decode().encode("utf-16"), "is UTF-16"), (b"<html></html>", "is a page of HTML")):
            self.write("sharded/config.json", content)
            self.assertIn(f"config.json: the config is not JSON: it {word}", self.cairn("import", "sharded", "no", code=65).stderr)

    def test_a_tensor_of_the_model_that_the_index_does_not_list_is_missing_by_name(self):
        whole = shapes(2)
        self.model("m", file="a.safetensors")
        weight_map = {name: "a.safetensors" for name in whole if name != "model.norm.weight"}
        self.write("m/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
        said = self.refused("convert", "--check", "m")
        self.assertIn("model.norm.weight: missing, for the index does not list it in a.safetensors", said)


if __name__ == "__main__":
    main()
