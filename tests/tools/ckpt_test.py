"""ckpt ls, inspect, verify, reshard."""

import json
import os
import re
import shutil
import socket
import struct
import subprocess

from program import ProgramTest, main

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden", "checkpoint-v1", "step-00000012")


class CkptTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.step = self.path("run/checkpoints/step-00000012")
        shutil.copytree(GOLDEN, self.step)
        for name in os.listdir(self.step):
            os.chmod(os.path.join(self.step, name), 0o644)

    def damage(self, name, offset):
        with open(os.path.join(self.step, name), "r+b") as f:
            f.seek(offset)
            byte = f.read(1)
            f.seek(offset)
            f.write(bytes([byte[0] ^ 1]))

    def test_ls_tells_what_is_complete_and_what_is_left_over(self):
        os.makedirs(self.path("run/checkpoints/step-00000020"))
        os.makedirs(self.path("run/checkpoints/.tmp-step-00000021.host.1.2.3"))
        self.write("run/checkpoints/notes.txt", "mine")
        listed = self.cairn_json("ckpt", "ls", "run")
        self.assertEqual([(c["step"], c["complete"]) for c in listed["checkpoints"]], [(12, True), (20, False)])
        self.assertIn("manifest.json", listed["checkpoints"][1]["problem"])
        self.assertEqual(listed["newest_complete"], 12)
        self.assertEqual([x["name"] for x in listed["leftovers"]], [".tmp-step-00000021.host.1.2.3"])
        self.assertEqual(listed["unknown"], ["notes.txt"])
        text = self.cairn("ckpt", "ls", "run/checkpoints").stdout
        for words in ("complete, the newest", "damaged", "left over", "notes.txt", "days"):
            self.assertIn(words, text)
        self.assertIn("nowhere", self.cairn("ckpt", "ls", "nowhere", code=2).stderr)
        os.makedirs(self.path("empty"))
        self.assertEqual(self.cairn_json("ckpt", "ls", "empty")["checkpoints"], [])

    def test_one_checkpoint_or_a_link_to_nothing_is_no_folder_of_steps(self):
        os.symlink(self.step, self.path("one"))
        os.makedirs(self.path("run/checkpoints/step-00000020"))  # damaged: its name tells
        os.makedirs(self.path("away"))
        os.symlink("../disk", self.path("away/checkpoints"))
        os.symlink("disk", self.path("dangling"))
        commands = (["ls"], ["verify", "--all"], ["prune", "--keep", "last(1)", "--yes"],
                    ["prune", "--leftovers", "--yes"])
        around = "a run folder or a folder of step-NNNNNNNN, such as run/checkpoints"
        for path, words in (("run/checkpoints/step-00000012", around), ("run/checkpoints/step-00000012/", around),
                            ("run/checkpoints/step-00000020", around), ("one", "one: is one checkpoint, expected "),
                            ("away", "away/checkpoints: is a link to nothing; mount or make what it names"),
                            ("dangling", "dangling: is a link to nothing"), ("dangling/", "dangling: is a link to nothing")):
            for command, *more in commands:
                self.assertIn(words, self.cairn("ckpt", command, path, *more, code=2).stderr)
        inside = subprocess.run([self.program, "ckpt", "ls", "."], cwd=self.step, capture_output=True, text=True)
        self.assertEqual(inside.returncode, 2)
        self.assertIn("step-NNNNNNNN, such as ..;", inside.stderr)
        self.cairn("ckpt", "verify", "run/checkpoints/step-00000012")  # without --all it is what is meant
        os.symlink(self.path("run/checkpoints"), self.path("steps"))
        self.assertEqual(len(self.cairn_json("ckpt", "ls", "steps")["checkpoints"]), 2)

    def test_inspect_says_what_the_manifest_holds(self):
        with open(os.path.join(self.step, "manifest.json"), encoding="utf-8") as f:
            stored = json.loads(f.read().split("\n")[1])
        for path in ("run", "run/checkpoints", self.step):
            seen = self.cairn_json("ckpt", "inspect", path, "--tensors")
            self.assertEqual(seen["step"], 12)
            self.assertEqual(seen["samples"], stored["samples"])
            self.assertEqual(seen["run"]["parents"], ["run-0"])
            self.assertEqual(seen["mesh"]["tp"], 2)
            self.assertEqual(len(seen["tensors"]), len(stored["tensors"]))
            self.assertEqual(sum(t["bytes"] for t in seen["tensors"]), seen["payload_bytes"])
            self.assertEqual(sum(f["size_bytes"] for f in seen["files"]), seen["file_bytes"])
        self.assertNotIn("tensors", self.cairn_json("ckpt", "inspect", "run"))
        text = self.cairn("ckpt", "inspect", "run", "--tensors").stdout
        for words in ("96 samples", "run-0", "embed.weight", "[37, 24]", "tp 2 x pp 1 x dp 1"):
            self.assertIn(words, text)

    def test_verify_names_every_damaged_chunk(self):
        whole = self.cairn_json("ckpt", "verify", "run")
        self.assertTrue(whole["whole"])
        self.assertGreater(whole["chunks"], 10)
        with open(os.path.join(self.step, "manifest.json"), encoding="utf-8") as f:
            stored = json.loads(f.read().split("\n")[1])
        with open(os.path.join(self.step, "shards.bin"), "rb") as f:
            table = f.read()
        hit = set()
        for index in (0, stored["shards"]["count"] - 1):
            tensor, file, offset = struct.unpack_from("<IIQ", table, 64 + 32 * index)
            self.damage(stored["files"][file]["name"], offset)
            hit.add(stored["tensors"][tensor]["name"])
        report = self.cairn_json("ckpt", "verify", self.step, code=65)
        self.assertFalse(report["whole"])
        for name in hit:
            self.assertTrue(any(name in d["message"] and "chunk 0" in d["message"] for d in report["damages"]), name)
        done = self.cairn("ckpt", "verify", "run", code=65)
        self.assertIn("damaged in 2 places", done.stdout)
        self.assertNotIn("\r", done.stderr)
        # The newest step is what a person asks about, also when it cannot be read at all.
        os.makedirs(self.path("run/checkpoints/step-00000020"))
        self.assertIn("manifest.json", self.cairn("ckpt", "verify", "run", code=65).stdout)

    def test_a_newer_builds_checkpoint_is_refused_and_not_called_damaged(self):
        manifest = os.path.join(self.step, "manifest.json")
        older = self.path("run/checkpoints/step-00000011")
        shutil.copytree(self.step, older)  # by its name it is damaged: it says that it is step 12
        with open(manifest, "r+b") as f:
            f.seek(39)
            f.write(b"2")
        words = "format version 2, this build reads 1 to 1; read it with a newer build"
        for command in (["verify", "run"], ["verify", self.step], ["inspect", self.step], ["push", self.step, "place"],
                        ["diff", self.step, older], ["cat", self.step, "x", "--out", "y"]):
            done = self.cairn("ckpt", *command, code=2)
            self.assertIn(words, done.stderr)
            self.assertNotIn("damaged", done.stdout + done.stderr)
        self.assertIn("not read: ", self.cairn("ckpt", "ls", "run").stdout)
        self.cairn("ckpt", "prune", "run", "--keep", "last(1)", "--yes")
        self.assertTrue(os.path.exists(manifest))
        # Others are looked at as well, and damage comes first.
        several = self.cairn_json("ckpt", "verify", "run", "--all", code=65)
        self.assertEqual([c["whole"] for c in several["checkpoints"]], [False, None])
        self.assertIn(words, several["checkpoints"][1]["problem"])
        shutil.rmtree(older)
        shutil.copytree(GOLDEN, self.path("run2/checkpoints/step-00000012"))
        done = self.cairn("ckpt", "verify", "run", "run2", code=2)
        self.assertIn("not read: ", done.stdout)
        self.assertIn("run2/checkpoints/step-00000012: whole", done.stdout)
        several = self.cairn_json("ckpt", "verify", "run", "run2", code=2)  # one object
        self.assertEqual((several["whole"], [c["whole"] for c in several["checkpoints"]]), (False, [None, True]))

    def test_a_replacement_that_was_cut_off_between_two_renames_is_told_and_ended(self):
        dead = subprocess.Popen(["true"])
        dead.wait()
        writer = f"step-00000012.{re.sub('[^A-Za-z0-9]', '-', socket.gethostname())[:64]}.{dead.pid}.1.0"
        checkpoints = os.path.dirname(self.step)
        shutil.copytree(self.step, self.path("run/checkpoints/step-00000011"))  # damaged by its name
        shutil.copytree(self.step, f"{checkpoints}/.trash-{writer}")
        os.rename(self.step, f"{checkpoints}/.tmp-{writer}")
        listed = self.cairn_json("ckpt", "ls", "run")
        self.assertEqual([(c["step"], c.get("unread")) for c in listed["checkpoints"]], [(11, False), (12, True)])
        for command in (["inspect", "run"], ["verify", "run"], ["cat", "run", "embed.weight", "--out", "x"]):
            done = self.cairn("ckpt", *command, code=69)
            self.assertIn("is taking the place of another save of this step", done.stdout + done.stderr)
        done = self.cairn("ckpt", "prune", "run", "--leftovers", "--yes")
        self.assertIn("put step-00000012 in its place", done.stdout)
        self.assertTrue(self.cairn_json("ckpt", "verify", self.step)["whole"])
        self.assertEqual(sorted(os.listdir(checkpoints)), ["step-00000011", "step-00000012"])

    def test_control_characters_in_a_manifest_do_nothing_to_a_terminal(self):
        try:
            import xxhash
        except ImportError:
            self.skipTest("no xxhash")
        path = os.path.join(self.step, "manifest.json")
        with open(path, encoding="utf-8") as f:
            manifest = json.loads(f.read().split("\n", 1)[1])
        evil = "\x1b]0;owned\x07\x9b2J\ré"
        manifest["origin"] = manifest["run"]["name"] = manifest["writer"]["host"] = evil
        body = (json.dumps(manifest, separators=(",", ":"), sort_keys=True, ensure_ascii=False) + "\n").encode()
        head = {"format": "cairn-checkpoint", "version": 1, "body_bytes": len(body),
                "body_xxh3_64": f"{xxhash.xxh3_64_intdigest(body):016x}"}
        with open(path, "wb") as f:
            f.write((json.dumps(head, separators=(",", ":")) + "\n").encode() + body)
        torn = b'{"a": "ab\xc2\x9b\x7f\xff"}\n'
        head.update(body_bytes=len(torn), body_xxh3_64=f"{xxhash.xxh3_64_intdigest(torn):016x}")
        self.write("torn/manifest.json", (json.dumps(head, separators=(",", ":")) + "\n").encode() + torn)
        self.write("torn/shards.bin", b"")
        told = subprocess.run([self.program, "ckpt", "inspect", "torn"], cwd=self.folder.name, capture_output=True)
        self.assertEqual(told.returncode, 65)
        self.assertIn(rb"\xff", told.stderr)
        self.assertFalse([byte for byte in told.stderr if byte != 10 and not 32 <= byte < 127], told.stderr)
        os.makedirs(self.path("run/checkpoints/no\x1b[2Jstep"))
        self.assertEqual(self.cairn_json("ckpt", "inspect", "run")["origin"], evil)
        for command in (["inspect", "run", "--tensors"], ["ls", "run"], ["inspect", "\x1b[2J"]):
            done = self.cairn("ckpt", *command, code=2 if command[-1] == "\x1b[2J" else 0)
            told = done.stdout + done.stderr
            self.assertIn("\\x1b", told)
            self.assertFalse(set(told) & set("\x1b\x07\x9b\r"), told)

    def test_a_path_that_the_system_refuses_is_told_with_its_reason(self):
        os.symlink("loop", self.path("loop"))
        refused = {"loop": "Too many levels", "loop/run": "Too many levels", "x" * 300: "name too long"}
        if os.getuid() != 0:
            os.makedirs(self.path("locked/run"))
            os.chmod(self.path("locked"), 0)
            self.addCleanup(os.chmod, self.path("locked"), 0o700)
            refused["locked/run"] = "Permission denied"
        for path, words in refused.items():
            for command in (["ckpt", "inspect", path], ["ckpt", "cat", path, "t", "--out", "o"], ["ckpt", "ls", path],
                            ["ckpt", "verify", path], ["ckpt", "verify", path, "--all"], ["ckpt", "diff", path, "run"],
                            ["ckpt", "reshard", path, "o", "--mesh", "tp=1"], ["ckpt", "push", path, self.path("o")],
                            ["ckpt", "prune", path, "--keep", "last(1)"], ["export", path, "o"], ["convert", path, "o"],
                            ["resume", path, "--dry-run"]):
                done = self.cairn(*command, code=2 if words == "Permission denied" else 74)
                self.assertIn(words, done.stderr)
                self.assertIn(path, done.stderr)
                self.assertNotIn("internal", done.stderr)

    def test_reshard_refuses_in_words_and_writes_nothing(self):
        for mesh, words in (("tp=2,tp=2", "twice"), ("tp", "no axis=size"), ("xp=2", "no axis"), ("tp=0", "no size"),
                            ("tp=2,", "comma"), ("dp=99999999999999999999", "no size"), ("", "without a value")):
            self.assertIn(words, self.cairn("ckpt", "reshard", "run", "dst", "--mesh", mesh, code=2).stderr)
        # The fixture's recipe is no recipe: told with the field and the checkpoint.
        done = self.cairn("ckpt", "reshard", "run", "dst", "--mesh", "tp=1", code=2)
        self.assertIn("name is missing", done.stderr)
        self.assertIn("step-00000012", done.stderr)
        self.assertFalse(os.path.exists(self.path("dst")))
        self.assertIn("--zero", self.cairn("ckpt", "reshard", "run", "dst", "--mesh", "tp=1", "--zero", "4",
                                           code=2).stderr)

    def test_a_run_goes_on_in_another_layout_and_back(self):
        self.write("t.txt", "the quick brown fox jumps over the lazy dog. " * 500)
        self.cairn("data", "tokenize", "t.txt", "--out", "t")
        self.write("r.lua", """local T = require "cairn"
return T.recipe { name = "small", seed = 7, stop = T.steps(6),
  model = T.gpt { layers = 2, width = 32, heads = 4, context = 16, vocab = 257 },
  tokenizer = T.bytes, data = T.megatron { prefix = "t", split = { 90, 10 } },
  batch = { samples = 8, micro = 2 }, optimizer = T.adamw { peak_lr = 1e-3 },
  mesh = { tp = 2, sequence_parallel = true } }
""")
        self.cairn("train", "r.lua", "--run", "a", "--nproc", "2")
        first = self.cairn_json("ckpt", "reshard", "a", "b", "--mesh", "pp=2,dp=2", "--zero", "1")
        self.assertEqual((first["step"], first["to"]["pp"], first["to"]["dp"], first["to"]["zero"]), (6, 2, 2, 1))
        self.assertTrue(any("sequence_parallel" in note for note in first["notes"]))
        self.assertTrue(self.cairn_json("ckpt", "verify", "b")["whole"])
        seen = self.cairn_json("ckpt", "inspect", "b")
        self.assertEqual(seen["run"]["parents"], first["parents"])
        self.assertEqual(seen["state"], self.cairn_json("ckpt", "inspect", "a")["state"])
        self.assertIn("4 ranks", self.cairn("resume", "b", "--dry-run").stdout)
        back = self.cairn_json("ckpt", "reshard", "b", "c", "--mesh", "tp=2", "--memory", "16MiB", "--zero", "0")
        self.assertEqual(len(back["parents"]), 2)
        for name in os.listdir(first["source"] if os.path.isabs(first["source"]) else self.path(first["source"])):
            if name.endswith(".h5"):  # the same layout again: the same bytes, but for the size of the hashed chunks
                before, after = (self.path(f"{run}/checkpoints/step-00000006/{name}") for run in "ac")
                self.assertEqual(os.path.getsize(before), os.path.getsize(after))
        self.assertIn("is there already", self.cairn("ckpt", "reshard", "a", "b", "--mesh", "pp=2,dp=2", "--zero", "1",
                                                     code=2).stderr)
        self.assertIn("another recipe", self.cairn("ckpt", "reshard", "a", "b", "--mesh", "pp=2", code=2).stderr)
        self.cairn("ckpt", "reshard", "a", "b", "--mesh", "pp=2", "--overwrite")
        self.assertIn("does not divide", self.cairn("ckpt", "reshard", "a", "d", "--mesh", "tp=3", code=2).stderr)
        self.assertIn("belongs to", self.cairn("ckpt", "reshard", "a", "a", "--mesh", "tp=1", code=2).stderr)
        self.assertIn("at least", self.cairn("ckpt", "reshard", "a", "d", "--mesh", "tp=1", "--memory", "1MiB",
                                             code=2).stderr)


if __name__ == "__main__":
    main()
