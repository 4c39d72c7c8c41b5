"""bench/gpu_test passes nothing where no GPU was used. Its rehearsal, all of it on the CPU, takes minutes: by hand."""

import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class GpuTest(unittest.TestCase):
    def test_a_machine_without_a_device_is_told_and_nothing_is_passed(self):
        done = subprocess.run([ROOT / "bench/gpu_test", "--cairn", PROGRAM], capture_output=True, text=True, timeout=100,
                              env=dict(os.environ, CAIRN_NVIDIA_ROOT="/nonexistent"))
        self.assertEqual(done.returncode, 77, done.stdout + done.stderr)
        self.assertIn("NOT RUN: no GPU can be used here: devices: no NVIDIA device", done.stdout)
        self.assertNotIn("PASS", done.stdout)
        self.assertNotIn("ok ", done.stdout)

    def test_a_program_that_is_not_there_is_an_error(self):
        done = subprocess.run([ROOT / "bench/gpu_test", "--cairn", "/nonexistent/cairn"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent/cairn: --cairn names the program", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
