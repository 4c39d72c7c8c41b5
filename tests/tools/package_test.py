"""tools/package: the folder that it makes runs where nothing of the build is, and takes nothing from elsewhere but glibc."""

import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What UCX, a library of Debian 13's Gloo, opens by itself where the host has it, with what that needs.
UCX_MODULE = re.compile(r"/ucx/lib\w+\.so|/libfuse3\.so")
GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|mvec|pthread|dl|rt|util|anl|resolv|nss_\w+))(-[\d.]+)?\.so[.\d]*")
PATIENCE_S = 120
PROGRAM = None


def run(*args, code=0, cwd=None, **env):
    """Output of a command that finds nothing by its environment."""
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env})
    if done.returncode != code:
        raise AssertionError(f"{args}: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}")
    return done


def mapped_libraries(pid):
    return {path for path in re.findall(r"(?m) (/.*)$", pathlib.Path(f"/proc/{pid}/maps").read_text())
            if re.search(r"\.so[.\d]*$", path)}


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        cls.scratch = pathlib.Path(tempfile.mkdtemp(prefix="package-", dir=scratch))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        done = subprocess.run([ROOT / "tools/package", "--build", PROGRAM.parent, "--out", cls.scratch / "first",
                               "--wheel", "--deb"],
                              capture_output=True, text=True)
        if done.returncode == 1 and "build it again" in done.stderr and os.environ.get("CI") != "true":
            raise unittest.SkipTest(done.stderr)  # a commit since the build
        assert done.returncode == 0, done.stdout + done.stderr
        cls.archive = pathlib.Path(done.stdout.splitlines()[-1])
        run("tar", "-C", cls.scratch, "-xf", cls.archive)
        cls.folder = cls.scratch / "another name"
        (cls.scratch / cls.archive.name.removesuffix(".tar.gz")).rename(cls.folder)
        for path in (cls.archive, *cls.archive.parent.glob("*.whl"), *cls.archive.parent.glob("*.deb")):
            shutil.move(path, cls.scratch)
        (cls.wheel,), (cls.deb,) = cls.scratch.glob("*.whl"), cls.scratch.glob("*.deb")
        shutil.rmtree(cls.scratch / "first")
        cls.archive = cls.scratch / cls.archive.name
        cls.cairn = cls.folder / "bin/cairn"

    def test_an_archive_that_is_larger_than_it_may_be_is_refused(self):
        out = self.scratch / "large"
        done = subprocess.run([ROOT / "tools/package", "--build", PROGRAM.parent, "--out", out, "--most", "1"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"package: the archive of .* has \d+ bytes; it must stay below 1 MB")
        self.assertEqual(list(out.glob("*.tar.gz")) + list(out.glob(".*.tar.gz")), [])
        shutil.rmtree(out)

    def test_two_ranks_train_with_the_libraries_of_the_folder_alone(self):
        self.assertEqual(run(self.cairn, "--version").stdout, run(PROGRAM, "--version").stdout)
        work = self.scratch / "work"
        (work / "data").mkdir(parents=True)
        (work / "text").write_text("".join(p.read_text() for p in sorted((self.folder / "docs").glob("*.md"))))
        run(self.cairn, "data", "tokenize", "text", "--out", "data/kjv_text_document", "--tokenizer", "bytes", cwd=work)
        with open(work / "out", "w") as out:
            agent = subprocess.Popen([self.cairn, "train", self.folder / "recipes/tiny.lua", "--nproc", "2", "--run", "run",
                                      "--set", "stop=T.steps(1000000)", "--set", "batch.micro=4", "--threads", "1"],
                                     cwd=work, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            end = time.monotonic() + PATIENCE_S
            while '"step"' not in (work / "run/metrics.jsonl").read_text() if (work / "run/metrics.jsonl").exists() else True:
                self.assertIsNone(agent.poll(), (work / "out").read_text())
                self.assertLess(time.monotonic(), end, (work / "out").read_text())
                time.sleep(0.05)
            children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            processes = [agent.pid] + [pid for pid in children if b"--rank" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
            self.assertEqual(len(processes), 3)
            for pid in processes:
                libraries = mapped_libraries(pid)
                ours = {path for path in libraries if path.startswith(f"{self.folder}/")}
                self.assertEqual(ours, self.libraries_of(self.cairn))
                theirs = {p for p in libraries - ours if not UCX_MODULE.search(p)}
                self.assertEqual([p for p in theirs if not GLIBC.fullmatch(os.path.basename(p))], [])
                self.assertTrue(theirs)  # glibc's
            (work / "run/stop").touch()
            self.assertEqual(agent.wait(PATIENCE_S), 0, (work / "out").read_text())
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        run(self.cairn, "ckpt", "verify", "run", cwd=work)

    def libraries_of(self, file):
        """Those of the folder that it is linked with."""
        found = re.findall(r"=> (/.+) \(0x", run("ldd", file).stdout)
        return {str(pathlib.Path(path).resolve()) for path in found if str(self.folder) in str(pathlib.Path(path).resolve())}

    def test_the_folder_has_what_program_and_module_need_and_no_more(self):
        module = self.folder / "lib/libcairn_gloo.so"
        needed = self.libraries_of(self.cairn) | self.libraries_of(module) | {str(module)}
        self.assertEqual(needed, {str(path) for path in (self.folder / "lib").iterdir()})
        self.assertNotIn("libgloo", "".join(self.libraries_of(self.cairn)))
        for file in (self.cairn, module):
            found = re.findall(r"=> (/.+) \(0x", run("ldd", file).stdout)
            theirs = [path for path in found if not path.startswith(f"{self.folder}/")]
            self.assertEqual([p for p in theirs if not GLIBC.fullmatch(os.path.basename(p)) and not UCX_MODULE.search(p)], [])

    def test_a_run_with_hosts_takes_the_module_of_the_folder(self):
        work = self.scratch / "hosts"
        (work / "data").mkdir(parents=True)
        (work / "text").write_text("".join(p.read_text() for p in sorted((self.folder / "docs").glob("*.md"))))
        run(self.cairn, "data", "tokenize", "text", "--out", "data/kjv_text_document", "--tokenizer", "bytes", cwd=work)
        command = [self.cairn, "train", self.folder / "recipes/tiny.lua", "--nproc", "1", "--run", "run", "--threads", "1",
                   "--set", "stop=T.steps(20)", "--set", "batch.micro=4", "--hosts", "127.0.1.1,127.0.1.2"]
        with open(work / "out", "w") as out:
            agents = [subprocess.Popen([*command, "--host-index", str(k)], cwd=work, env={"PATH": "/usr/bin:/bin"},
                                       stdin=subprocess.DEVNULL, stdout=out, stderr=out) for k in range(2)]
        try:
            for agent in agents:
                self.assertEqual(agent.wait(PATIENCE_S), 0, (work / "out").read_text())
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        module = self.folder / "lib/libcairn_gloo.so"
        module.rename(self.scratch / "away")
        try:
            refused = run(*command, "--host-index", "0", cwd=work, code=2)
            self.assertIn(f"need libcairn_gloo.so, which is neither {self.folder}/bin/libcairn_gloo.so nor {module}",
                          refused.stdout + refused.stderr)
        finally:
            (self.scratch / "away").rename(module)

    def test_no_library_of_glibc_is_in_the_folder(self):
        self.assertEqual([p.name for p in (self.folder / "lib").iterdir() if GLIBC.fullmatch(p.name)], [])

    def test_a_search_path_of_the_environment_changes_nothing(self):
        other = self.scratch / "modules"
        other.mkdir()
        for library in (self.folder / "lib").iterdir():
            (other / library.name).write_text("not a library")
        run(PROGRAM, "--version", code=127, LD_LIBRARY_PATH=str(other))
        run(self.cairn, "--version", LD_LIBRARY_PATH=str(other))

    def test_it_is_called_by_a_link_too(self):
        (self.scratch / "link").symlink_to(self.cairn)
        run(self.scratch / "link", "--version")

    def test_the_name_tells_version_and_the_oldest_glibc(self):
        version = run(self.cairn, "--version").stdout.split()[1]
        needed = run("readelf", "--version-info", "--wide", self.cairn, *(self.folder / "lib").iterdir()).stdout
        oldest = max(tuple(map(int, v.split("."))) for v in re.findall(r"Name: GLIBC_([\d.]+)", needed))
        self.assertEqual(self.archive.name, f"cairn-{version}-x86_64-glibc{'.'.join(map(str, oldest))}.tar.gz")

    def test_each_library_has_its_licence_and_those_that_this_names(self):
        told = dict(re.findall(r"(?m)^  (\S+): (\S+) \S+, source \S+ \S+$", (self.folder / "PACKAGE").read_text()))
        self.assertEqual(set(told), {p.name for p in (self.folder / "lib").iterdir()} - {"libcairn_gloo.so"})
        licences = self.folder / "licenses"
        for package in {*told.values(), "nlohmann-json3-dev", "libcli11-dev"}:
            text = (licences / package).read_text(errors="replace")
            self.assertGreater(len(text), 200, package)
            for common in re.findall(r"/usr/share/common-licenses/([\w.-]*\w)", text):
                self.assertTrue((licences / "common-licenses" / common).is_file(), f"{package}: {common}")
        self.assertTrue((self.folder / "LICENSE").is_file())

    def test_the_program_keeps_the_names_of_its_functions(self):
        self.assertIn("cairn::tools", run("nm", "--demangle", self.cairn).stdout)
        self.assertNotIn(".debug_line", run("readelf", "--sections", "--wide", self.cairn).stdout)

    def test_a_second_package_has_the_same_bytes(self):
        again = run(ROOT / "tools/package", "--build", PROGRAM.parent, "--out", self.scratch / "again", "--wheel", "--deb").stdout
        again = pathlib.Path(again.splitlines()[-1])
        self.assertEqual(again.name, self.archive.name)
        for first in (self.archive, self.wheel, self.deb):
            self.assertTrue((again.parent / first.name).read_bytes() == first.read_bytes(), first.name)

    def test_a_wheel_puts_program_and_module_into_an_environment(self):
        place = self.scratch / "environment"
        # numpy is Debian's; nothing is fetched.
        done = subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", place], capture_output=True, text=True)
        if done.returncode and os.environ.get("CI") != "true":
            self.skipTest(done.stdout)  # without python3-venv
        self.assertEqual(done.returncode, 0, done.stdout)
        run(place / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", self.wheel)
        self.assertEqual(run(place / "bin/cairn", "--version").stdout, run(PROGRAM, "--version").stdout)
        self.assertEqual(run(place / "bin/cairn", "no-such-command", code=2).stdout, "")
        script = self.scratch / "use.py"
        script.write_text(textwrap.dedent("""\
            import pathlib, subprocess, sys
            import cairn
            golden, out = sys.argv[1:]
            steps = cairn.open(golden)
            tensors = dict(steps.checkpoint())
            written = cairn.write(out, 7, tensors, like=steps.checkpoint())
            subprocess.run([cairn.program(), "ckpt", "verify", written], check=True, stdout=subprocess.DEVNULL)
            mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libxxhash" in line or "libzstd" in line}
            assert mapped and all(path.startswith(str(pathlib.Path(cairn.__file__).parent)) for path in mapped), mapped
            print(len(tensors), written.name)
            """))
        said = run(place / "bin/python", script, ROOT / "tests/golden/checkpoint-v1-cold", self.scratch / "written", cwd=self.scratch)
        self.assertRegex(said.stdout, r"^\d step-00000007\n$")

    def test_a_debian_package_needs_glibc_alone_and_runs_where_it_is_unpacked(self):
        place = self.scratch / "system"
        run("dpkg-deb", "--extract", self.deb, place)
        fields = dict(line.split(": ", 1) for line in run("dpkg-deb", "--field", self.deb).stdout.splitlines() if ": " in line)
        oldest = re.search(r"glibc([\d.]+)\.tar", self.archive.name)[1]
        self.assertEqual(fields["Depends"], f"libc6 (>= {oldest})")
        self.assertEqual(fields["Version"], self.wheel.name.split("-")[1])
        self.assertEqual(run(place / "usr/bin/cairn", "--version").stdout, run(PROGRAM, "--version").stdout)
        found = re.findall(r"=> (/.+) \(0x", run("ldd", place / "usr/lib/cairn/bin/cairn").stdout)
        theirs = [path for path in found if not os.path.realpath(path).startswith(f"{place}/usr/lib/cairn/lib/")]
        self.assertEqual([p for p in theirs if not GLIBC.fullmatch(os.path.basename(p)) and not UCX_MODULE.search(p)], [])
        (self.scratch / "sums").write_text(run("dpkg-deb", "--info", self.deb, "md5sums").stdout)
        run("md5sum", "--check", "--quiet", self.scratch / "sums", cwd=place)
        page = gzip.decompress((place / "usr/share/man/man1/cairn.1.gz").read_bytes()).decode()
        self.assertIn("ckpt", page)
        owners = run("dpkg-deb", "--contents", self.deb).stdout.splitlines()
        self.assertEqual([line for line in owners if "root/root" not in line], [])


class RefusalTest(unittest.TestCase):
    """In a clone of a few files, with a program that is none."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cairn-package-")
        self.addCleanup(folder.cleanup)
        self.clone = pathlib.Path(folder.name).resolve() / "clone"
        for name in ("tools/package", "cmake/BuildVersion.cmake"):
            (self.clone / name).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, self.clone / name)
        (self.clone / ".gitignore").write_text("/build/\n")
        self.git("init", "-q")
        self.git("add", ".")
        self.git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "x")
        self.version = f"0.1.0-g{self.git('rev-parse', '--short=12', 'HEAD')}"

    def git(self, *args):
        return run("git", "-C", self.clone, *args).stdout.strip()

    def build(self, version, home=None):
        folder = self.clone / "build/release"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={home or self.clone}\n"
                                               "CMAKE_PROJECT_VERSION:STATIC=0.1.0\n")
        (folder / "cairn").write_text(f"#!/bin/sh\necho 'cairn {version} (build 00)'\n")
        (folder / "cairn").chmod(0o755)

    def refused(self, *args, code=1):
        done = run(self.clone / "tools/package", *args, code=code)
        self.assertEqual(done.stdout, "")
        return done.stderr

    def tree_version(self):
        out = self.clone / "build/version"
        run("cmake", "-D", f"SOURCE={self.clone}", "-D", "VERSION=0.1.0", "-D", f"OUT={out}", "-P",
            self.clone / "cmake/BuildVersion.cmake")
        return out.read_text().split('"')[1]

    def test_without_a_build_it_says_how_to_make_one(self):
        self.assertIn("build/release/cairn is not there; build it first:\npackage:   cmake --preset release", self.refused())
        self.assertIn("/nowhere/cairn is not there", self.refused("--build", "/nowhere"))

    def test_an_unknown_option_and_a_missing_value_are_misuse(self):
        self.assertTrue(self.refused("--bild", "x", code=2).startswith("package: --bild: no such option\nMakes a folder"))
        self.assertIn("--build DIR", self.refused("--build", code=2))

    def test_a_program_of_another_commit_is_refused(self):
        self.build("0.1.0-g000000000000")
        self.assertIn(f"cairn is 0.1.0-g000000000000, and the tree is {self.version} now; build it again", self.refused())

    def test_a_build_of_another_tree_is_refused(self):
        self.build(self.version, home="/elsewhere")
        self.assertIn("build/release is a build of /elsewhere, and not of", self.refused())

    def test_a_tree_that_differs_from_its_commit_is_dirty(self):
        self.assertEqual(self.tree_version(), self.version)
        (self.clone / "new.cc").touch()
        self.assertEqual(self.tree_version(), f"{self.version}-dirty")
        self.build(self.version)
        self.assertIn(f"the tree is {self.version}-dirty now", self.refused())

    def test_an_unpacked_archive_in_another_clone_has_no_commit(self):
        shutil.rmtree(self.clone / ".git")
        self.assertEqual(self.tree_version(), "0.1.0")
        run("git", "init", "-q", self.clone.parent)
        self.assertEqual(self.tree_version(), "0.1.0")


if __name__ == "__main__":
    PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
