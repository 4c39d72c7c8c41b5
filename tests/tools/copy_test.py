"""ckpt push and fetch: a second directory, and a real object store (OpenStack Swift with its S3 interface), reached
directly and through a proxy that fails on purpose."""

import contextlib
import ctypes
import fcntl
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import json
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import object_store
from program import ProgramTest, main

COLD = os.path.join(os.path.dirname(__file__), "..", "golden", "checkpoint-v1-cold")  # step 13 refers to step 12
GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden", "checkpoint-v1", "step-00000012")
STEP = "step-00000012"
PATIENCE_S = 120
KILLS = int(os.environ.get("CAIRN_COPY_KILLS", "12"))  # of the kills at each request; 1000 for all of them


XXHASH = ctypes.CDLL("libxxhash.so.0")
XXHASH.XXH3_64bits.restype = ctypes.c_uint64
XXHASH.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def contents(folder):
    return {p.name: p.read_bytes() for p in pathlib.Path(folder).iterdir()}


class CopyTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.step = self.path(f"run/checkpoints/{STEP}")
        shutil.copytree(GOLDEN, self.step)
        for name in os.listdir(self.step):
            os.chmod(os.path.join(self.step, name), 0o644)
        self.whole = contents(self.step)
        self.bytes = sum(map(len, self.whole.values()))

    def cold(self, folder):
        """A folder of steps 12 and 13 of the same run as self.step, other ones; 13 refers to 12."""
        shutil.copytree(COLD, self.path(folder))
        for path in pathlib.Path(self.path(folder)).glob("*/*"):
            path.chmod(0o644)
        return pathlib.Path(self.path(folder))

    def change_manifest(self, folder, /, **values):
        """Other values in a manifest that holds."""
        path = pathlib.Path(folder) / "manifest.json"
        head, body = path.read_bytes().split(b"\n", 1)
        body = json.loads(body) | values
        text = (json.dumps(body, separators=(",", ":"), sort_keys=True, ensure_ascii=False) + "\n").encode()
        head = json.loads(head) | {"body_bytes": len(text), "body_xxh3_64": f"{XXHASH.XXH3_64bits(text, len(text)):016x}"}
        path.write_bytes(json.dumps(head, separators=(",", ":")).encode() + b"\n" + text)


