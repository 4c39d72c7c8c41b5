"""Runs the built program for the tests of this folder; the program's path is the first argument of each test."""

import json
import os
import subprocess
import sys
import tempfile
import unittest


class ProgramTest(unittest.TestCase):
    program = None

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="cairn-tools-")
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, content):
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(content if isinstance(content, bytes) else content.encode())
        return path

    def cairn(self, *args, code=0, env=None, **kwargs):
        """Runs `cairn args` in the test's folder and checks the exit code."""
        full_env = dict(os.environ)
        full_env.update(env or {})
        done = subprocess.run([self.program, *map(str, args)], capture_output=True, text=True, timeout=60,
                              cwd=self.folder.name, env=full_env, stdin=subprocess.DEVNULL, **kwargs)
        self.assertEqual(done.returncode, code, f"cairn {args}\nstdout: {done.stdout}\nstderr: {done.stderr}")
        return done

    def cairn_json(self, *args, code=0):
        done = self.cairn(*args, "--json", code=code)
        return json.loads(done.stdout)


def main():
    ProgramTest.program = os.path.abspath(sys.argv.pop(1))
    unittest.main()
