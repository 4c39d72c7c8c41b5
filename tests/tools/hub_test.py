"""Models by their names of a Hub: fetched into the Hub's cache, resumed, checked, or refused with what to do."""

import os
import pathlib
import signal
import subprocess
import sys

import program

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
from hub_server import COMMIT, HubServer

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/hf-llama-gqa-sharded"
SHARD = "model-00002-of-00003.safetensors"
TOKEN = "hf_" + "t" * 34
PATIENCE_S = 60


class Hub(program.ProgramTest):
    def setUp(self):
        super().setUp()
        files = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.name != "reference.safetensors"}
        files["pytorch_model.bin"] = b"never read"
        files["onnx/model.onnx"] = b"never read"
        self.files = files
        self.hub = self.serving(HubServer(files))
        self.cache = pathlib.Path(self.folder.name) / "hub"

    def serving(self, server):
        self.addCleanup(server.close)
        return server

    def env(self, **more):
        return {"HF_ENDPOINT": self.hub.url, "HF_HUB_CACHE": str(self.cache), "HF_HUB_DOWNLOAD_TIMEOUT": "2",
                "HOME": self.folder.name, "no_proxy": "*", **more}

    def fetch(self, name="org/tiny", code=0, target=None, **env):
        target = target or f"out-{len(list(pathlib.Path(self.folder.name).glob('out-*')))}"
        return self.cairn("import", name, target, code=code, env=self.env(**env))

    def refused(self, *words, name="org/tiny", code=2, **env):
        text = self.fetch(name, code=code, **env).stderr
        for word in words:
            self.assertIn(word, text)
        return text

    def snapshot(self, commit=COMMIT):
        return self.cache / "models--org--tiny/snapshots" / commit

    def check_cache(self):
        """A program of huggingface_hub expects this of its cache."""
        wanted = {path for path in self.files if path not in ("pytorch_model.bin", "onnx/model.onnx")}
        self.assertEqual({str(path.relative_to(self.snapshot())) for path in self.snapshot().rglob("*")}, wanted)
        for name in wanted:
            path = self.snapshot() / name
            self.assertEqual(os.readlink(path), f"../../blobs/{self.hub.etag(name)}")
            self.assertEqual(path.read_bytes(), self.files[name], name)
        self.assertEqual((self.cache / "models--org--tiny/refs/main").read_text(), self.hub.commit)
        self.assertEqual({path.name for path in (self.cache / "models--org--tiny/blobs").iterdir()},
                         {self.hub.etag(name) for name in wanted})

    def test_a_model_is_fetched_once_and_then_taken_from_the_cache(self):
        self.hub.page = 3
        done = self.fetch(target="out")
        self.assertIn(f"of org/tiny@main from {self.hub.url}", done.stderr)
        self.check_cache()
        self.cairn("import", GOLDEN, "local", "--name", "tiny")
        weights = [sorted(path.read_bytes() for path in pathlib.Path(self.path(out)).glob("step-00000000/*.bin"))
                   for out in ("out", "local")]
        self.assertTrue(weights[0] == weights[1])
        asked = len(self.hub.asked)
        self.fetch(HF_HUB_OFFLINE="1")
        self.fetch(f"org/tiny@{COMMIT}")
        self.assertEqual(len(self.hub.asked), asked)
        self.fetch()
        self.assertEqual([path for path in self.hub.asked[asked:] if "/resolve/" in path[1]], [])
        self.hub.close()
        self.assertIn("taken from the cache", self.fetch().stderr)

    def test_a_folder_of_that_name_comes_first(self):
        os.makedirs(self.path("org/tiny"))
        self.refused("org/tiny")
        self.assertEqual(self.hub.asked, [])
        self.fetch("hf://org/tiny@main")
        self.check_cache()
        self.refused("expected hf://ORG/NAME", name="hf://org")

    def test_a_cut_body_is_resumed_by_ranges(self):
        size = len(self.files[SHARD])
        for cuts in ([1], [size // 2], [size - 1], [100, 1, 7]):
            with self.subTest(cuts=cuts):
                subprocess.run(["rm", "-rf", self.cache], check=True)
                self.hub.faults[SHARD] = [("cut", cut) for cut in cuts]
                self.hub.asked.clear()
                self.fetch()
                self.check_cache()
                ranges = [headers.get("Range") for verb, path, headers in self.hub.asked
                          if verb == "GET" and path.endswith(SHARD)]
                self.assertEqual(ranges, [None] + [f"bytes={sum(cuts[:k + 1])}-" for k in range(len(cuts))])
        subprocess.run(["rm", "-rf", self.cache], check=True)
        self.hub.faults[SHARD] = [("cut", 1000), ("no_range",)]
        self.fetch()
        self.check_cache()

    def test_a_killed_process_is_resumed(self):
        size = len(self.files[SHARD])
        self.hub.faults[SHARD] = [("hold",)]
        child = subprocess.Popen([self.program, "import", "org/tiny", "killed"], cwd=self.folder.name,
                                 env={**os.environ, **self.env(HF_HUB_DOWNLOAD_TIMEOUT="60")},
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertTrue(self.hub.half_sent.wait(PATIENCE_S))
        partial = self.cache / f"models--org--tiny/blobs/{self.hub.etag(SHARD)}.incomplete"
        while not partial.exists() or partial.stat().st_size < size // 2:
            self.assertIsNone(child.poll())
        child.send_signal(signal.SIGKILL)
        child.wait()
        self.assertFalse(self.snapshot().joinpath(SHARD).exists())
        self.hub.asked.clear()
        self.fetch()
        self.check_cache()
        self.assertEqual([headers.get("Range") for verb, path, headers in self.hub.asked
                          if verb == "GET" and path.endswith(SHARD)], [f"bytes={size // 2}-"])

    def test_bytes_that_fail_their_hash_are_never_taken(self):
        for name in ("config.json", SHARD):
            self.hub.faults[name] = [("flip", 40)]
            self.refused(f"{name} of org/tiny@", "as the list of files says, found", "start again", code=65)
            self.assertFalse(self.snapshot().joinpath(name).exists())
        self.hub.faults[SHARD] = [("cut", 1000), ("flip", 1500)]  # resumed: from the first byte once more
        self.fetch()
        self.check_cache()

    def test_answers_that_contradict_the_list_are_refused(self):
        self.hub.heads[SHARD] = {"ETag": f'"{"a" * 64}"'}
        self.refused("expected the ETag", "a" * 64, code=65)
        self.hub.heads[SHARD] = {"ETag": '"../../x"'}
        self.refused("expected an ETag fit for a file's name", code=65)
        self.hub.heads.clear()
        self.hub.repeat.add(SHARD)
        self.refused("Content-Length", code=65)
        self.hub.repeat.clear()
        self.hub.files["../escape.json"] = b"{}"
        self.refused("../escape.json", code=65)

    def test_a_redirect_to_another_host_does_not_get_the_token(self):
        self.hub.token = TOKEN
        other = self.serving(HubServer(self.files))
        self.hub.mirror = other.url
        self.fetch(HF_TOKEN=TOKEN)
        self.check_cache()
        self.assertEqual(len(other.reads()), 3)
        self.assertEqual(self.hub.sent, sum(len(self.files[name]) for name in self.hub.reads() if not self.hub.large(name)))
        self.assertTrue(all("Authorization" not in headers for _, _, headers in other.asked))
        self.assertTrue(all(headers.get("Authorization") == f"Bearer {TOKEN}" for _, _, headers in self.hub.asked))
        self.assertNotIn(TOKEN, self.fetch(f"org/tiny@{COMMIT}", HF_TOKEN=TOKEN).stderr)

    def test_refusals_say_what_to_do(self):
        self.refused("there is no revision \"v9\"", "org/tiny@REVISION", name="org/tiny@v9")
        self.refused("there is no such model", "no token was sent", "set HF_TOKEN", name="org/none")
        self.hub.token = TOKEN
        self.refused("no such model", "or it is private", "set HF_TOKEN")
        os.makedirs(self.path(".cache/huggingface"))
        self.write(".cache/huggingface/token", "hf_other\n")
        text = self.refused("the model is gated", "ask for access at", "huggingface/token was sent", "said of GatedRepo")
        self.assertNotIn("hf_other", text)
        self.write("mine", TOKEN + "\n")
        self.fetch(HF_TOKEN_PATH=self.path("mine"))
        self.check_cache()
        self.refused("is not in the Hub's cache", "unset HF_HUB_OFFLINE", name="org/tiny@v9", HF_HUB_OFFLINE="1")
        self.refused("HF_ENDPOINT: expected https://HOST", HF_ENDPOINT="hub")

    def test_a_file_that_the_index_names_and_the_model_lacks(self):
        del self.hub.files[SHARD]
        self.refused("names " + SHARD)

    def test_a_busy_server_is_asked_again_after_the_time_it_says(self):
        self.hub.api_faults = [(429, {"Retry-After": "1"}), (503, {}), (500, {})]
        self.hub.faults[SHARD] = [("status", 503, {"Retry-After": "0"})]
        self.fetch()
        self.check_cache()
        self.hub.api_faults = [(429, {"Retry-After": "3000"})]
        subprocess.run(["rm", "-rf", self.cache], check=True)
        self.refused("HTTP 429 and asks to wait 3000 s", code=69)

    def test_peak_memory_is_a_buffer(self):
        size = 64 << 20
        self.hub.files[SHARD] = os.urandom(1 << 20) * 64  # fetched, and then no safetensors
        before = self.peak_kib("import", "org/none", "x")
        after = self.peak_kib("import", "org/tiny", "x")
        blob = self.cache / f"models--org--tiny/blobs/{self.hub.etag(SHARD)}"
        self.assertEqual(blob.stat().st_size, size)
        self.assertLess(after - before, 16 << 10)

    def peak_kib(self, *args):
        child = subprocess.Popen([self.program, *args], cwd=self.folder.name, env={**os.environ, **self.env()},
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_maxrss


if __name__ == "__main__":
    program.main()
