"""Hosts of their own for tests (tests/cluster/hosts): each with its name, address, process numbers and memory. Needs
root; without it a test is skipped, and with CI=true red."""

import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HOSTS = pathlib.Path(__file__).resolve().parent / "hosts"


def missing():
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    tools = [name for name in ("ip", "nft", "nsenter", "unshare") if shutil.which(name) is None]
    return f"{', '.join(tools)}: not installed (tools/setup test)" if tools else ""


class Bed(unittest.TestCase):
    shared = "bind"
    count = 4
    life_s = 900  # beyond any test's timeout: hosts of a test that was killed end by themselves

    def setUp(self):
        if self.shared == "fuse" and shutil.which("bindfs") is None:
            self.skipTest("bindfs: not installed")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cairn-cluster-"))
        self.environment = {**os.environ, "CLUSTER": secrets.token_hex(4), "CLUSTER_DIR": str(self.folder / "hosts")}
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.addCleanup(self.hosts, "down")
        self.hosts("up", str(self.count), "--life", str(self.life_s), "--shared", self.shared, "--shm", "64m")

    def hosts(self, *words):
        done = subprocess.run([HOSTS, *words], env=self.environment, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, f"hosts {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_on(self, index, *command):
        """In the background; its log."""
        log = self.folder / f"h{index}.{time.monotonic_ns()}.log"
        log.touch()  # the host may take a while to open it
        self.hosts("start", f"h{index}", str(log), *map(str, command))
        return log


def main():
    why = missing()
    if why and os.environ.get("CI") != "true":
        print(f"skipped: {why}")
        sys.exit(77)
    assert not why, why
    unittest.main(verbosity=2)
