"""A real object store for the tests: OpenStack Swift with its S3 interface, all four of its servers in one process.

    swift_server.py FOLDER [PORT]     FOLDER: on a file system with user extended attributes (ext4, xfs, overlayfs, ...)

Prints one line, {"endpoint", "access_key", "secret_key", "bucket"}, when it answers, and serves until stdin is closed.
Debian's python3-swift has the servers; signatures, uploads in parts and ETags are Swift's own code. Exits with 77, saying
why, where that package is missing or the file system has no extended attributes.
"""

import array
import json
import os
import pathlib
import sys
import tempfile
import time


def skip(why):
    print(f"no object store to test with: {why}", file=sys.stderr)
    sys.exit(77)


try:
    import eventlet

    eventlet.monkey_patch()
    import eventlet.wsgi
    from swift.common.ring import RingData
except ImportError as error:
    skip(f"python3-swift is not installed ({error})")

ACCESS, SECRET, BUCKET = "test:tester", "odd/secret+with=signs", "cairn"


class Cache:
    """What Swift asks of memcached, in this process."""

    def __init__(self):
        self.values = {}

    def get(self, key, *args, **kwargs):
        value, until = self.values.get(key, (None, 0))
        return value if until == 0 or until > time.time() else None

    def set(self, key, value, serialize=True, time=0, **kwargs):
        self.values[key] = (value, time and __import__("time").time() + time)

    def incr(self, key, delta=1, time=0, **kwargs):
        value = int(self.get(key) or 0) + delta
        self.set(key, value, time=time)
        return value

    def decr(self, key, delta=1, time=0, **kwargs):
        return self.incr(key, -delta, time)

    def delete(self, key, *args, **kwargs):
        self.values.pop(key, None)


def cache_filter(global_conf, **local_conf):
    cache = Cache()

    def make(app):
        def serve(env, start_response):
            env["swift.cache"] = cache
            return app(env, start_response)
        return serve
    return make


BACKEND = """
[DEFAULT]
devices = {folder}/devices
mount_check = false
swift_dir = {folder}
log_level = ERROR
disable_fallocate = true
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
replication_server = false
"""

PROXY = """
[DEFAULT]
swift_dir = {folder}
log_level = ERROR
[pipeline:main]
pipeline = catch_errors cache s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 60
conn_timeout = 10
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
paste.filter_factory = swift_server:cache_filter
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:slo]
use = egg:swift#slo
min_segment_size = 1
"""


def listen(port=0):
    return eventlet.listen(("127.0.0.1", port))


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    (folder / "devices" / "d").mkdir(parents=True, exist_ok=True)
    probe = folder / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.swift", b"1")
    except OSError as error:
        skip(f"{folder} has no extended attributes ({error})")
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n")
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from swift.common import utils
    utils.set_swift_dir(str(folder))
    utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    utils.validate_hash_conf()
    from swift.common import storage_policy
    storage_policy.reload_storage_policies()

    sockets = {kind: listen() for kind in ("account", "container", "object")}
    for kind, sock in sockets.items():
        device = {"id": 0, "zone": 0, "region": 1, "device": "d", "ip": "127.0.0.1", "port": sock.getsockname()[1],
                  "replication_ip": "127.0.0.1", "replication_port": sock.getsockname()[1], "weight": 1, "meta": ""}
        RingData([array.array("H", [0, 0])], [device], 31).save(str(folder / f"{kind}.ring.gz"))
    from swift.common.wsgi import loadapp
    log = open(folder / "access.log", "w", buffering=1)

    def serve(sock, app):
        eventlet.spawn(eventlet.wsgi.server, sock, app, log, debug=False, custom_pool=eventlet.GreenPool(64),
                       socket_timeout=120)

    for kind, sock in sockets.items():
        conf = folder / f"{kind}-server.conf"
        conf.write_text(BACKEND.format(folder=folder, kind=kind))
        serve(sock, loadapp(str(conf)))
    conf = folder / "proxy-server.conf"
    conf.write_text(PROXY.format(folder=folder, secret=SECRET.replace("%", "%%")))
    front = listen(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    serve(front, loadapp(str(conf)))
    print(json.dumps({"endpoint": f"http://127.0.0.1:{front.getsockname()[1]}", "access_key": ACCESS,
                      "secret_key": SECRET, "bucket": BUCKET}), flush=True)
    eventlet.tpool.execute(sys.stdin.read)  # until whoever started us closes it, or dies
    os._exit(0)


if __name__ == "__main__":
    main()
