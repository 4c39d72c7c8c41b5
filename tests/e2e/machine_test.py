"""Machines that lack something: file systems without locks, containers that refuse system calls, folders of a group."""

import ctypes
import errno
import os
import platform
import signal
import subprocess
import unittest

from harness import RunTest, main

NUMBERS = {"flock": 73, "fsync": 74, "pidfd_open": 434}  # of x86-64


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]


def refusing(call, error):
    """A function for a child before its exec: from then on the kernel answers `call` with `error`."""
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    code = (Instruction * 4)(Instruction(load, 0, 0, 0), Instruction(equal, 0, 1, NUMBERS[call]),
                             Instruction(answer, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
                             Instruction(answer, 0, 0, 0x7FFF0000))          # SECCOMP_RET_ALLOW
    program = Program(len(code), code)
    libc = ctypes.CDLL(None, use_errno=True)

    def enter():
        no_new_privileges, seccomp, filtered = 38, 22, 2  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, filtered, ctypes.byref(program), 0, 0):
            os._exit(99)
    enter.keeps = code, program
    return enter


class DeniedCallsTest(RunTest):
    def setUp(self):
        super().setUp()
        if platform.machine() != "x86_64" or subprocess.run(["true"], preexec_fn=refusing("flock", errno.ENOSYS)).returncode:
            self.skipTest("this kernel filters no system calls for a test")
        self.small = self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3)

    def run_without(self, call, error, *args, code=0):
        done = subprocess.run([self.program, *map(str, args)], cwd=self.folder, capture_output=True, text=True, timeout=120,
                              preexec_fn=refusing(call, error), stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def owners(self, run):
        return sorted(path.name for path in (self.folder / run).glob("run.owner-*"))

    def test_a_run_on_a_file_system_without_locks(self):
        for error in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            run = f"r{error}"
            said = self.run_without("flock", error, "train", self.small, "--run", run)
            self.assertIn("has no locks (flock), so run.owner-00000001 keeps other starts out", said)
            self.assertEqual(self.owners(run), [])
        self.cairn("ckpt", "verify", self.folder / run)

    def test_without_locks_a_run_has_one_owner(self):
        forever = self.recipe(name="long", steps=1000000, tp=1, pp=1, dp=1, sp="false", save=100)
        log = open(self.folder / "first.out", "wb")
        self.addCleanup(log.close)
        first = subprocess.Popen([self.program, "train", forever, "--run", self.folder / "r", "--threads", "1"], cwd=self.folder,
                                 stdout=log, stderr=log, preexec_fn=refusing("flock", errno.ENOSYS), start_new_session=True)
        self.addCleanup(lambda: first.poll() is None and os.killpg(first.pid, signal.SIGKILL))
        self.until(lambda: first.poll() is not None or self.last_step("r") >= 1, "the first step")
        start = ("train", forever, "--run", self.folder / "r")
        said = self.run_without("flock", errno.ENOSYS, *start, code=73)
        self.assertRegex(said, rf"in use by another cairn \(pid {first.pid} on .*run.owner-00000001 says so")
        # One who has locks heeds the owner too; and so do commands that change the run.
        self.assertIn("run.owner-00000001", self.cairn(*start, code=73).stderr.decode())
        self.assertIn("run.owner-00000001", self.cairn("ckpt", "prune", self.folder / "r", "--keep", "last(1)", "--yes",
                                                       code=73).stderr.decode())
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(60)
        # Its process is gone for certain: the next start of this machine takes over.
        short = ("train", forever, "--run", self.folder / "r", "--set", f"stop=T.steps({self.last_step('r') + 200})",
                 "--accept", "stop", "--accept", "optimizer.lr")
        self.assertIn("run.owner-00000002 keeps", self.run_without("flock", errno.ENOSYS, *short))
        self.assertEqual(self.owners("r"), ["run.owner-00000001"])

    def test_an_owner_on_another_machine_is_named_with_what_to_do(self):
        self.run_without("flock", errno.ENOSYS, "train", self.small, "--run", "r")
        owner = self.folder / "r/run.owner-00000003"
        owner.write_text('{"host": "elsewhere", "pid": 7, "start": 1, "boot": "of another machine", "since": "then"}\n')
        said = self.run_without("flock", errno.ENOSYS, "train", self.small, "--run", "r", code=73)
        self.assertRegex(said, r"pid 7 on elsewhere.*when that cairn is dead, remove this file")
        self.assertEqual(self.owners("r"), [owner.name])
        owner.unlink()
        self.run_without("flock", errno.ENOSYS, "train", self.small, "--run", "r")

    def test_token_sets_are_made_without_locks(self):
        (self.folder / "a.txt").write_text("in the beginning\n" * 50)
        make = ("data", "tokenize", "a.txt", "--out", "set", "--tokenizer", "bytes")
        self.run_without("flock", errno.ENOLCK, *make)
        (self.folder / "set.bin.tmp").write_text("left by a dead process")
        said = self.run_without("flock", errno.ENOLCK, *make, "--overwrite", code=2)
        self.assertIn("has no locks (flock) to say whether another process writes this set; if none does, remove it", said)

    def test_ranks_are_watched_without_pidfds(self):
        for error in (errno.EPERM, errno.ENOSYS):
            recipe = self.recipe(steps=8, tp=1, pp=1, dp=2, sp="false", save=2)
            said = self.run_without("pidfd_open", error, "train", recipe, "--run", f"r{error}", "--kill", "1@4", "--threads", 1)
            self.assertEqual(self.last_step(f"r{error}"), 8, said)

    def test_where_fsync_is_refused_the_file_system_is_synced(self):
        for error in (errno.EINVAL, errno.ENOSYS):
            self.run_without("fsync", error, "train", self.small, "--run", f"r{error}")
            self.cairn("ckpt", "verify", self.folder / f"r{error}")


class GroupTest(RunTest):
    def test_modes_follow_the_umask(self):
        before = os.umask(0o002)
        self.addCleanup(os.umask, before)
        self.train(self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3), "r")
        self.cairn("convert", self.folder / "r", "hf", "--to", "hf")
        self.cairn("ckpt", "push", self.folder / "r", "mirror")
        for top in ("r", "hf", "mirror"):
            paths = [self.folder / top, *(self.folder / top).rglob("*")]
            closed = [f"{path}: {path.stat().st_mode:o}" for path in paths
                      if path.stat().st_mode & 0o777 != (0o775 if path.is_dir() else 0o664)]
            self.assertEqual(closed, [])
        os.umask(0o077)
        self.train(self.recipe(steps=6, tp=1, pp=1, dp=1, sp="false", save=3), "own")
        self.assertEqual([path for path in (self.folder / "own").rglob("*") if path.stat().st_mode & 0o077], [])


if __name__ == "__main__":
    main()
