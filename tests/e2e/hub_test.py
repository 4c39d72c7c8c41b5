"""Runs that begin with a model of a Hub: of the tests' own server, and of `cairn serve`."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
from harness import RunTest, main
from hf_start_test import RECIPE
from hub_server import COMMIT, HubServer
from serve_test import Served

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/hf-llama-gqa-sharded"


class HubStart(RunTest):
    def setUp(self):
        super().setUp()
        self.hub = HubServer({path.name: path.read_bytes() for path in GOLDEN.iterdir()
                              if path.name != "reference.safetensors"})
        self.addCleanup(self.hub.close)
        os.environ.update(HF_ENDPOINT=self.hub.url, HF_HUB_CACHE=str(self.folder / "hub"), HF_HUB_DOWNLOAD_TIMEOUT="2",
                          no_proxy="*")

    def tuned(self, init, name="first"):
        path = self.folder / f"{name}.lua"
        path.write_text(RECIPE.format(name=name, init=init, tp=2, pp=1, dp=1, theta=370.0, context=32))
        return path

    def weights(self, run):
        manifest = self.manifest(run, 4)
        return [(self.checkpoint(run, 4) / file["name"]).read_bytes() for file in manifest["files"]]

    def blobs(self):
        return list((self.folder / "hub/models--org--tiny/blobs").iterdir())

    def test_a_run_begins_with_a_commit_and_keeps_it(self):
        recipe = self.tuned('T.hf "org/tiny"')
        for look in (["check", recipe, "--run", "first"], ["train", recipe, "--nproc", "2", "--run", "first", "--dry-run"]):
            done = subprocess.run([self.program, *map(str, look)], cwd=self.folder, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(f"a new run begins with org/tiny@{COMMIT}: 137 KiB of weights in 3 files to fetch", done.stdout)
        self.assertEqual([name for name in self.hub.reads() if name.endswith(".safetensors")], [])
        self.assertFalse((self.folder / "first/hub.json").exists())
        self.train(recipe, "first")
        self.assertEqual(sorted(name for name in self.hub.reads() if name.endswith(".safetensors")),
                         [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)])  # once, whatever the ranks
        record = (self.folder / "first/hub.json").read_text()
        self.assertEqual((json.loads(record)["name"], json.loads(record)["commit"]), ("org/tiny@main", COMMIT))
        asked = len(self.hub.asked)
        shutil.rmtree(self.folder / "first")  # as if it had been killed before its first save
        (self.folder / "first").mkdir()
        (self.folder / "first/hub.json").write_text(record)
        self.hub.commit = "f" * 40  # the branch moves
        self.train(recipe, "first")
        self.assertEqual(len(self.hub.asked), asked)
        shutil.copytree(GOLDEN, self.folder / "hf")
        self.train(self.tuned('T.hf "hf"'), "direct")
        self.assertTrue(self.weights("first") == self.weights("direct"), "not the same bits")
        for run in ("first", "direct"):  # with the files of the model that it began with
            self.cairn("export", run, f"{run}-out")
        files = [{path.name: path.read_bytes() for path in (self.folder / f"{run}-out").iterdir() if path.suffix != ".md"}
                 for run in ("first", "direct")]
        self.assertIn("generation_config.json", files[0])
        self.assertEqual(*files)

    def test_cairn_serve_is_a_hub(self):
        self.train(self.recipe(name="small", steps=5, tp=1, pp=1, dp=1, sp="false", save=5), "small")
        self.cairn("export", "small", "exported")
        served = Served(self.program, self.folder, "small")
        self.addCleanup(served.end)
        os.environ["HF_ENDPOINT"] = served.url
        done = self.cairn("import", "hf://runs/small@step-5", "imported")
        self.assertIn("runs/small@step-5", done.stderr.decode())
        snapshot, = (self.folder / "hub/models--runs--small/snapshots").iterdir()
        for path in snapshot.iterdir():
            self.assertEqual(path.read_bytes(), (self.folder / "exported" / path.name).read_bytes(), path.name)
        self.assertTrue((snapshot / "model.safetensors").exists())
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.addCleanup(os.environ.pop, "HF_HUB_OFFLINE")
        self.cairn("generate", "hf://runs/small@step-5", "--prompt", "a", "--tokens", "2", "--tokenizer", "bytes")


if __name__ == "__main__":
    main()
