"""A Hub for tests: models from folders, over the protocol that huggingface_hub speaks, with faults on demand."""

import collections
import hashlib
import http.server
import json
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """One model, `files` by path, of which *.safetensors and *.bin are large files (lfs).

    faults[path]: a list, one for each GET of the file's bytes, of
      ("cut", N)        the connection ends after N bytes of the body
      ("flip", N)       byte N is another one
      ("status", S, {}) an answer without the file, with these headers
      ("no_range",)     200 with all bytes, whatever range is asked for
      ("hold",)         the body waits, after half of it, for `released`
    """

    def __init__(self, files, model="org/tiny", token=None):
        self.files, self.model, self.token = dict(files), model, token
        self.commit, self.branches = COMMIT, {"main"}
        self.faults = collections.defaultdict(list)
        self.heads = {}        # path -> {header: value} in place of the true ones, of a HEAD
        self.repeat = set()    # paths of which Content-Length comes twice, the second one wrong
        self.api_faults = []   # (status, headers) of the next requests below /api
        self.page = 1000       # entries of a page of the tree
        self.mirror = None     # base URL of another host to which bodies are redirected
        self.asked = []        # (method, path, headers)
        self.sent = 0          # bytes of bodies of files
        self.half_sent, self.released = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that are killed
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def etag(self, path):
        content = self.files[path]
        return hashlib.sha256(content).hexdigest() if self.large(path) else git_oid(content)

    @staticmethod
    def large(path):
        return path.endswith((".safetensors", ".bin"))

    def reads(self, method="GET"):
        """Paths of files that were asked for."""
        return [path.split("/", 5)[5] for verb, path, _ in self.asked
                if verb == method and "/resolve/" in path]

    # --- answers

    def answer(self, to, body):
        with self.lock:
            self.asked.append((to.command, to.path, dict(to.headers)))
        if self.token is not None and to.headers.get("Authorization") != f"Bearer {self.token}":
            code = "GatedRepo" if "Authorization" in to.headers else "RepoNotFound"
            return self.refuse(to, 403 if "Authorization" in to.headers else 401, code)
        path = urllib.parse.unquote(urllib.parse.urlsplit(to.path).path)
        if path.startswith("/api/"):
            with self.lock:
                fault = self.api_faults.pop(0) if self.api_faults else None
            if fault:
                return self.plain(to, fault[0], b"", fault[1])
        if path.startswith(f"/api/models/{self.model}/"):
            kind, _, revision = path.removeprefix(f"/api/models/{self.model}/").partition("/")
            if revision not in self.branches | {self.commit}:
                return self.refuse(to, 404, "RevisionNotFound")
            return self.describe(to, kind)
        if path.startswith(f"/{self.model}/resolve/"):
            revision, _, name = path.removeprefix(f"/{self.model}/resolve/").partition("/")
            if revision not in self.branches | {self.commit}:
                return self.refuse(to, 404, "RevisionNotFound")
            if name not in self.files:
                return self.refuse(to, 404, "EntryNotFound")
            return self.file(to, name, body)
        return self.refuse(to, 404, "RepoNotFound")

    def plain(self, to, status, body, headers=()):
        to.send_response(status)
        for name, value in dict(headers).items():
            to.send_header(name, value)
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        if to.command == "GET":
            to.wfile.write(body)

    def refuse(self, to, status, code):
        self.plain(to, status, json.dumps({"error": code}).encode(),
                   {"X-Error-Code": code, "X-Error-Message": f"said of {code}"})

    def describe(self, to, kind):
        if kind == "revision":
            return self.plain(to, 200, json.dumps({"id": self.model, "sha": self.commit, "siblings": [
                {"rfilename": path} for path in self.files]}).encode())
        start = int(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(to.path).query)).get("cursor", 0))
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "folder"}]
        for path, content in self.files.items():
            entry = {"type": "file", "oid": git_oid(content), "size": len(content), "path": path}
            if self.large(path):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        headers = {}
        if start + self.page < len(entries):
            headers["Link"] = f'<{self.url}/api/models/{self.model}/tree/{self.commit}?recursive=true&cursor={start + self.page}>; rel="next"'
        self.plain(to, 200, json.dumps(entries[start:start + self.page]).encode(), headers)

    def file(self, to, name, body):
        content = self.files[name]
        common = {"X-Repo-Commit": self.commit, "ETag": f'"{self.etag(name)}"', "Accept-Ranges": "bytes"}
        if self.mirror is not None and self.large(name):
            common.update({"Location": f"{self.mirror}{to.path}", "X-Linked-ETag": common["ETag"],
                           "X-Linked-Size": str(len(content))})
            return self.plain(to, 302, b"", common)
        if not body:
            common.update(self.heads.get(name, {}))
            to.send_response(200)
            for key, value in common.items():
                to.send_header(key, value)
            to.send_header("Content-Length", str(len(content)))
            if name in self.repeat:
                to.send_header("Content-Length", str(len(content) + 1))
            return to.end_headers()
        with self.lock:
            fault = self.faults[name].pop(0) if self.faults[name] else ()
        if fault[:1] == ("status",):
            return self.plain(to, fault[1], b"", fault[2])
        self.send(to, content, common, fault)

    def send(self, to, content, common, fault):
        asked = to.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and fault != ("no_range",) else 0
        if fault[:1] == ("flip",):
            content = content[:fault[1]] + bytes([content[fault[1]] ^ 1]) + content[fault[1] + 1:]
        part = content[start:]
        to.send_response(206 if start else 200)
        for key, value in common.items():
            to.send_header(key, value)
        if start:
            to.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        to.send_header("Content-Length", str(len(part)))
        to.end_headers()
        stop = len(part) // 2 if fault == ("hold",) else fault[1] if fault[:1] == ("cut",) else len(part)
        to.wfile.write(part[:stop])
        to.wfile.flush()
        with self.lock:
            self.sent += stop
        if fault == ("hold",):
            self.half_sent.set()
            self.released.wait()
        if stop < len(part):
            to.close_connection = True
