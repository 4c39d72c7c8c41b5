"""tools/package --cuda: what a machine with a GPU and NVIDIA's libraries lacks of GPU tests and benches, in less than 45 MB. In
another folder it takes nothing from the builds, and where no device is it passes nothing."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|mvec|pthread|dl|rt|util|anl|resolv|nss_\w+))(-[\d.]+)?\.so[.\d]*")
UCX_MODULE = re.compile(r"/ucx/lib\w+\.so|/libfuse3\.so")  # tests/tools/package_test.py


class GpuPackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = CUDA / "test-tmp"
        scratch.mkdir(exist_ok=True)
        cls.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu-package-", dir=scratch))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        done = subprocess.run([ROOT / "tools/package", "--build", PROGRAM.parent, "--cuda", CUDA, "--out", cls.scratch / "out"],
                              capture_output=True, text=True)
        if done.returncode == 1 and "build it" in done.stderr and os.environ.get("CI") != "true":
            raise unittest.SkipTest(done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        cls.archive = pathlib.Path(done.stdout.splitlines()[-1])
        subprocess.run(["tar", "-C", cls.scratch, "-xf", cls.archive], check=True)
        cls.folder = cls.scratch / "elsewhere"
        (cls.scratch / cls.archive.name.removesuffix(".tar.xz")).rename(cls.folder)
        shutil.rmtree(cls.scratch / "out" / cls.archive.name.removesuffix(".tar.xz"))

    def run_there(self, name, *args, **environment):
        return subprocess.run([self.folder / name, *args], capture_output=True, text=True, timeout=120,
                              stdin=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment})

    def test_the_archive_has_less_than_45_mb(self):
        size = self.archive.stat().st_size
        print(f"{self.archive.name}: {size * 1e-6:.1f} MB")
        self.assertLess(size, 45_000_000)
        self.assertTrue(self.archive.name.endswith("-cuda.tar.xz"))

    def test_programs_take_the_folders_libraries_and_none_of_nvidias_is_in_it(self):
        files = [*(self.folder / "bin").iterdir(), *(self.folder / "lib").glob("libcairn_*.so")]
        self.assertEqual({file.name for file in files}, {"cairn", "gpu_ops_tests", "gpu_kernel_bench", "gpu_comm_bench", "device_bench",
                                                         "libcairn_gloo.so", "libcairn_cuda.so"})
        for file in files:
            said = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
            self.assertNotIn("not found", said)
            theirs = [path for path in re.findall(r"=> (/.+) \(0x", said)
                      if not os.path.abspath(path).startswith(f"{self.folder}/")]
            self.assertEqual([path for path in theirs if not GLIBC.fullmatch(os.path.basename(path))
                              and not UCX_MODULE.search(path)], [], file.name)
        self.assertEqual([path.name for path in (self.folder / "lib").iterdir()
                          if re.match("lib(cuda|cublas|cudnn|nccl|nv)", path.name)], [])

    def test_the_program_finds_its_kernels(self):
        said = self.run_there("bin/cairn", "doctor").stdout
        self.assertRegex(said, rf"ok +kernels for CUDA: {self.folder}/lib/libcairn_cuda.so, with CUDA runtime 13")

    def test_the_commands_run_there_and_pass_nothing_without_a_device(self):
        for name, *words in (("gpu_test",), ("gpu_kernels",), ("gpu_all",), ("gpu_step",), ("gpu_cluster",),
                             ("gpu_day", "first", "--out", self.scratch / "day")):
            with self.subTest(name):
                done = self.run_there(f"bench/{name}", *words, CAIRN_NVIDIA_ROOT="/nonexistent")
                self.assertEqual(done.returncode, 77, done.stdout + done.stderr)
                self.assertIn("NOT RUN: no GPU can be used here", done.stdout)
                self.assertNotIn("PASS", done.stdout)

    def test_what_they_run_starts_there(self):
        listed = self.run_there("bin/gpu_ops_tests", "--list-test-cases", "--no-version")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertIn("attention gives what the CPU's gives", listed.stdout)
        if pathlib.Path("/dev/nvidia0").exists():
            return
        for name, words in (("gpu_kernel_bench", "NOT RUN: no GPU can be used here"), ("device_bench", "skipped: ")):
            done = self.run_there(f"bin/{name}")
            self.assertEqual(done.returncode, 77, done.stdout + done.stderr)
            self.assertIn(words, done.stdout)


if __name__ == "__main__":
    PROGRAM, CUDA = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
    if not PROGRAM.exists():
        print(f"skipped: {PROGRAM} is not built")
        sys.exit(77)
    unittest.main()
