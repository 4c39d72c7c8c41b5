"""`cairn serve`: clients read a run's steps over HTTP, byte for byte as an export writes them, and harm nothing."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import urllib.error
import urllib.request

from harness import JUMP, PATIENCE_S, RunTest, main

WEIGHTS = "model.safetensors"
TOKEN = "hf_" + "k" * 40


class Served:
    """A `cairn serve` at work."""

    def __init__(self, program, folder, *args):
        self.log_path = folder / "serve.err"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([program, "serve", *map(str, args), "--listen", "127.0.0.1:0"], cwd=folder,
                                            stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()  # ends where the server does not start
        assert line.startswith("HF_ENDPOINT=http://127.0.0.1:"), self.log()
        self.url = line.strip().split("=", 1)[1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def log(self):
        return self.log_path.read_text()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        return code

    def ask(self, path, method="GET", **headers):
        """(status, headers, body)"""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def get(self, path):
        status, _, body = self.ask(path)
        assert status == 200, (status, body)
        return body

    def raw(self, text):
        """The bytes that answer these, until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as link:
            out = b""
            with contextlib.suppress(ConnectionError):  # it may close before all is sent
                link.sendall(text)
                while part := link.recv(1 << 16):
                    out += part
            return out


class Serve(RunTest):
    @contextlib.contextmanager
    def served(self, *args):
        one = Served(self.program, self.folder, *args)
        try:
            yield one
        finally:
            if one.process.poll() is None:
                self.assertEqual(one.end(), 0, one.log())

    def trained(self, run="small", width=32, steps=15):
        for stop in range(5, steps + 1, 5):  # each start saves its last step, however fast the steps before are
            recipe = self.recipe(name=run, steps=stop, tp=1, pp=1, dp=1, sp="false", save=5)
            recipe.write_text(recipe.read_text().replace("width = 32", f"width = {width}"))
            self.train(recipe, run, *JUMP)

    def exported(self, source, *extra):
        """The files of an export, by name."""
        out = self.folder / f"exports-{len(list(self.folder.glob('exports-*')))}" / "small"
        self.cairn("export", source, out, *extra)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    def asked(self, link, path):
        """The JSON that a connection gets; None: there is none yet."""
        link.request("GET", path)
        answer = link.getresponse()
        body = answer.read()
        return json.loads(body) if answer.status == 200 else None

    def pins(self):
        return sorted(path.name.split(".")[1] for path in (self.folder / "small/checkpoints").glob(".pin-*"))

    def test_files_are_those_of_an_export_at_every_range(self):
        self.trained(width=256)
        newest, older = self.exported("small"), self.exported(self.checkpoint("small", 10), "--dtype", "bf16")
        size = len(newest[WEIGHTS])
        self.assertGreater(size, 5 << 20)  # of two blocks
        before = sorted(path for path in self.folder.glob("small/**/*"))
        with self.served("small", "--timeout", 2) as one:
            self.check_hostile(one)
        with self.served("small") as one:
            self.check_revisions(one, newest, older)
            self.check_ranges(one, newest[WEIGHTS])
            self.check_clients(one, newest[WEIGHTS])
            self.assertEqual(self.pins(), ["pin-step-00000010", "pin-step-00000015"])
        self.assertEqual(before, sorted(path for path in self.folder.glob("small/**/*")))

    def test_a_label_that_changes_is_said_by_the_next_answers(self):
        self.trained()
        with self.served("small") as one:
            path = "/runs/small/resolve/step-10/config.json"
            label = lambda: one.ask(path, "HEAD")[1].get("X-Cairn-Label")  # noqa: E731
            self.assertIsNone(label())
            self.cairn("ckpt", "label", "small", 10, "suspect", "--why", "a test")
            self.until(lambda: label() == "suspect", "the new label")
            self.cairn("ckpt", "label", "small", 10, "good", "--why", "a test")
            self.until(lambda: label() is None, "the old label's end")

    def check_revisions(self, one, newest, older):
        """Names, commits, the tree, and each file of two steps in two dtypes."""
        self.assertIn("runs/small: 3 steps, latest is step-15, best is step-", one.get("/").decode())
        refs = json.loads(one.get("/api/models/runs/small/refs"))
        commits = {ref["name"]: ref["targetCommit"] for ref in refs["branches"] + refs["tags"]}
        self.assertEqual(sorted(commits), ["best", "good", "latest", "main", "step-10", "step-15", "step-5"])
        self.assertEqual(commits["latest"], commits["step-15"])
        self.assertEqual(commits["good"], commits["step-15"])  # the end of a run
        for name, revision, files in (("small", "latest", newest), ("small", "15", newest),
                                      ("small.bf16", "step-10", older)):
            model = json.loads(one.get(f"/api/models/runs/{name}/revision/{revision}"))
            self.assertEqual(sorted(file["rfilename"] for file in model["siblings"]), sorted(files))
            for asked in (revision, model["sha"], model["sha"][:7]):
                tree = json.loads(one.get(f"/api/models/runs/{name}/tree/{asked}?recursive=true&expand=false"))
                self.assertEqual({file["path"]: file["size"] for file in tree},
                                 {file: len(text) for file, text in files.items()})
            for file in tree:
                path = f"/runs/{name}/resolve/{revision}/{file['path']}"
                self.assertEqual(one.get(path), files[file["path"]], path)
                status, headers, body = one.ask(path, "HEAD")
                self.assertEqual((status, body, headers["X-Repo-Commit"]), (200, b"", model["sha"]))
                self.assertEqual(headers.get_all("Content-Length"), [str(file["size"])])
                self.assertEqual(headers["ETag"], f'"{file["oid"]}"')
                self.assertRegex(file["oid"], "^[0-9a-f]{64}$")
        self.assertEqual(json.loads(one.get("/api/models/runs/small"))["sha"], commits["main"])
        status, headers, _ = one.ask("/runs/small.bf16/resolve/" + commits["main"] + "/config.json")
        self.assertEqual((status, headers["X-Error-Code"]), (404, "RevisionNotFound"))  # a commit of another form
        for path, code in (("/runs/none/resolve/main/config.json", "RepoNotFound"),
                           ("/runs/small/resolve/step-9/config.json", "RevisionNotFound"),
                           ("/runs/small/resolve/0000000/config.json", "RevisionNotFound"),
                           ("/runs/small/resolve/main/tokenizer.model", "EntryNotFound"),
                           ("/api/models/runs/small/tree/main/additional_chat_templates", "EntryNotFound")):
            status, headers, body = one.ask(path)
            self.assertEqual((status, headers["X-Error-Code"]), (404, code), body)
            self.assertIn(headers["X-Error-Message"], json.loads(body)["error"])

    def check_ranges(self, one, weights):
        path, size = f"/runs/small/resolve/main/{WEIGHTS}", len(weights)
        head = 8 + int.from_bytes(weights[:8], "little")
        block = 4 << 20
        edges = [0, 1, 7, 8, head - 1, head, head + 1, head + 3, block - 1, block, block + 1, size - 2, size - 1]
        draw = random.Random(5)
        ranges = [(a, b) for a in edges for b in edges if a <= b]
        ranges += [(a, min(size - 1, a + draw.randrange(1 << draw.randrange(20)))) for a in draw.sample(range(size), 100)]
        link = http.client.HTTPConnection("127.0.0.1", one.port, timeout=PATIENCE_S)
        for first, last in ranges:
            link.request("GET", path, headers={"Range": f"bytes={first}-{last}"})
            answer = link.getresponse()
            body = answer.read()
            self.assertEqual((answer.status, answer.headers["Content-Range"]), (206, f"bytes {first}-{last}/{size}"))
            self.assertTrue(body == weights[first:last + 1], (first, last))
        link.close()
        self.assertEqual(one.ask(path, Range="bytes=-9")[2], weights[-9:])
        self.assertEqual(one.ask(path, Range=f"bytes={size - 4}-{(1 << 63) - 1}")[2], weights[-4:])
        status, headers, _ = one.ask(path, Range=f"bytes={size}-")
        self.assertEqual((status, headers["Content-Range"]), (416, f"bytes */{size}"))
        for odd in ("bytes=5-4", "bytes=0-1,4-5", "lines=1-2", "bytes=" + ",".join(f"{k}-{k}" for k in range(1000)),
                    f"bytes=0-{'9' * 40}"):
            status, _, body = one.ask(path, Range=odd)
            self.assertTrue(status == 200 and body == weights, odd[:40])
        tag = one.ask(path, "HEAD")[1]["ETag"]
        self.assertEqual(one.ask(path, Range="bytes=0-9", If_Range=tag)[0], 206)
        self.assertEqual(one.ask(path, Range="bytes=0-9", If_Range='"another"')[0], 200)

    def check_hostile(self, one):
        """Requests that mean harm are refused, and the server answers on."""
        secret = self.folder / "secret"
        secret.write_text("what nobody is to read")
        for path in ("/runs/small/resolve/main/../../../secret", "/runs/small/resolve/main/..%2f..%2f..%2fsecret",
                     "/runs/small/resolve/main//etc/passwd", "/runs/small/resolve/..%2f..%2f/secret", "/runs/../secret",
                     "/runs/small/resolve/main/%252e%252e/secret",
                     "/runs/small/resolve/main/" + "a/" * 4000, "/runs/small/resolve/main/", "/api/models/runs/",
                     "/" + "%ff" * 500, "//", "/runs//resolve/main/config.json", "/resolve/main/config.json"):
            answer = one.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            self.assertRegex(answer.split(b"\r\n")[0], rb"^HTTP/1\.1 (400|404|431) ", path[:80])
            self.assertNotIn(b"what nobody is to read", answer)
        draw = random.Random(9)
        good = b"GET /runs/small/resolve/main/config.json HTTP/1.1\r\nHost: x\r\nRange: bytes=0-9\r\n"
        for _ in range(200):
            text = bytearray(good)
            for _ in range(draw.randrange(1, 6)):
                text[draw.randrange(len(text) - 2)] = draw.randrange(256)
            answer = one.raw(bytes(text) + b"Connection: close\r\n\r\n")
            self.assertTrue(answer == b"" or answer.startswith(b"HTTP/1."), text)
        for method in ("POST", "PUT", "DELETE"):
            self.assertEqual(one.ask("/runs/small/resolve/main/config.json", method)[0], 405)
        # Half a request ends with its time.
        self.assertEqual(one.raw(b"GET /runs/small/resolve/main/config.json HTTP/1.1\r\nHost: x\r\n"), b"")

    def check_clients(self, one, weights):
        """Clients that are killed, and 16 at once that read all, in pieces, each resumed."""
        path, size = f"/runs/small/resolve/main/{WEIGHTS}", len(weights)
        for _ in range(4):
            link = socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closed by a reset
            link.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            self.assertEqual(link.recv(9), b"HTTP/1.1 ")
            link.close()

        def client(seed):
            draw, got = random.Random(seed), b""
            while len(got) < size:
                link = http.client.HTTPConnection("127.0.0.1", one.port, timeout=PATIENCE_S)
                link.request("GET", path, headers={"Range": f"bytes={len(got)}-"})
                got += link.getresponse().read(draw.randrange(1, size // 2))
                link.close()
            return got == weights

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            self.assertEqual(list(pool.map(client, range(16))), [True] * 16)
        self.until(lambda: "broken off" in one.log(), "the log to tell of a client that has gone")

    def test_a_step_that_is_read_stays_and_damage_is_never_served(self):
        self.trained()
        older = self.exported(self.checkpoint("small", 5))
        path = "/runs/small/resolve/step-5/"
        with self.served("small") as one:
            sha = json.loads(one.get("/api/models/runs/small/revision/step-5"))["sha"]
            said = self.cairn("ckpt", "prune", "small", "--keep", "last(1)", "--even-good").stdout.decode()
            self.assertIn(f"process {one.process.pid} of", said)
            self.cairn("ckpt", "prune", "small", "--keep", "last(1)", "--even-good", "--yes")
            self.assertEqual(self.checkpoints("small"), [5, 15])
            self.assertEqual({name: one.get(path + name) for name in older}, older)
            self.assertEqual(one.ask(f"/runs/small/resolve/{sha}/config.json")[0], 200)
            gone = "/runs/small/resolve/step-10/config.json"
            self.until(lambda: one.ask(gone)[0] == 404, "the server to see that step 10 is gone")
            # A name stays the same step for a client that asks again; the run's own retention passes pins over.
            latest = json.loads(one.get("/api/models/runs/small"))["sha"]
            longer = self.recipe(name="small", steps=20, tp=1, pp=1, dp=1, sp="false", save=5, keep=1)
            self.train(longer, "small", *JUMP, "--accept", "checkpoint.keep")
            self.assertEqual(self.checkpoints("small"), [5, 15, 20])
            self.assertEqual(json.loads(one.get("/api/models/runs/small"))["sha"], latest)
            link = http.client.HTTPConnection("127.0.0.1", one.port, PATIENCE_S, source_address=("127.0.0.2", 0))
            newer = self.until(lambda: self.asked(link, "/api/models/runs/small/revision/20"), "step 20")["sha"]
            self.assertEqual(self.asked(link, "/api/models/runs/small")["sha"], newer)
            link.close()
            one.process.kill()
            one.process.wait(PATIENCE_S)
            one.process.stdout.close()
        # Pins of a dead process count for nothing.
        self.assertEqual(self.pins(), ["pin-step-00000005", "pin-step-00000015", "pin-step-00000020"])
        self.cairn("ckpt", "prune", "small", "--keep", "last(1)", "--even-good", "--leftovers", "--yes")
        self.assertEqual((self.checkpoints("small"), self.pins()), ([20], []))
        shard = next(self.checkpoint("small", 20).glob("*.h5"))
        place = max(self.shards("small", 20), key=lambda one: one["bytes"])
        with self.served("small") as one:
            files = json.loads(one.get("/api/models/runs/small"))["siblings"]
            with open(shard, "r+b") as file:
                file.seek(place["offset"])
                file.write(bytes(byte ^ 1 for byte in os.pread(file.fileno(), place["bytes"], place["offset"])))
            self.assertIn({"rfilename": WEIGHTS}, files)
            link = http.client.HTTPConnection("127.0.0.1", one.port, timeout=PATIENCE_S)
            link.request("GET", f"/runs/small/resolve/main/{WEIGHTS}")
            with self.assertRaises((http.client.IncompleteRead, ConnectionError)):
                link.getresponse().read()
            link.close()
            status, _, body = one.ask(f"/runs/small/resolve/main/{WEIGHTS}")
            self.assertEqual(status, 500)
            self.assertIn("chunk", json.loads(body)["error"])
            self.assertIn("`cairn ckpt verify` checks the step", one.log())

    def test_a_token_is_asked_for_and_never_logged(self):
        self.trained(steps=5)
        token = self.folder / "token"
        token.write_text("short\n")
        for args, said in ((["--listen", "0.0.0.0:0"], "other machines reach that address, so a token is needed"),
                           (["--token-file", token], "the token has 5 characters, expected at least 40"),
                           (["--listen", "nowhere"], "expected ADDRESS:PORT"), (["--dtype", "f64"], "dtype f64"),
                           (["small"], "another run of the name small is served")):
            self.assertIn(said, self.cairn("serve", "small", *args, code=2).stderr.decode())
        token.write_text(TOKEN + "\n")
        with self.served("small", "--token-file", token) as one:
            path = "/runs/small/resolve/main/config.json"
            self.assertEqual(one.ask(path)[0], 401)
            self.assertEqual(one.ask(path, Authorization="Bearer " + TOKEN[:-1])[0], 401)
            self.assertEqual(one.ask(path + "?token=" + TOKEN)[0], 401)
            self.assertEqual(one.ask(path, Authorization="Bearer " + TOKEN)[0], 200)
            self.assertEqual(one.log().count(" 401 "), 3)
        self.assertNotIn(TOKEN[:20], one.log())


if __name__ == "__main__":
    main()
