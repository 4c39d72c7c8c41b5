"""An S3 store for a test: starts Swift (swift_server.py), speaks S3 to it with a signer of its own, and can stand in
between as a proxy that fails on purpose."""

import contextlib
import datetime
import hashlib
import hmac
import http.client
import json
import os
import pathlib
import re
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
REGION = "us-east-1"


class Store:
    """Swift in a process of its own, ended with this object."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.log = open(pathlib.Path(folder) / "stderr.log", "wb")
        self.process = subprocess.Popen([sys.executable, HERE / "swift_server.py", folder], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log)
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            said = pathlib.Path(self.log.name).read_text()
            if code == 77:
                raise Missing(said.strip())
            raise RuntimeError(f"the object store ended with {code}\n{said}")
        settings = json.loads(line)
        self.endpoint, self.bucket = settings["endpoint"], settings["bucket"]
        self.access, self.secret = settings["access_key"], settings["secret_key"]
        self.address = ("127.0.0.1", urllib.parse.urlparse(self.endpoint).port)
        status, body, _ = self.request("PUT", "")
        if status != 200:
            raise RuntimeError(f"cannot make a bucket: {status} {body}")

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def environment(self, endpoint=None):
        out = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and not k.lower().endswith("_proxy")}
        return out | {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret,
                      "AWS_ENDPOINT_URL": endpoint or self.endpoint}

    def request(self, method, key, query=None, body=b""):
        """(status, body, headers) of a signed request, signed here and not by the program under test."""
        path = "/" + self.bucket + ("/" + urllib.parse.quote(key, safe="/-_.~") if key else "")
        quote = lambda text: urllib.parse.quote(text, safe="-_.~")
        args = "&".join(f"{quote(k)}={quote(v)}" for k, v in sorted((query or {}).items()))
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        payload = hashlib.sha256(body).hexdigest()
        host = f"{self.address[0]}:{self.address[1]}"
        headers = {"host": host, "x-amz-content-sha256": payload, "x-amz-date": now}
        names = ";".join(sorted(headers))
        canonical = "\n".join([method, path, args, *(f"{k}:{headers[k]}" for k in sorted(headers)), "", names, payload])
        scope = f"{now[:8]}/{REGION}/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        key_bytes = b"AWS4" + self.secret.encode()
        for part in scope.split("/"):
            key_bytes = hmac.new(key_bytes, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key_bytes, text.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (f"AWS4-HMAC-SHA256 Credential={self.access}/{scope}, SignedHeaders={names}, "
                                    f"Signature={signature}")
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        try:
            connection.request(method, path + ("?" + args if args else ""), body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def keys(self, prefix=""):
        """{key: size} below a prefix."""
        out, token = {}, None
        while True:
            query = {"list-type": "2", "prefix": prefix} | ({"continuation-token": token} if token else {})
            status, body, _ = self.request("GET", "", query)
            assert status == 200, (status, body)
            text = body.decode()
            for item in re.findall(r"<Contents>(.*?)</Contents>", text, re.S):
                out[re.search("<Key>(.*?)</Key>", item)[1]] = int(re.search("<Size>(.*?)</Size>", item)[1])
            token = re.search("<NextContinuationToken>(.*?)</NextContinuationToken>", text)
            if token is None:
                return out
            token = token[1]

    def uploads(self):
        """Keys of uploads in parts that are under way."""
        status, body, _ = self.request("GET", "", {"uploads": ""})
        assert status == 200, (status, body)
        return re.findall("<Upload>.*?<Key>(.*?)</Key>", body.decode(), re.S)

    def get(self, key):
        status, body, _ = self.request("GET", key)
        assert status == 200, (key, status, body)
        return body

    def put(self, key, body):
        status, answer, _ = self.request("PUT", key, body=body)
        assert status == 200, (key, status, answer)

    def delete(self, key):
        status, answer, _ = self.request("DELETE", key)
        assert status in (200, 204), (key, status, answer)


class Missing(Exception):
    """No object store can be started here."""


def make_certificates(folder):
    """An authority, ca.pem, and what it has signed: good.pem for 127.0.0.1, elsewhere.pem for another host, expired.pem;
    and other-ca.pem, which has signed nothing. Needs the program openssl."""
    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=folder)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other-ca"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", 2, "-subj", f"/CN={name}")
    for name, host, days in (("good", "IP:127.0.0.1", 2), ("elsewhere", "DNS:store.example.org", 2),
                             ("expired", "IP:127.0.0.1", 0)):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        pathlib.Path(folder, f"{name}.ext").write_text(f"subjectAltName={host}\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days,
                "-extfile", f"{name}.ext", "-out", f"{name}.pem")
    time.sleep(1.1)  # until the last one has expired


class Proxy:
    """Stands before the store and asks `decide(method, path, headers)` about each request. Answers:
    None                      pass on
    "refuse"                  HTTP 503 with S3's words, body read and dropped
    ("answer", status, body)  this instead
    "reset"                   the connection is torn after the request's head
    "cut"                     half of the request's body is passed on, then both connections are torn
    "silence"                 nothing, ever, until the client leaves
    ("damage", n)             byte n of the answer's body is flipped
    ("short", n)              n bytes of the answer's body come, then the connection is torn
    "end"                     all of the answer's body comes, and the connection is torn where it should end
    "drip"                    the answer's head, then a byte a second without end
    The request line and headers are passed on untouched, so signatures hold. With `certificate`, the path of a .pem with
    its .key beside it, clients speak TLS to it, `newest` at most."""

    def __init__(self, store, decide=None, certificate=None, newest=None):
        self.tls = None
        if certificate:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(certificate, str(certificate).removesuffix(".pem") + ".key")
            if newest:
                self.tls.minimum_version, self.tls.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, newest
                self.tls.set_ciphers("ALL:@SECLEVEL=0")
        self.store, self.decide = store, decide or (lambda *request: None)
        self.seen = []  # (method, path, body bytes passed on)
        self.under_way = 0  # requests that the store has not answered to the end
        self.lock = threading.Lock()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http{'s' if self.tls else ''}://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self):
        self.server.close()

    def sent_bytes(self, method="PUT"):
        with self.lock:
            return sum(size for verb, _, size in self.seen if verb == method)

    def count(self, pattern):
        with self.lock:
            return sum(1 for verb, path, _ in self.seen if re.search(pattern, f"{verb} {path}"))

    @contextlib.contextmanager
    def counted(self):
        with self.lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self.lock:
                self.under_way -= 1

    def settle(self):
        """Waits until the store has done what it was sent, also by a client that is gone."""
        end = time.monotonic() + 60
        while self.under_way > 0 and time.monotonic() < end:
            time.sleep(0.005)

    def accept(self):
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.serve_quietly, args=(client,), daemon=True).start()

    def serve_quietly(self, client):
        try:
            if self.tls:
                client = self.tls.wrap_socket(client, server_side=True)
            self.serve(client)
        except OSError:
            pass
        finally:
            client.close()

    @staticmethod
    def read_head(stream):
        head = b""
        while True:
            line = stream.readline()
            if not line:
                return None
            head += line
            if line in (b"\r\n", b"\n"):
                return head

    @staticmethod
    def header(head, name, default=None):
        found = re.search(rb"(?im)^" + name.encode() + rb":\s*(.*?)\r?$", head)
        return found[1].decode() if found else default

    def tear(self, sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST instead of FIN
        sock.close()

    def serve(self, client):
        stream = client.makefile("rb")
        while True:
            head = self.read_head(stream)
            if head is None:
                return
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            size = int(self.header(head, "content-length", "0"))
            what = self.decide(method, path, head)
            if what == "reset":
                stream.close()
                self.tear(client)
                return
            if what == "silence":
                while client.recv(65536):
                    pass
                return
            if what == "refuse" or (isinstance(what, tuple) and what[0] == "answer"):
                left = size
                while left > 0:
                    data = stream.read(min(left, 1 << 20))
                    if not data:
                        return
                    left -= len(data)
                status, body = (503, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>")
                if isinstance(what, tuple):
                    status, body = what[1], what[2]
                client.sendall(b"HTTP/1.1 %d Said\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" %
                               (status, len(body)) + body)
                continue
            with self.counted(), socket.create_connection(self.store.address, timeout=120) as upstream:
                # One request a connection upstream; the client's side stays open.
                upstream.sendall(head[:-2] + b"Connection: close\r\n\r\n")
                left, passed = (size // 2 if what == "cut" else size), 0
                while left > 0:
                    data = stream.read1(min(left, 1 << 18))
                    if not data:
                        return
                    upstream.sendall(data)
                    left, passed = left - len(data), passed + len(data)
                with self.lock:
                    self.seen.append((method, path, passed))
                if what == "cut":
                    self.tear(upstream)
                    stream.close()
                    self.tear(client)
                    return
                self.answer(client, upstream.makefile("rb"), what, method)

    def answer(self, client, upstream, what, method):
        head = self.read_head(upstream)
        if head is None:
            raise OSError("the store closed the connection")
        head = re.sub(rb"(?im)^connection:.*\r\n", b"", head)
        if what == "drip":
            client.sendall(head)
            while True:
                client.sendall(b"x")
                time.sleep(1)
        if what == "end":  # one byte more is promised than will come
            client.sendall(re.sub(rb"(?im)^(content-length:\s*)(\d+)", lambda m: m[1] + b"%d" % (int(m[2]) + 1), head))
        else:
            client.sendall(head)
        if method == "HEAD" or head.split(b" ", 2)[1] == b"204":
            return
        length = self.header(head, "content-length")
        # Without a length the store ends the answer by closing (it was told to) or sends chunks: both pass as they are.
        at, flip, stop = 0, None, None
        if isinstance(what, tuple):
            flip, stop = (what[1] if what[0] == "damage" else None), (what[1] if what[0] == "short" else None)
        while length is None or at < int(length):
            data = bytearray(upstream.read1(1 << 18))
            if not data:
                break
            if flip is not None and at <= flip < at + len(data):
                data[flip - at] ^= 0x10
            if stop is not None and at + len(data) > stop:
                client.sendall(bytes(data[:stop - at]))
                raise OSError("torn on purpose")
            client.sendall(bytes(data))
            at += len(data)
        if what == "end":
            raise OSError("torn on purpose")