class DirectoryTest(CopyTest):
    def test_a_checkpoint_goes_and_comes_back(self):
        sent = self.cairn_json("ckpt", "push", "run", "far/place")
        self.assertEqual((sent["step"], sent["bytes"], sent["sent_bytes"], sent["kept_bytes"]),
                         (12, self.bytes, self.bytes, 0))
        self.assertEqual(contents(self.path(f"far/place/{STEP}")), self.whole)
        self.cairn("ckpt", "verify", "far/place")
        self.assertTrue(self.cairn_json("ckpt", "push", "run", "far/place")["was_there"])
        self.assertIn("is there already", self.cairn("ckpt", "push", self.step, "far/place").stdout)
        os.makedirs(self.path("new/checkpoints"))
        self.cairn("ckpt", "fetch", "far/place", "new")
        self.assertEqual(contents(self.path(f"new/checkpoints/{STEP}")), self.whole)
        got = self.cairn_json("ckpt", "fetch", f"far/place/{STEP}/", "elsewhere")
        self.assertEqual(got["received_bytes"], self.bytes)
        self.assertEqual(os.listdir(self.path("elsewhere")), [STEP])

    def test_push_replaces_no_other_checkpoint_of_its_step_unasked(self):
        shutil.copytree(self.step, self.path(f"other/{STEP}"))
        self.change_manifest(self.path(f"other/{STEP}"), run={"id": "run-2", "name": "other", "parents": []})
        self.cairn("ckpt", "verify", "other")
        theirs = contents(self.path(f"other/{STEP}"))
        said = self.cairn("ckpt", "push", "run", "other", code=2).stderr
        self.assertIn("a step 12 of another run (id run-2, this one is run-1)", said)
        self.assertIn("--overwrite", said)
        self.assertEqual(contents(self.path(f"other/{STEP}")), theirs)
        self.assertTrue(self.cairn_json("ckpt", "push", "run", "other", "--overwrite")["replaced"])
        self.assertEqual(contents(self.path(f"other/{STEP}")), self.whole)
        # The same run went back and did that step anew: its own is replaced.
        self.change_manifest(self.step, created_unix_ms=1700000000999)
        self.assertIn("is gone", self.cairn("ckpt", "push", "run", "other").stdout)
        # What cannot be read is of use to nobody.
        self.write(f"other/{STEP}/manifest.json", theirs["manifest.json"][:-40])
        self.cairn("ckpt", "push", "run", "other")
        self.assertEqual(contents(self.path(f"other/{STEP}")), contents(self.step))
        self.assertEqual(os.listdir(self.path("other")), [STEP])

    def test_push_replaces_no_step_that_other_steps_refer_to(self):
        place = self.cold("place")
        before = {step: contents(place / step) for step in (STEP, "step-00000013")}
        (place / "step-00000013" / "references").unlink()  # the manifest says it too
        for options in ((), ("--overwrite",)):
            said = self.cairn("ckpt", "push", "run", "place", *options, code=69).stderr
            self.assertIn("step 13 there refers to its files", said)
        self.cairn("ckpt", "verify", "place/step-00000013")
        self.assertEqual(contents(place / STEP), before[STEP])
        self.assertEqual(sorted(os.listdir(place)), [STEP, "step-00000013"])
        shutil.rmtree(place / "step-00000013")
        self.cairn("ckpt", "push", "run", "place")
        self.assertEqual(contents(place / STEP), self.whole)

    def test_a_needed_step_that_is_replaced_is_told(self):
        here, late = self.cold("again/checkpoints"), "step-00000013"
        for form in ("text", "json"):
            place = self.cold(form)
            shutil.rmtree(place / late)
            self.change_manifest(place / STEP, created_unix_ms=1700000000999)
            if form == "text":
                self.assertIn("another checkpoint was there and is gone: step 12\n",
                              self.cairn("ckpt", "push", "again", form).stdout)
            else:
                told = self.cairn_json("ckpt", "push", "again", form)
                self.assertEqual((told["replaced"], told["replaced_steps"]), (True, [12]))
            self.assertEqual(contents(place / STEP), contents(here / STEP))
            self.assertEqual(self.cairn_json("ckpt", "push", "again", form)["replaced_steps"], [])

    def damage(self, file, at=20000):
        with open(file, "r+b") as f:
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1]))

    def test_damage_at_either_end_is_repaired_from_the_other(self):
        place, here = self.cold("place"), self.cold("again/checkpoints")
        shard, late = f"{STEP}/shard-00000-of-00002.h5", "step-00000013"
        whole = {step: contents(place / step) for step in (STEP, late)}

        def check(folder):
            self.assertEqual({step: contents(folder / step) for step in (STEP, late)}, whole)
            self.assertEqual(sorted(os.listdir(folder)), [STEP, late])

        for name in ("again", f"again/checkpoints/{late}"):  # whole at both ends
            self.assertIn("is there already", self.cairn("ckpt", "push", name, "place").stdout)
            self.assertIn("is there already", self.cairn("ckpt", "fetch", "place", "again").stdout)
        # Here: a step that another one needs is cut short, or has other bytes.
        for hurt in (lambda file: os.truncate(file, 5000), lambda file: self.damage(file), os.unlink):
            for what in (f"place/{STEP}", "place"):
                hurt(here / shard)
                self.assertIn("repaired: step 12", self.cairn("ckpt", "fetch", what, "again").stdout)
                check(here)
        self.damage(here / late / "manifest.json", 300)
        self.cairn("ckpt", "fetch", "place", "again")
        check(here)
        # There.
        for hurt in (lambda file: os.truncate(file, 5000), lambda file: self.damage(file), os.unlink):
            hurt(place / shard)
            self.assertEqual(self.cairn_json("ckpt", "push", "again", "place")["repaired"], [12])
            check(place)
        self.damage(place / late / "manifest.json", 300)
        self.cairn("ckpt", "push", "again", "place")
        check(place)
        shutil.rmtree(place / STEP)
        self.cairn("ckpt", "push", "again", "place")
        check(place)
        # Both: said, and nothing is made worse.
        self.damage(here / shard)
        self.damage(place / shard)
        before = contents(place / STEP)
        self.assertIn("shard-00000-of-00002.h5", self.cairn("ckpt", "push", "again", "place", code=65).stderr)
        self.assertIn("shard-00000-of-00002.h5", self.cairn("ckpt", "fetch", f"place/{STEP}", "again", code=65).stderr)
        self.assertEqual(contents(place / STEP), before)
        self.assertEqual(sorted(os.listdir(here)), [STEP, late])

    def test_a_step_is_not_put_into_another_ones_folder(self):
        self.cairn("ckpt", "push", "run", "place")
        before = contents(self.step)
        for command in (("push", "run", f"place/{STEP}"), ("push", "run", f"new/{STEP}/"),
                        ("fetch", "place", self.step), ("fetch", f"place/{STEP}", f"run/checkpoints/{STEP}/"),
                        ("fetch", "place", f"new/{STEP}"), ("push", "run", f"s3://bucket/prefix/{STEP}")):
            said = self.cairn("ckpt", *command, code=2).stderr
            self.assertIn("is the name of one step; give the folder of steps", said)
        self.assertIn("has no name", self.cairn("ckpt", "fetch", "place", "", code=2).stderr)
        self.assertIn("steps would be looked for in", self.cairn("ckpt", "push", "run", "run/", code=2).stderr)
        self.assertEqual(contents(self.step), before)
        self.assertEqual(sorted(os.listdir(self.folder.name)), ["place", "run"])

    def run_folder(self, name, run_id):
        """As a training leaves it."""
        self.write(f"{name}/run.json", json.dumps({"id": run_id, "name": name}))
        self.write(f"{name}/run.lock", "1")
        os.makedirs(self.path(f"{name}/checkpoints"), exist_ok=True)
        return pathlib.Path(self.path(name))

    def test_a_run_folder_in_use_is_left_alone(self):
        self.cairn("ckpt", "push", "run", "place")
        live = self.run_folder("live", "run-1")
        with open(live / "run.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for command in (("fetch", "place", "live"), ("fetch", "place", "live/checkpoints/"),
                            ("push", "run", "live/checkpoints"), ("push", "run", "live/checkpoints/.")):
                self.assertIn("in use by another cairn", self.cairn("ckpt", *command, code=73).stderr)
            self.assertEqual(os.listdir(live / "checkpoints"), [])
            self.cairn("ckpt", "push", "run", "live/elsewhere")  # not among its checkpoints
        self.cairn("ckpt", "fetch", "place", "live")
        self.assertEqual(contents(live / "checkpoints" / STEP), self.whole)

    def test_by_a_link_a_runs_checkpoints_are_the_runs_too(self):
        self.cairn("ckpt", "push", "run", "place")
        live = self.run_folder("live", "run-2")
        late = live / "checkpoints" / "step-00000013"
        shutil.copytree(self.step, late)
        self.change_manifest(late, step=13, run={"id": "run-2", "name": "live", "parents": []})
        os.symlink("live/checkpoints", self.path("link"))
        os.symlink("link", self.path("further"))
        commands = [command for link in ("link", "link/", "further")
                    for command in (("fetch", "place", link), ("push", "run", link))]
        with open(live / "run.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for command in (*commands, ("prune", "link", "--keep", "last(1)", "--yes"),
                            ("prune", "further", "--leftovers", "--yes")):
                self.assertIn("in use by another cairn", self.cairn("ckpt", *command, code=73).stderr)
        for command in commands:
            self.assertIn("has the checkpoints of run run-2, and step 12 is of run run-1",
                          self.cairn("ckpt", *command, code=2).stderr)
        self.assertEqual(os.listdir(live / "checkpoints"), [late.name])

    def test_the_holder_of_a_runs_lock_is_named(self):
        self.cairn("ckpt", "push", "run", "place")
        live = self.run_folder("live", "run-1")
        fetch = subprocess.Popen([self.program, "ckpt", "fetch", "place", "live", "--max-mb-per-s", "0.01"],
                                 cwd=self.folder.name, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + PATIENCE_S
            while not os.listdir(live / "checkpoints") and fetch.poll() is None:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.002)
            said = self.cairn("ckpt", "push", "run", "live/checkpoints", code=73).stderr
            self.assertRegex(said, rf"in use by another cairn \(pid {fetch.pid} on {re.escape(socket.gethostname())}, "
                                   r"since \d+-\d\d-\d\d \d\d:\d\d:\d\d UTC\), which has its own")
            self.assertNotIn("dead", said)
        finally:
            fetch.kill()
            fetch.wait()
        self.cairn("ckpt", "fetch", "place", "live")
        for command in (("fetch", "place", "live"), ("push", "run", "live/checkpoints"),
                        ("prune", "live", "--leftovers", "--yes")):
            done = subprocess.Popen([self.program, "ckpt", *command], cwd=self.folder.name, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL)
            self.assertEqual(done.wait(PATIENCE_S), 0)
            holder = json.loads((live / "run.lock").read_text())
            self.assertEqual((holder["pid"], holder["host"]), (done.pid, socket.gethostname()))
        # Of another host's agent nobody knows here whether it is alive: a file system may lock for a host alone.
        far = json.dumps({"host": "far", "pid": 7, "since": "then", "token": "1"})
        (live / "run.lock").write_text(far)
        self.cairn("ckpt", "prune", "live", "--leftovers", "--yes")
        self.assertEqual((live / "run.lock").read_text(), far)
        (live / "run.lock").unlink()
        (live / "run.lock").symlink_to("/dev/full")  # a full disk, which prune is for
        self.cairn("ckpt", "prune", "live", "--leftovers", "--yes")

    def test_a_run_held_by_another_host_says_what_to_do_when_that_is_dead(self):
        self.cairn("ckpt", "push", "run", "place")
        live = self.run_folder("live", "run-1")
        push = ("ckpt", "push", "run", "live/checkpoints")
        with open(live / "run.lock", "r+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for text, told in (({"host": "far\x1b", "pid": 7, "since": "then"}, r"(pid 7 on far\x1b, since then)"),
                               ({"host": "far"}, "(pid unknown on far)"), (4711, "(pid 4711)"),
                               ({"host": 1, "pid": "x"}, "(pid unknown)"), (None, "(pid unknown)")):
                (live / "run.lock").write_text(json.dumps(text) if text else "")
                said = self.cairn(*push, code=73).stderr
                self.assertIn(f"in use by another cairn {told}, which has its own retention", said)
                if "far" not in told:
                    self.assertNotIn("dead", said)
                    continue
                self.assertRegex(said, r"If far\S* is dead, the file system keeps its lock for a while: NFSv4 some 90 s")
                self.assertRegex(said, r"or when \S*live/run.lock has been removed, the same command resumes")
            (live / "run.lock").unlink()
            self.write("live/run.lock", "1")
            self.cairn(*push)

    def has_open(self, process, path):
        for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samefile(file, path):
                    return True
        return False

    def test_a_step_that_goes_while_it_is_pushed_is_told(self):
        lock = self.run_folder("live", "run-1") / "run.lock"
        push = subprocess.Popen([self.program, "ckpt", "push", "run", "live/checkpoints", "--max-mb-per-s", "0.02"],
                                cwd=self.folder.name, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE)
        self.addCleanup(push.kill)
        end = time.monotonic() + PATIENCE_S
        while not self.has_open(push, lock):
            self.assertLess(time.monotonic(), end)  # until it has found the step; reading it takes seconds
        os.rename(self.step, self.path("run/checkpoints/.trash"))  # as retention does it
        shutil.rmtree(self.path("run/checkpoints/.trash"))
        _, said = push.communicate(timeout=PATIENCE_S)
        self.assertEqual(push.returncode, 69, said)
        self.assertIn(f"{STEP}: was removed meanwhile", said)
        self.assertEqual(list(lock.parent.glob("checkpoints/step-*")), [])

    def test_no_step_of_another_run_gets_among_a_runs_own(self):
        self.cairn("ckpt", "push", "run", "place")
        other = self.run_folder("other", "run-2")
        late = "step-00000013"
        shutil.copytree(self.step, other / "checkpoints" / late)
        self.change_manifest(other / "checkpoints" / late, step=13,
                             run={"id": "run-2", "name": "other", "parents": []})
        for command in (("fetch", "place", "other"), ("push", "run", "other/checkpoints")):
            said = self.cairn("ckpt", *command, code=2).stderr
            self.assertIn("has the checkpoints of run run-2, and step 12 is of run run-1", said)
            self.assertIn("choose another folder", said)
        self.assertEqual(os.listdir(other / "checkpoints"), [late])
        # What that run copied to a place of its own comes back, also what it began with.
        shutil.copytree(self.path("place"), self.path("copies"))
        self.write("copies/run.json", json.dumps({"id": "run-2", "name": "other"}))
        self.cairn("ckpt", "fetch", "copies", "other")
        self.cairn("ckpt", "push", f"other/checkpoints/{STEP}", "copies")
        self.assertIn("has the checkpoints of run run-2", self.cairn("ckpt", "push", "run", "copies", code=2).stderr)
        # And what is there is repaired from any place.
        self.damage(other / "checkpoints" / STEP / "shard-00000-of-00002.h5")
        self.assertIn("repaired: step 12", self.cairn("ckpt", "fetch", "place", "other").stdout)
        # Into a folder that has nothing to mix with, anything goes.
        new = self.run_folder("new", "run-3")
        self.cairn("ckpt", "fetch", "place", "new")
        self.assertEqual(os.listdir(new / "checkpoints"), [STEP])

    def test_no_step_of_another_run_gets_into_a_place_that_a_run_has_made_its_own(self):
        self.cairn("ckpt", "push", "run", "place")
        mine = self.path("mine")
        shutil.copytree(self.step, f"{mine}/step-00000009")
        self.change_manifest(f"{mine}/step-00000009", step=9, run={"id": "run-2", "name": "mine", "parents": []})
        self.write("mine/run.json", json.dumps({"id": "run-2", "name": "mine"}))
        self.write("empty/run.json", json.dumps({"id": "run-3", "name": "empty"}))  # nothing copied there yet
        for place, owner in (("mine", "run-2"), ("empty", "run-3")):
            before = sorted(os.listdir(self.path(place)))
            for command in (("push", "run", place), ("fetch", "place", place), ("fetch", f"place/{STEP}", f"{place}/")):
                said = self.cairn("ckpt", *command, code=2).stderr
                self.assertIn(f"{self.path(place)} has the checkpoints of run {owner}, and step 12 is of run run-1", said)
                self.assertIn("choose another folder", said)
            self.assertEqual(sorted(os.listdir(self.path(place))), before)
        # That run's own steps go there, and a run.json of something else says nothing.
        self.change_manifest(self.path(f"place/{STEP}"), run={"id": "run-2", "name": "mine", "parents": []})
        self.cairn("ckpt", "fetch", "place", "mine")
        self.assertEqual(sorted(os.listdir(mine)), ["run.json", "step-00000009", STEP])
        self.write("other/run.json", "[1, 2]")
        self.cairn("ckpt", "fetch", "place", "other")

    def test_a_step_is_found_however_its_folder_is_written(self):
        os.symlink(self.step, self.path("link"))
        for i, name in enumerate((f"{self.step}/", f"{self.step}/.", f"run/../run/checkpoints//{STEP}///", "link", "link/")):
            self.assertEqual(self.cairn_json("ckpt", "push", name, f"place-{i}/.")["step"], 12)
            self.assertEqual(os.listdir(self.path(f"place-{i}")), [STEP])
        for i, name in enumerate((f"place-0/{STEP}/", f"place-0/{STEP}/.", "place-0/.", f"./place-0//{STEP}//")):
            self.cairn("ckpt", "fetch", name, f"back-{i}/")
            self.assertEqual(contents(self.path(f"back-{i}/{STEP}")), self.whole)
        done = subprocess.run([self.program, "ckpt", "fetch", STEP, "../back"], cwd=self.path("place-0"),
                              capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = subprocess.run([self.program, "ckpt", "push", ".", "../../../there"], cwd=self.step,
                              capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(contents(self.path(f"there/{STEP}")), self.whole)

    def test_a_place_that_is_full_is_told_and_nothing_stays_there(self):
        os.mkdir(self.path("small"))
        shell = ('mount -t tmpfs -o size=60k none small || exit 99; "$0" ckpt push run small; code=$?; ls -A small; '
                 'exit $code')
        done = subprocess.run(["unshare", "-rm", "sh", "-c", shell, self.program], cwd=self.folder.name,
                              capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode in (1, 99):
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 74, done.stderr)
        self.assertRegex(done.stderr, "small: [0-9]+ bytes free, step 12 needs [0-9]+")
        self.assertEqual(done.stdout, "")  # the list of what is there

    def test_mistakes_are_told(self):
        self.assertIn("no complete step", self.cairn("ckpt", "fetch", "nowhere", "x", code=2).stderr)
        self.assertIn("no complete step 7", self.cairn("ckpt", "fetch", "nowhere/step-00000007", "x", code=2).stderr)
        self.assertIn("expected a directory or s3://", self.cairn("ckpt", "push", "run", "gs://a/b", code=2).stderr)
        for rate in ("nan", "inf", "-1", "0", "1e-9", "1e300", "fast"):
            self.assertIn("expected a number from 0.001 to 1000000", self.cairn("ckpt", "push", "run", "place", "--max-mb-per-s", rate,
                                                                  code=2).stderr)
        for seconds in ("nan", "0", "inf", "long"):
            self.assertIn("expected a number from 1 to 86400", self.cairn("ckpt", "push", "run", "place", "--timeout", seconds,
                                                            code=2).stderr)
        for size, found in (("8KiB", 8192), ("5242879", 5242879), ("6GiB", 6 << 30)):
            said = self.cairn("ckpt", "push", "run", "s3://bucket/a", "--part-size", size, code=2).stderr
            self.assertIn(f"parts of {found} bytes (--part-size): an S3 store takes 5MiB to 5GiB", said)
        for typed in ("s3:/bucket/a", "S3:/bucket/a", "s3:bucket"):
            self.assertIn("expected a directory or s3://", self.cairn("ckpt", "ls", typed, code=2).stderr)
            self.assertIn("expected a directory or s3://", self.cairn("ckpt", "push", "run", typed, code=2).stderr)
            self.assertIn("expected a directory or s3://", self.cairn("ckpt", "fetch", typed, "x", code=2).stderr)
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "", "AWS_REGION": "here"}
        store = ["ckpt", "push", "run", "s3://bucket/a", "--endpoint"]
        self.assertRegex(self.cairn(*store, "http://127.0.0.1:99999", env=keys, code=2).stderr,
                         "URL using bad/illegal format|URL rejected: Port number")  # libcurl 7, 8
        for name, says in (("AWS_ACCESS_KEY_ID", None), ("AWS_SECRET_ACCESS_KEY", None), ("AWS_SESSION_TOKEN", None),
                           ("AWS_REGION", "the region")):
            said = self.cairn(*store, "http://127.0.0.1:9", env={**keys, name: "secret\n"}, code=2).stderr
            self.assertIn(f"S3: {says or name} holds a space, a line break", said)
            self.assertNotIn("secret", said)
        self.write("file", "in the way")
        self.assertIn("file", self.cairn("ckpt", "push", "run", "file", code=2).stderr)
        with open(os.path.join(self.step, "shard-00001-of-00002.h5"), "r+b") as f:
            f.seek(20000)
            f.write(b"damaged")
        self.assertIn("shard-00001-of-00002.h5", self.cairn("ckpt", "push", "run", "place", code=65).stderr)
        self.assertEqual(os.listdir(self.path("place")) if os.path.isdir(self.path("place")) else [], [])

    def test_killed_again_and_again_it_ends_with_a_whole_copy(self):
        # Slow enough to be killed while its files come; each life keeps what the one before had sent.
        place = pathlib.Path(self.path("place"))
        for files in (1, 1, 2):
            done = subprocess.Popen([self.program, "ckpt", "push", "run", "place", "--max-mb-per-s", "0.2"],
                                    cwd=self.folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            end = time.monotonic() + PATIENCE_S
            while len(list(place.glob("*/*"))) < files:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.002)
            done.send_signal(signal.SIGKILL)
            done.wait()
            for step in place.glob("step-*"):  # what counts is whole
                self.assertEqual(contents(step), self.whole)
        self.cairn("ckpt", "push", "run", "place")
        self.assertEqual(contents(self.path(f"place/{STEP}")), self.whole)
        self.assertEqual(os.listdir(self.path("place")), [STEP])


class StoreTest(CopyTest):
    @classmethod
    def setUpClass(cls):
        # Beside the program: /tmp may be a file system without extended attributes.
        root = pathlib.Path(cls.program).parent / "test-tmp"
        root.mkdir(exist_ok=True)
        cls.store_folder = tempfile.mkdtemp(prefix="store-", dir=root)
        try:
            cls.store = object_store.Store(cls.store_folder)
        except object_store.Missing as missing:
            shutil.rmtree(cls.store_folder)
            raise unittest.SkipTest(str(missing))

    @classmethod
    def tearDownClass(cls):
        cls.store.close()
        shutil.rmtree(cls.store_folder)

    def setUp(self):
        super().setUp()
        self.prefix = f"{self._testMethodName}/run"
        self.place = f"s3://{self.store.bucket}/{self.prefix}"

    def s3(self, *args, proxy=None, code=0, **env):
        environment = self.store.environment(proxy.endpoint if proxy else None) | {"HOME": self.folder.name} | env
        done = subprocess.run([self.program, "ckpt", *map(str, args)], capture_output=True, text=True,
                              timeout=PATIENCE_S, cwd=self.folder.name, env=environment, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, f"ckpt {args}\nstdout: {done.stdout}\nstderr: {done.stderr}")
        for text in (done.stdout, done.stderr):
            self.assertNotIn(self.store.secret, text)
        return done

    def s3_json(self, *args, **kwargs):
        return json.loads(self.s3(*args, "--json", **kwargs).stdout)

    def proxy(self, decide=None, **tls):
        out = object_store.Proxy(self.store, decide, **tls)
        self.addCleanup(out.close)
        return out

    def stored(self, prefix=None):
        prefix = prefix or self.prefix
        return {key[len(prefix) + 1:]: self.store.get(key) for key in self.store.keys(prefix + "/")}

    def expected(self):
        return {f"{os.path.basename(self.step)}/{name}": data for name, data in self.whole.items()}

    def large(self):
        """The run's checkpoint is one with three files of two parts of 5 MiB, which S3 takes at least."""
        shutil.rmtree(self.step)
        self.cairn("import", self.big_folder("hf", layers=1), "run/checkpoints", "--mesh", "dp=3")
        self.step = self.path("run/checkpoints/step-00000000")
        self.whole = contents(self.step)
        self.bytes = sum(map(len, self.whole.values()))
        self.assertEqual(sum(5 << 20 < len(data) < 10 << 20 for data in self.whole.values()), 3)

    def test_a_checkpoint_goes_and_comes_back_in_parts_and_in_one(self):
        self.large()
        for part in ("16MiB", "5MiB"):
            prefix = f"{self.prefix}-{part}"
            place = f"s3://{self.store.bucket}/{prefix}"
            proxy = self.proxy()
            sent = self.s3_json("push", "run", place, "--part-size", part, proxy=proxy)
            self.assertEqual((sent["bytes"], sent["sent_bytes"], sent["kept_bytes"]), (self.bytes, self.bytes, 0))
            self.assertEqual(proxy.count("PUT .*partNumber="), 6 if part == "5MiB" else 0)
            self.assertEqual(self.stored(prefix), self.expected())
            self.assertTrue(self.s3_json("push", "run", place)["was_there"])
            back = f"back-{part}"
            self.assertEqual(self.s3_json("fetch", place, back)["received_bytes"], self.bytes)
            self.assertEqual(contents(self.path(f"{back}/step-00000000")), self.whole)
        self.assertEqual(self.store.uploads(), [])
        self.assertIn("there: 0", self.s3("fetch", self.place + "-5MiB/step-00000007", "x", code=2).stderr)

    def test_ls_tells_what_lies_in_a_store(self):
        self.assertIn(f"{self.place}: no checkpoints", self.s3("ls", self.place).stdout)
        here = self.cold("again/checkpoints")
        self.s3("push", "again", self.place)
        proxy = self.proxy()
        told = self.s3_json("ls", self.place, proxy=proxy)
        self.assertEqual(proxy.count("[.]h5"), 0)
        local = self.cairn_json("ckpt", "ls", "again")
        self.assertEqual((told["dir"], told["run"], told["newest_complete"]), (self.place, None, 13))
        self.assertEqual([step["step"] for step in told["checkpoints"]], [12, 13])
        for step, same in zip(told["checkpoints"], local["checkpoints"]):
            name = f"step-{step['step']:08d}"
            expected = {"dir": f"{self.place}/{name}", "size_bytes": sum(map(len, contents(here / name).values()))}
            self.assertEqual(step, {key: same[key] for key in step} | expected)
        said = self.s3("ls", f"{self.place}/").stdout
        self.assertEqual(len(said.splitlines()), 4)
        self.assertRegex(said, "step-00000012 .* complete\n")
        self.assertRegex(said, "step-00000013 .* complete, the newest")
        self.assertNotIn("step-00000013", self.s3("ls", f"{self.place}/{STEP}").stdout)
        self.assertIn("no step 7", self.s3("ls", f"{self.place}/step-00000007").stdout)
        # A file of step 12, which 13 refers to, has another size; then 12 has no manifest; whose they are.
        self.store.put(f"{self.prefix}/{STEP}/shard-00000-of-00002.h5", b"short")
        self.assertRegex(self.s3("ls", self.place).stdout, "damaged: .*shard-00000-of-00002.h5: 5 bytes, the manifest has")
        self.store.delete(f"{self.prefix}/{STEP}/manifest.json")
        self.store.put(f"{self.prefix}/run.json", b'{"id": "run-1", "name": "again"}')
        told = self.s3_json("ls", self.place)
        self.assertEqual(told["run"], "run-1")
        self.assertIs(told["checkpoints"][0]["complete"], False)
        self.assertIn("manifest.json is not there", told["checkpoints"][0]["problem"])
        self.assertIn("incomplete: ", self.s3("ls", self.place).stdout)
        # A store that is away is no empty one.
        self.s3("ls", self.place, "--endpoint", "http://127.0.0.1:1", code=69)

    def test_a_copy_without_its_manifest_does_not_count(self):
        self.s3("push", "run", self.place)
        self.store.delete(f"{self.prefix}/{STEP}/manifest.json")
        self.assertIn("12 (incomplete)", self.s3("fetch", self.place, "back", code=2).stderr)
        proxy = self.proxy()
        self.assertEqual(self.s3_json("push", "run", self.place, proxy=proxy)["kept_bytes"],
                         self.bytes - len(self.whole["manifest.json"]))
        self.assertEqual(proxy.count("^PUT"), 1)  # the manifest: the rest is there

    def test_the_manifest_comes_last(self):
        self.large()
        proxy = self.proxy()
        self.s3("push", "run", self.place, "--part-size", "5MiB", proxy=proxy)
        writes = [f"{m} {p}" for m, p, _ in proxy.seen if m in ("PUT", "POST")]
        self.assertRegex(writes[-1], "^PUT .*/manifest.json$")
        self.assertEqual(sum("manifest.json" in w for w in writes), 1)

    def test_killed_at_any_request_the_next_push_sends_only_what_is_missing(self):
        self.large()
        counting = self.proxy()
        self.s3("push", "run", self.place + "-all", "--part-size", "5MiB", proxy=counting)
        requests = len(counting.seen)
        self.assertGreater(requests, 20)
        draw = random.Random(11)
        for at in sorted(draw.sample(range(requests), min(KILLS, requests))):
            prefix = f"{self.prefix}-{at}"
            place = f"s3://{self.store.bucket}/{prefix}"
            reached, count, lock = threading.Event(), [0], threading.Lock()

            def decide(method, path, head):
                with lock:
                    count[0] += 1
                    if count[0] <= at:
                        return None
                reached.set()
                return "silence"

            proxy = self.proxy(decide)
            with self.subTest(request=at):
                push = subprocess.Popen([self.program, "ckpt", "push", "run", place, "--part-size", "5MiB"],
                                        cwd=self.folder.name, env=self.store.environment(proxy.endpoint),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                self.assertTrue(reached.wait(PATIENCE_S))
                push.send_signal(signal.SIGKILL)
                push.wait()
                proxy.settle()  # parts go side by side: others were on their way
                committed = f"{prefix}/step-00000000/manifest.json" in self.store.keys(prefix)
                self.assertEqual(committed, at == requests - 1)  # only the last read-back was still to come
                again = self.proxy()
                self.s3("push", "run", place, "--part-size", "5MiB", proxy=again)
                self.assertEqual(self.stored(prefix), self.expected())
                before = {p for m, p, _ in proxy.seen if m == "PUT"}
                after = {p for m, p, _ in again.seen if m == "PUT"}
                uploads = lambda paths: {re.sub("uploadId=[^&]*", "", p) for p in paths}
                self.assertEqual(uploads(before) & uploads(after), set(), "sent twice")

    def test_parts_go_side_by_side_unless_a_rate_is_asked_for(self):
        self.large()
        pair, alone = threading.Barrier(2), []

        def decide(method, path, head):
            if "partNumber=" in path:
                pair.wait(PATIENCE_S)  # until both parts of the file are under way

        self.s3("push", "run", self.place, "--part-size", "5MiB", proxy=self.proxy(decide))
        self.assertEqual(self.stored(), self.expected())
        slow = self.proxy(lambda method, path, head: alone.append(slow.under_way) if "partNumber=" in path else None)
        self.s3("push", "run", self.place + "-slow", "--part-size", "5MiB", "--max-mb-per-s", "200", proxy=slow)
        self.assertEqual(alone, [0] * 6)

    def test_a_part_that_fails_ends_the_push_and_the_others_stay(self):
        self.large()
        down = self.proxy(lambda method, path, head: "refuse" if "partNumber=2" in path else None)
        self.assertIn("SlowDown", self.s3("push", "run", self.place, "--part-size", "5MiB", proxy=down, code=69).stderr)
        again = self.proxy()
        self.s3("push", "run", self.place, "--part-size", "5MiB", proxy=again)
        self.assertEqual(again.count("PUT .*partNumber="), 5)  # one of the first file was there
        self.assertEqual(self.stored(), self.expected())

    def test_every_request_fails_once_and_the_copy_is_made(self):
        self.large()
        failed, lock = set(), threading.Lock()
        kinds = ["refuse", "reset", "cut", ("short", 0), "refuse"]

        def decide(method, path, head):
            with lock:
                if (method, path) in failed:
                    return None
                failed.add((method, path))
                return kinds[len(failed) % len(kinds)]

        self.s3("push", "run", self.place, "--part-size", "5MiB", proxy=self.proxy(decide))
        self.assertGreater(len(failed), 10)
        self.assertEqual(self.stored(), self.expected())
        failed.clear()
        kinds[:] = [("short", 10000), "reset", ("short", 1)]
        self.s3("fetch", self.place, "back", proxy=self.proxy(decide))
        self.assertEqual(contents(self.path("back/step-00000000")), self.whole)
        failed.clear()
        kinds[:] = ["end"]
        self.s3("fetch", self.place, "again", proxy=self.proxy(lambda method, path, head: decide(method, path, head)
                                                               if "list-type" not in path and method == "GET" else None))
        self.assertGreater(len(failed), 3)
        self.assertEqual(contents(self.path("again/step-00000000")), self.whole)

    def test_damage_there_is_found_by_reading_back(self):
        shard = f"{STEP}/shard-00000-of-00002.h5"
        lies = [1]

        def decide(method, path, head):
            if method == "GET" and path.endswith(shard) and lies[0] > 0:
                lies[0] -= 1
                return ("damage", 12345)

        proxy = self.proxy(decide)
        self.s3("push", "run", self.place, proxy=proxy)
        self.assertEqual(lies[0], 0)
        self.assertEqual(proxy.count("PUT .*shard-00000"), 2)  # once more
        self.assertEqual(self.stored(), self.expected())
        lies[0] = 1000
        other = self.place + "-2"
        said = self.s3("push", "run", other, proxy=proxy, code=74).stderr
        self.assertIn("shard-00000-of-00002.h5", said)
        self.assertIn("read back differs", said)
        self.assertNotIn(f"{self.prefix}-2/{STEP}/manifest.json", self.store.keys(self.prefix))
        # Damaged at rest, long after.
        data = bytearray(self.whole["shard-00001-of-00002.h5"])
        data[21000] ^= 1
        self.store.put(f"{self.prefix}/{STEP}/shard-00001-of-00002.h5", bytes(data))
        said = self.s3("fetch", self.place, "back", code=65).stderr
        self.assertRegex(said, "shard-00001-of-00002.h5: .*chunk")
        self.assertEqual(os.listdir(self.path("back")), [])

    def test_damage_at_rest_is_repaired_and_another_runs_copy_stays(self):
        for options in ((), ("--no-read-back",)):
            self.s3("push", "run", self.place)
            self.store.put(f"{self.prefix}/{STEP}/shard-00001-of-00002.h5", b"x" * 41760)
            self.assertEqual(self.s3_json("push", "run", self.place, *options)["repaired"], [12])
            self.assertEqual(self.stored(), self.expected())
        self.change_manifest(self.step, run={"id": "run-2", "name": "other", "parents": []})
        self.assertIn("of another run", self.s3("push", "run", self.place, code=2).stderr)
        self.assertEqual(self.stored(), self.expected())
        self.assertTrue(self.s3_json("push", "run", self.place, "--overwrite")["replaced"])
        self.whole = contents(self.step)
        self.assertEqual(self.stored(), self.expected())

    def test_a_store_that_refuses_or_is_silent_ends_in_a_sentence(self):
        down = self.proxy(lambda *request: "refuse")
        self.assertIn("HTTP 503 SlowDown: Reduce your request rate.",
                      self.s3("push", "run", self.place, proxy=down, code=69).stderr)
        silent = self.proxy(lambda *request: "silence")
        begin = time.monotonic()
        self.assertRegex(self.s3("push", "run", self.place, "--timeout", 1, proxy=silent, code=69).stderr,
                         "(?i)too slow|timed out")
        drip = self.proxy(lambda *request: "drip")
        self.s3("fetch", self.place, "x", "--timeout", 1, proxy=drip, code=69)
        self.assertLess(time.monotonic() - begin, 100)
        self.s3("push", "run", self.place, "--endpoint", "http://127.0.0.1:1", code=69)
        self.assertIn("endpoint", self.s3("push", "run", self.place, "--endpoint", "h:9000", code=2).stderr)
        self.assertIn("NoSuchBucket", self.s3("push", "run", "s3://no-such-bucket/x", code=2).stderr)
        said = self.s3("push", "run", self.place, code=2, AWS_SECRET_ACCESS_KEY="wrong").stderr
        self.assertIn("SignatureDoesNotMatch", said)
        self.assertIn("look at AWS_ACCESS_KEY_ID", said)

    def test_tls_with_an_authority_of_its_own(self):
        folder = pathlib.Path(self.path("tls"))
        folder.mkdir()
        object_store.make_certificates(folder)
        proxies = {name: self.proxy(certificate=folder / f"{name}.pem") for name in ("good", "elsewhere", "expired")}
        ca = folder / "ca.pem"
        self.s3("push", "run", self.place, "--ca-file", ca, proxy=proxies["good"])
        self.assertEqual(self.stored(), self.expected())
        self.s3("fetch", self.place, "back", proxy=proxies["good"], AWS_CA_BUNDLE=str(ca))
        self.assertEqual(contents(self.path(f"back/{STEP}")), self.whole)
        # The option wins over the environment.
        self.s3("fetch", self.place, "again", "--ca-file", ca, proxy=proxies["good"],
                AWS_CA_BUNDLE=str(folder / "other-ca.pem"))

        def refused(expected, *options, proxy="good", **env):
            begin = len(proxies[proxy].seen)
            said = self.s3("fetch", self.place, "x", *options, proxy=proxies[proxy], code=2, **env).stderr
            self.assertRegex(said, expected)
            self.assertEqual(len(proxies[proxy].seen), begin)  # nothing was asked of a store that is not believed
            self.assertEqual(len(said.strip().splitlines()), 1)

        refused("certificate.*not signed by any of the system's authorities: name the PEM file")
        refused("not signed by any of .*other-ca.pem", "--ca-file", folder / "other-ca.pem")
        refused("expired.*needs a new certificate", "--ca-file", ca, proxy="expired")
        refused("another host's: is the endpoint's name right", "--ca-file", ca, proxy="elsewhere")
        refused("no-such.pem .ca_file.: No such file", "--ca-file", "no-such.pem")
        refused("no-such.pem .AWS_CA_BUNDLE.: No such file", AWS_CA_BUNDLE="no-such.pem")
        pathlib.Path(self.path("no.pem")).write_text("nothing\n")
        refused("no.pem is no PEM file of certificates: name one as ca_file", "--ca-file", "no.pem")
        # A store that speaks plain HTTP, or TLS too old.
        self.assertIn("SSL", self.s3("fetch", self.place, "x", "--endpoint", self.store.endpoint.replace("http", "https"),
                                     "--timeout", 5, code=69).stderr)
        old = self.proxy(certificate=folder / "good.pem", newest=ssl.TLSVersion.TLSv1_1)
        self.assertRegex(self.s3("fetch", self.place, "x", "--ca-file", ca, proxy=old, code=69).stderr, "(?i)ssl|tls")

    def test_a_connection_torn_under_tls_goes_on(self):
        folder = pathlib.Path(self.path("tls"))
        folder.mkdir()
        object_store.make_certificates(folder)
        torn = []

        def tear(method, path, head):
            if method != "PUT" or len(torn) == 2:
                return None
            torn.append(path)
            return "reset" if len(torn) == 1 else "cut"

        self.s3("push", "run", self.place, "--ca-file", folder / "ca.pem",
                proxy=self.proxy(tear, certificate=folder / "good.pem"))
        self.assertEqual(len(torn), 2)
        self.assertEqual(self.stored(), self.expected())

    def test_odd_answers_are_refused(self):
        listing = ("<ListBucketResult>%s<Contents><Key>" + self.prefix + "/" + STEP + "/manifest.json</Key><Size>%s</Size>"
                   "</Contents></ListBucketResult>")
        cases = [
            (200, b"", "not an S3 store's answer"),
            (200, b"<html><body>Welcome", "not an S3 store's answer"),
            (200, b"<html>Welcome</html>", "expected <ListBucketResult>"),
            (200, b"\0\xff" * 1000, "not an S3 store's answer"),
            (200, (listing % ("", "-5")).encode(), "a size of"),
            (200, (listing % ("", "99999999999999999999")).encode(), "a size of"),
            (200, (listing % ("<IsTruncated>true</IsTruncated>", "5")).encode(), "does not end"),
            (301, b"<Error><Code>PermanentRedirect</Code><Message>use the other one</Message></Error>", "region"),
            (400, b"<Error><Code>\x1b[31mBad</Code><Message>" + b"x" * 100000 + b"</Message></Error>", "HTTP 400"),
            (418, b"<Error><Code>", "HTTP 418"),
            (200, b"<a>" * 200000, "not an S3 store's answer"),
            (200, b" " * (20 << 20), "longer than"),
        ]
        for status, body, expected in cases:
            with self.subTest(status=status, body=body[:80]):
                proxy = self.proxy(lambda *request, answer=("answer", status, body): answer)
                done = subprocess.run([self.program, "ckpt", "fetch", self.place, "back"], capture_output=True,
                                      timeout=PATIENCE_S, cwd=self.folder.name, stdin=subprocess.DEVNULL,
                                      env=self.store.environment(proxy.endpoint))
                self.assertIn(done.returncode, (2, 69))
                self.assertIn(expected, done.stderr.decode())
                self.assertNotIn(b"\x1b", done.stderr)
                self.assertLess(len(done.stderr), 5000)

    def test_names_that_would_leave_the_folder_are_never_used(self):
        self.s3("push", "run", self.place)
        for name in ("../evil", "..", ".hidden", "a/b"):
            key = f"{self.prefix}/{STEP}/{name}"
            body = self.store.request("GET", "", {"list-type": "2", "prefix": self.prefix + "/"})[1]
            body = body.replace(b"</ListBucketResult>",
                                f"<Contents><Key>{key}</Key><Size>3</Size></Contents></ListBucketResult>".encode())

            def decide(method, path, head):
                return ("answer", 200, body) if "list-type" in path else None

            self.s3("fetch", self.place, f"deep/{len(name)}/back", proxy=self.proxy(decide))
            self.assertEqual(sorted(contents(self.path(f"deep/{len(name)}/back/{STEP}"))), sorted(self.whole))
        self.assertEqual([p for p in pathlib.Path(self.folder.name).rglob("*evil*")], [])

    def test_credentials_come_from_the_file_too_and_a_session_token_is_sent(self):
        self.write(".aws/credentials", "[other]\naws_access_key_id = x\naws_secret_access_key = y\n\n"
                   f"[mine]\naws_access_key_id = {self.store.access}\naws_secret_access_key={self.store.secret}\n")
        unset = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        self.s3("push", "run", self.place, AWS_PROFILE="mine", **unset)
        self.assertIn("[default]", self.s3("push", "run", self.place, code=2, **unset).stderr)
        heads = []
        proxy = self.proxy(lambda method, path, head: heads.append(head))
        self.s3("fetch", self.place, "back", proxy=proxy, AWS_SESSION_TOKEN="a-token")
        self.assertTrue(heads)
        for head in heads:
            self.assertIn(b"x-amz-security-token: a-token", head)
            self.assertRegex(head, rb"SignedHeaders=[^,]*x-amz-security-token")

    def test_the_throttle_holds(self):
        begin = time.monotonic()
        self.s3("push", "run", self.place, "--max-mb-per-s", "0.1")
        self.assertGreater(time.monotonic() - begin, 1.5)  # 90 KB verified, sent and read back at 100 KB/s


del CopyTest  # a base, not a test

if __name__ == "__main__":
    main()
