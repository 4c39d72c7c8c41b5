"""cairn convert: both ways, folder to folder, --check, and what a kill leaves."""
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from program import ProgramTest, main

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")


def golden(name):
    return os.path.join(GOLDEN, name)


def contents(folder):
    out = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with open(path, "rb") as f:
                out[os.path.relpath(path, folder)] = f.read()
    return out


class ConvertTest(ProgramTest):
    def test_an_import_reshards_to_any_number_of_replicas(self):
        self.cairn("import", golden("hf-llama-gqa-sharded"), "one")
        for mesh in ("tp=1,dp=2", "tp=1,dp=3", "tp=2,dp=5", "tp=2,pp=3,dp=2"):
            with self.subTest(mesh=mesh):
                done = self.cairn("ckpt", "reshard", "one", mesh, "--mesh", mesh)
                self.assertIn("batch.samples is", done.stdout + done.stderr)
                self.cairn("ckpt", "diff", "one", mesh, "--tensors-only", "--exit-code")
                self.cairn("ckpt", "reshard", mesh, mesh + "-back", "--mesh", "tp=1")
        self.cairn("import", golden("hf-llama-gqa-sharded"), "six", "--mesh", "dp=6")  # a number that three divides stays
        self.assertNotIn("batch.samples", self.cairn("ckpt", "reshard", "six", "three", "--mesh", "dp=3").stdout)

    def test_directions_follow_from_the_source(self):
        made = self.cairn_json("convert", golden("hf-gpt2-tied"), "run", "--mesh", "tp=2")
        self.assertEqual(made["mesh"], {"tp": 2, "pp": 1, "dp": 1, "ep": 1, "cp": 1})
        out = self.cairn_json("convert", "run", "out", "--max-shard-size", "20KB")
        self.assertGreater(out["shards"], 1)
        self.cairn("import", golden("hf-gpt2-tied"), "run2")
        self.cairn("export", "run2", "out2", "--max-shard-size", "20KB")
        one, two = contents(self.path("out")), contents(self.path("out2"))
        one.pop("README.md"), two.pop("README.md")
        self.assertEqual(one, two)
        again = self.cairn_json("convert", "out", "third", "--to", "hf", "--dtype", "bf16")
        self.assertEqual(again["dtype"], "bf16")

    def test_an_import_takes_each_axis_of_a_mesh_as_a_reshard_does(self):
        made = self.cairn_json("import", golden("hf-deepseek_v2-groups"), "run", "--mesh", "dp=2,ep=2")
        self.assertEqual((made["mesh"]["dp"], made["mesh"]["ep"]), (2, 2))
        self.cairn("export", "run", "out")
        self.assertEqual(contents(self.path("out"))["model.safetensors"],
                         contents(golden("hf-deepseek_v2-groups"))["model.safetensors"])
        for mesh, words in (("ep=2", "does not divide dp = 1"), ("dp=2,ep=2,ep=2", "ep is given twice"),
                            ("xp=2", 'no axis "xp"'), ("tp=65536,pp=65536", "more than 16777216 ranks")):
            for command in (["import", golden("hf-deepseek_v2-groups"), "other"], ["ckpt", "reshard", "run", "other"]):
                self.assertIn(words, self.cairn(*command, "--mesh", mesh, code=2).stderr)

    def test_options_that_do_not_belong_are_refused(self):
        hf = golden("hf-gpt2-tied")
        for words, part in [((hf, "x", "--dtype", "f16"), "--dtype belongs to a conversion into a Hugging Face folder"),
                            ((hf, "x", "--quantize", "fp8"), "--quantize belongs to a conversion into a Hugging Face folder"),
                            ((hf, "x", "--to", "hf", "--mesh", "tp=2"), "--mesh belongs to a conversion into a checkpoint"),
                            ((hf, "x", "--to", "hf", "--hdf5"), "--hdf5 is for a checkpoint's weights"),
                            ((hf,), "where to?"), ((hf, "x", "--check"), "--check writes nothing"),
                            (("nowhere", "x"), "there is no such folder"), ((hf, "x", "--mesh", "tp=0"), "tp=0"),
                            ((hf, "x", "--mesh", "dp=65537"), "no size from 1 to 65536")]:
            done = self.cairn("convert", *words, code=2)
            self.assertIn(part, done.stderr)
        self.assertEqual(os.listdir(self.folder.name), [])

    def test_a_layout_does_not_show_in_a_gguf_file(self):
        for mesh in ("tp=1", "tp=2,pp=2"):
            self.cairn("import", golden("hf-llama-gqa-sharded"), "run-" + mesh, "--mesh", mesh, "--name", "one")
            made = self.cairn_json("export", "run-" + mesh, mesh + ".gguf", "--to", "gguf", "--without-tokenizer",
                                   "--quantize", "q8_0")
            self.assertEqual((made["architecture"], made["type"]), ("llama", "q8_0"))
        one, other = (pathlib.Path(self.path(mesh + ".gguf")).read_bytes() for mesh in ("tp=1", "tp=2,pp=2"))
        self.assertEqual(one[:4], b"GGUF")
        self.assertEqual(one, other)
        there = self.cairn("export", "run-tp=1", "tp=1.gguf", "--to", "gguf", "--without-tokenizer", code=2)
        self.assertIn("--overwrite", there.stderr)
        for words, options in (("q8_0 has", ["--quantize", "fp8"]), ("one of them", ["--quantize", "q8_0", "--dtype", "f16"]),
                               ("--max-shard-size has no meaning", ["--max-shard-size", "1GB"])):
            self.assertIn(words, self.cairn("export", "run-tp=1", "new.gguf", "--to", "gguf", *options, code=2).stderr)
        folder = self.cairn("convert", golden("hf-gpt2-tied"), "new.gguf", "--to", "gguf", code=2)
        self.assertIn("cairn import", folder.stderr)
        self.assertFalse(os.path.exists(self.path("new.gguf")))

    def test_blocks_of_eight_bits_come_in_and_go_out(self):
        source = golden("hf-deepseek_v3-fp8")
        told = self.cairn_json("convert", "--check", source)
        self.assertTrue(told["ok"])
        self.assertEqual({t["dtype"] for t in told["tensors"] if ".q_b." in t["logical"]}, {"F8_E4M3"})
        self.cairn("convert", source, "run", "--mesh", "tp=2,pp=2")
        for words in (("run", "blocks"), (source, "copy", "--to", "hf")):
            done = self.cairn_json("convert", *words, "--quantize", "fp8")
            self.assertEqual((done["quantize"], done["dtype"]), ("fp8", "bf16"))
            self.assertEqual(contents(self.path(words[1]))["model.safetensors"], contents(source)["model.safetensors"])
        self.assertIn("fp8 in blocks, the rest bf16", self.cairn("export", "run", "again", "--quantize", "fp8").stdout)
        self.assertIsNone(self.cairn_json("convert", "run", "plain")["quantize"])
        done = self.cairn("convert", golden("hf-gpt2-tied"), "other", "--to", "hf", "--quantize", "fp8", code=2)
        self.assertIn("models of type gpt2 are not written in blocks of eight bits", done.stderr)

    def test_a_quantisation_that_is_not_read_is_named_by_check_and_conversion(self):
        folder = self.path("awq")
        shutil.copytree(golden("hf-llama-tied-bias"), folder)
        with open(os.path.join(folder, "config.json")) as f:
            config = json.load(f)
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)
        for words in (("--check", folder), (folder, "run"), (folder, "out", "--to", "hf")):
            done = self.cairn("convert", *words, code=2)
            self.assertIn('quant_method "awq" (AWQ, packed integers, 4 bits) cannot be read here; known: fp8', done.stderr)

    def test_check_tells_what_maps_where(self):
        done = self.cairn("convert", "--check", golden("hf-gpt2-tied"))
        self.assertIn("gpt2 (GPT2LMHeadModel)", done.stdout)
        self.assertIn("layers.*.attn.k.weight", done.stdout)
        self.assertIn("it converts", done.stdout)
        told = self.cairn_json("convert", "--check", golden("hf-gpt2-tied"))
        self.assertTrue(told["ok"])
        by_name = {t["logical"]: t for t in told["tensors"]}
        k = by_name["layers.1.attn.k.weight"]
        self.assertEqual((k["stored"], k["file"], k["transform"]),
                         ("transformer.h.1.attn.c_attn.weight", "model.safetensors", "columns 36:72, transposed"))
        self.assertEqual(os.listdir(self.folder.name), [])

    def test_what_a_trainer_saved_from_memory_converts_into_the_published_model(self):
        wanted = contents(golden("hf-mixtral-top2"))["model.safetensors"]
        self.cairn("convert", golden("dist-mixtral"), "direct", "--to", "hf")
        self.assertEqual(contents(self.path("direct"))["model.safetensors"], wanted)
        # Its optimizer's state has names of another form, and is left behind only where a person says so.
        for words in (("--check", golden("dist-mixtral")), (golden("dist-mixtral"), "run", "--mesh", "tp=2,pp=2")):
            self.assertIn("`cairn import --weights-only` takes the weights", self.cairn("convert", *words, code=2).stderr)
        self.assertFalse(os.path.exists(self.path("run")))
        self.cairn("convert", golden("dist-mixtral"), "run", "--mesh", "tp=2,pp=2", "--weights-only")
        self.cairn("convert", "run", "out")
        self.assertEqual(contents(self.path("out"))["model.safetensors"], wanted)

    def test_a_pointer_of_git_lfs_stands_in_the_way_of_check_and_conversion(self):
        folder = self.path("clone")
        shutil.copytree(golden("hf-gpt2-tied"), folder)
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
            f.write("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 7\n")
        for words in (("--check", folder), (folder, "run"), (folder, "out", "--to", "hf")):
            self.assertIn("clone/tokenizer.json: is a pointer of Git LFS", self.cairn("convert", *words, code=2).stderr)
        self.assertEqual(os.listdir(self.folder.name), ["clone"])

    def test_check_lists_what_stands_in_the_way(self):
        folder = self.path("broken")
        shutil.copytree(golden("hf-llama-gqa-sharded"), folder)
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            config = json.load(f)
        config["vocab_size"] += 1
        with open(path, "w") as f:
            json.dump(config, f)
        told = self.cairn_json("convert", "--check", folder, code=2)
        self.assertFalse(told["ok"])
        problem = [p for p in told["problems"] if p["tensor"] == "model.embed_tokens.weight"][0]
        self.assertEqual(problem["kind"], "shape")
        self.assertTrue(problem["file"].startswith("model-0000"))
        self.assertNotEqual(problem["found"], problem["expected"])
        done = self.cairn("convert", "--check", folder, code=2)
        self.assertIn("it does not convert", done.stdout)
        self.assertIn(problem["message"], done.stdout)

    def test_check_of_another_decoder_names_what_it_needs(self):
        os.mkdir(self.path("mamba"))
        with open(self.path("mamba/config.json"), "w") as f:
            json.dump({"model_type": "mamba2", "state_size": 128, "expand": 2}, f)
        needs = "config.json: it needs state-space layers (state_size = 128), which this build does not compute; "
        done = self.cairn("convert", "--check", "mamba", code=2)
        self.assertIn(needs + 'model_type "mamba2" is not known; known: ', done.stderr)
        self.assertIn(needs, self.cairn_json("convert", "--check", "mamba", code=2)["error"]["message"])
        self.assertEqual(os.listdir(self.folder.name), ["mamba"])

    def kill_when(self, command, seen):
        """Starts the program and kills it as soon as `seen()`; whether it was killed before its end."""
        with subprocess.Popen([self.program, *command], cwd=self.folder.name, stdout=subprocess.DEVNULL) as child:
            while child.poll() is None and not seen():
                time.sleep(0.001)
            child.send_signal(signal.SIGKILL)
        return child.returncode == -signal.SIGKILL

    def notes_in(self, prefix):
        """Notes of finished files that are whole: they end with their hash."""
        paths = [os.path.join(root, name) for root, _, names in os.walk(self.folder.name) if prefix in root
                 for name in names if name.endswith(".done")]

        def text(path):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
                return f.read()
            return b""

        return [path for path in paths if re.search(rb"[0-9a-f]{16}$", text(path))]

    def test_a_killed_conversion_goes_on(self):
        folder = self.big_folder("in", layers=6)
        self.cairn("convert", folder, "whole", "--to", "hf", "--dtype", "f32")
        command = ["convert", folder, "out", "--to", "hf", "--dtype", "f32"]
        killed = self.kill_when(command, lambda: len(self.notes_in(".out.converting")) >= 2)
        if killed:  # else it was faster than we could look
            self.assertFalse(os.path.exists(self.path("out")))
        else:
            shutil.rmtree(self.path("out"), ignore_errors=True)
        done = self.cairn_json(*command)
        if killed:
            self.assertGreaterEqual(done["taken_files"], 2)
        out, whole = contents(self.path("out")), contents(self.path("whole"))
        out.pop("README.md"), whole.pop("README.md")
        self.assertEqual(out, whole)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["in", "out", "whole"])

    def test_a_killed_import_leaves_nothing_that_looks_whole(self):
        folder = self.big_folder("in", layers=6)
        self.kill_when(["convert", folder, "run"], lambda: os.path.isdir(self.path("run")) and os.listdir(self.path("run")))
        if not os.path.exists(self.path("run/step-00000000")):
            self.cairn("ckpt", "verify", "run", code=2)
            self.cairn("convert", folder, "run")
        self.assertEqual(os.listdir(self.path("run")), ["step-00000000"])
        self.cairn("ckpt", "verify", "run")
        self.cairn("convert", "run", "out")
        source, out = contents(folder), contents(self.path("out"))
        for name in source:
            if name.endswith(".safetensors"):
                self.assertEqual(out[name], source[name], name)

    def test_no_conversion_takes_a_checkpoint_or_its_own_source_away(self):
        self.cairn("convert", golden("hf-llama-tied-bias"), "run/checkpoints")
        step = self.path("run/checkpoints/step-00000000")
        os.symlink(step, self.path("link"))
        self.cairn("export", step, "dual", "--hdf5")
        shutil.copytree(self.path("dual"), self.path("steps/step-00000000"))
        self.cairn("convert", golden("hf-gpt2-tied"), "other")
        before = {name: contents(self.path(name)) for name in ("run", "dual", "steps", "other")}
        for source, target, words in ((step, step, "the source would be replaced"),
                                      (step, step + "/.", "the source would be replaced"),
                                      (step, "link", "the source would be replaced"), (step, "run", "holds the source"),
                                      (step, step + "/hf", "is inside the source"),
                                      ("dual", "dual", "the source would be replaced"),
                                      ("dual", step, "is a checkpoint"),
                                      ("dual", "other/step-00000000", "is a checkpoint")):
            done = self.cairn("export", source, target, "--overwrite", code=2)
            self.assertIn(words, done.stderr)
        self.assertIn("is a checkpoint", self.cairn("convert", golden("hf-gpt2-tied"), "other/step-00000000", "--to", "hf",
                                                    "--overwrite", code=2).stderr)
        self.assertIn("source would be replaced", self.cairn("import", "steps/step-00000000", "steps", "--overwrite",
                                                             code=2).stderr)
        self.assertIn("is a checkpoint", self.cairn("import", golden("hf-gpt2-tied"), step, code=2).stderr)
        self.assertEqual(before, {name: contents(self.path(name)) for name in before})
        # An exported folder that is a checkpoint too is replaced on request, and what is left is one kind only.
        self.cairn("export", "run", "dual", "--overwrite")
        self.assertNotIn("manifest.json", os.listdir(self.path("dual")))

    def test_a_place_inside_the_source_is_refused_however_both_are_written(self):
        self.cairn("convert", golden("hf-gpt2-tied"), "run/checkpoints")
        step = self.path("run/checkpoints/step-00000000")
        before = contents(step)
        for source, target in ((".", "hf"), (".", "./hf"), (step, "hf"), (".", step + "/hf"), ("../step-00000000", "hf/")):
            done = subprocess.run([self.program, "export", source, target], cwd=step, capture_output=True, text=True,
                                  timeout=60)
            self.assertEqual(done.returncode, 2, (source, target, done.stdout))
            self.assertIn("is inside the source", done.stderr)
            self.assertEqual(contents(step), before)

    def test_no_import_gets_among_a_runs_own_steps_or_into_one(self):
        hf = golden("hf-gpt2-tied")
        self.cairn("import", hf, "run/checkpoints")
        self.cairn("ckpt", "reshard", "run", "own", "--mesh", "tp=2")
        before = contents(self.path("own"))
        for more in ([], ["--overwrite"]):
            said = self.cairn("import", golden("hf-llama-tied-bias"), "own/checkpoints", *more, code=2).stderr
            self.assertIn("has the checkpoints of run ", said)
        for target in ("own", "own/", "run"):  # where no later command looks
            said = self.cairn("import", hf, target, code=2).stderr
            self.assertIn("steps would be looked for in", said)
            self.assertIn("checkpoints, and not there; name that or another folder", said)
            self.assertNotIn("step-00000000", os.listdir(self.path(target)))
        self.write("place/run.json", json.dumps({"id": "run-7", "name": "mine"}))  # a run's second place
        said = self.cairn("import", hf, "place", code=2).stderr
        self.assertIn("place has the checkpoints of run run-7", said)
        self.assertEqual(os.listdir(self.path("place")), ["run.json"])
        step = self.path("own/checkpoints/step-00000000")
        for words in (["import", hf, f"{step}/more"], ["convert", hf, f"{step}/more", "--to", "hf"],
                      ["export", "run", f"{step}/more"]):
            self.assertIn("lies in the folder of a checkpoint", self.cairn(*words, code=2).stderr)
        after = contents(self.path("own"))
        after.pop("run.lock"), before.pop("run.lock")  # who held it last
        self.assertEqual(after, before)

    def test_an_import_respects_a_runs_lock(self):
        checkpoints = self.path("run/checkpoints")
        os.makedirs(checkpoints)
        os.symlink("run/checkpoints", self.path("link"))
        with open(self.write("run/run.lock", "1"), encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for target in ("run/checkpoints", "link"):
                said = self.cairn("import", golden("hf-gpt2-tied"), target, code=73).stderr
                self.assertIn("in use by another cairn", said)
            self.assertEqual(os.listdir(checkpoints), [])
        self.cairn("import", golden("hf-gpt2-tied"), "run/checkpoints")
        self.assertEqual(os.listdir(checkpoints), ["step-00000000"])

    def test_an_export_that_fails_while_it_replaces_keeps_the_new_model(self):
        self.cairn("import", golden("hf-gpt2-tied"), "run")
        self.cairn("export", "run", "whole", "--dtype", "bf16")
        self.cairn("export", "run", "hf")
        os.mkdir(self.path("hf/model-notes.safetensors"))  # of the old model by its name, and no file to be removed
        again = ["export", "run", "hf", "--overwrite", "--dtype", "bf16"]
        said = self.cairn(*again, code=2).stderr
        work = os.path.realpath(self.path(".hf.converting"))
        self.assertIn(f"is replaced in part, the new model is in {work}", said)
        self.assertIn("run the same command again to finish", said)
        whole, kept = contents(self.path("whole")), contents(self.path("hf")) | contents(work)
        self.assertEqual(kept["model.safetensors"], whole["model.safetensors"])
        os.rmdir(self.path("hf/model-notes.safetensors"))
        self.cairn(*again)
        out = contents(self.path("hf"))
        out.pop("README.md"), whole.pop("README.md")
        self.assertEqual(out, whole)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["hf", "run", "whole"])

    def test_an_export_into_a_mounted_folder_or_through_a_link_replaces_the_old_model(self):
        self.cairn("import", golden("hf-gpt2-tied"), "run")
        self.cairn("export", "run", "old")
        self.cairn("export", "run", "whole", "--dtype", "bf16")
        script = """set -e
          mkdir volume; mount -t tmpfs -o size=8m tmpfs volume
          mkdir volume/empty volume/old; cp old/* volume/old; ln -s volume/old link; ln -s volume/empty new
          "$1" export run link --overwrite --dtype bf16; cp -r link/. out-link
          "$1" export run new --dtype bf16; cp -r new/. out-new
          rm -r volume/*
          "$1" export run volume --dtype bf16; cp -r volume/. out-volume
          rm volume/*; cp old/* volume
          "$1" export run volume --overwrite --dtype bf16; cp -r volume/. out-again"""
        unshare = ["unshare", "--user", "--map-root-user", "--mount"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            self.skipTest("no mount namespaces")
        done = subprocess.run([*unshare, "sh", "-c", script, "sh", self.program], cwd=self.folder.name,
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for name in ("out-link", "out-new", "out-volume", "out-again"):
            out, whole = contents(self.path(name)), contents(self.path("whole"))
            out.pop("README.md"), whole.pop("README.md")
            self.assertEqual(out, whole, name)
            self.assertEqual(sorted(os.listdir(self.path(name))), sorted(os.listdir(self.path("whole"))))
        os.symlink("nowhere", self.path("dangling"))
        self.assertIn("is a link to nothing", self.cairn("export", "run", "dangling", code=2).stderr)

    def test_memory_is_bounded(self):
        """More than the limit in weights passes through each direction."""
        if "SANITIZE" in os.environ.get("CAIRN_TEST_FLAGS", ""):
            self.skipTest("sanitizers take memory of their own")
        folder = self.big_folder("in", layers=6, width=1536)  # 360 MiB in bf16 = 720 MiB in float32, too slow for more
        limit = 256 << 20
        for command in (["convert", folder, "run"], ["convert", "run", "out", "--dtype", "f32"],
                        ["convert", folder, "out2", "--to", "hf", "--dtype", "f32"]):
            child = subprocess.Popen([self.program, *command], cwd=self.folder.name, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(child.returncode, 0, command)
            self.assertLess(usage.ru_maxrss * 1024, limit, command)


if __name__ == "__main__":
    main()
