"""bench/gpu_day: both halves whole on doubles of a device, PyTorch, nvidia-smi and compute-sanitizer, and what it promises of
limits, files and summaries, by tables of this test's own."""

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests/support"), str(ROOT / "bench")]
sys.dont_write_bytecode = True
from double_device import DoubleDevice  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
FACTS = {"device": "a card, driver 1", "card": "a card", "driver": "1", "commit": "c", "date": "d"}
# Stand for programs that a machine with a GPU has: a Python with PyTorch, NVIDIA's tools, the kernels' tests on a device.
FAKES = {"python": """[ "$1" = -c ] && exit 0
echo '{"step_ms": [10.0, 11.0], "torch": "of a test", "attention": "flash"}'""",
         "nvidia-smi": 'echo "12 MiB"', "compute-sanitizer": """while [ "${1#-}" != "$1" ]; do case $1 in --error-exitcode | --tool) shift ;; esac; shift; done
exec "$@\"""",
         "gpu_ops_tests": """exec {tests} --source-file=*ops/ops_test.cc --test-case='attention gives*' --no-version"""}


def gpu_day():
    """bench/gpu_day as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_day", str(ROOT / "bench/gpu_day"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_day", loader))
    loader.exec_module(module)
    return module


DAY = gpu_day()


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class InFolder(unittest.TestCase):
    def setUp(self):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpu-day-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)


class Rehearsal(InFolder):
    """The program's own tables."""

    def setUp(self):
        super().setUp()
        self.device = DoubleDevice(self.folder, PROGRAM, PROGRAM.parent / "gpu_kernel_bench")
        for name, text in FAKES.items():
            path = self.device.bin / name
            path.write_text("#!/bin/sh\n" + text.replace("{tests}", str(PROGRAM.parent / "simt_plain_tests")) + "\n")
            path.chmod(0o755)
        self.environment = {**os.environ, **self.device.environment, "PATH": f"{self.device.bin}:{os.environ['PATH']}"}

    def rehearse(self, half, code=77, *words):
        out = self.folder / half
        done = subprocess.run([ROOT / "bench/gpu_day", half, "--rehearse", "--out", out, "--cairn", self.device.program,
                               "--torch", self.device.bin / "python", *words], capture_output=True, text=True, timeout=600,
                              env=self.environment, stdin=subprocess.DEVNULL)
        log = (out / "rows.log").read_text() if (out / "rows.log").exists() else ""
        self.assertEqual(done.returncode, code, done.stdout + done.stderr + log[-5000:])
        return done.stdout, json.loads((out / "summary.json").read_text()), log

    def check(self, half, limit_s, kept):
        said, summary, log = self.rehearse(half)
        self.assertNotIn("NOT AS PROMISED", said)
        self.assertNotIn("misuse", log)
        self.assertRegex(said, r"NOT RUN: a rehearsal on a double, \d+ rows right, 0 wrong\n$")
        rows = {row["name"]: row for row in summary["rows"]}
        self.assertEqual(list(rows), [row.name for row in DAY.ROWS[half]])
        without = {name: row["why"] for name, row in rows.items() if row["outcome"] == "left out"}
        helped = subprocess.run([PROGRAM, "train", "--help"], capture_output=True, text=True).stdout
        timed = "--time-kernels" in helped or half == "second"
        self.assertEqual(without, {} if timed else {"times of kernels": "this cairn train has no --time-kernels"})
        self.assertEqual({row["outcome"] for row in rows.values()} - {"left out"}, {"ok"})
        self.assertLessEqual(sum(row["limit_s"] for row in rows.values()), limit_s)
        files = {path.name for path in (self.folder / half).iterdir()}
        self.assertLessEqual(len(files), 8)
        self.assertEqual(files - {"kernel_times.json"}, {"summary.json", "summary.txt", "rows.log", *kept})
        self.assertEqual(("a double, no device", "580.65.06"), (summary["card"], summary["driver"]))
        self.assertRegex(summary["commit"], r"^cairn .* \(build .*\)$")
        self.assertRegex(summary["date"], r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC$")
        return rows

    def test_the_first_half(self):
        rows = self.check("first", 400, {"machine.json", "metrics.jsonl", "kernels.jsonl", "tuning.json"})
        self.assertEqual(len(rows["steps"]["result"]["snapshot never"]["step_ms"]), 2)
        self.assertEqual(rows["steps by cuDNN"]["result"]["attention"], "cudnn")
        self.assertEqual(rows["PyTorch"]["result"]["attention"], "flash")
        self.assertIn("a device opens", (self.folder / "first/machine.json").read_text())
        kernels = [json.loads(line) for line in (self.folder / "first/kernels.jsonl").read_text().splitlines()]
        self.assertEqual({row["model"] for row in kernels if row.get("model")}, {"tiny-gpt", "tiny-llama"})
        self.assertRegex((self.folder / "first/rows.log").read_text(), r"test cases: +3 \| +3 passed")

    def test_the_second_half(self):
        rows = self.check("second", 330, {"metrics.jsonl", "tuning.json"})
        choices = json.loads((self.folder / "second/tuning.json").read_text())["choices"]
        self.assertEqual({choice["card"] for choice in choices}, {"Double (4 multiprocessors)"})
        self.assertGreater(sum(choice["op"] == "product" for choice in choices), 20)  # of both models
        self.assertGreaterEqual(sum(choice["op"] == "layout" for choice in choices), 2)
        self.assertEqual(rows["124M by first proposals"]["result"]["products"], "first proposals")
        self.assertIn("snapshot_ms", rows["snapshots"]["result"]["snapshot every 4"])
        self.assertEqual(rows["Llama"]["result"]["model"], "tiny-llama")

    def test_without_pytorch_and_nvidias_tools_their_rows_are_left_out_and_wrong_kernels_stop_the_half(self):
        (self.device.bin / "python").write_text("#!/bin/sh\nexit 1\n")
        (self.device.bin / "gpu_ops_tests").write_text("#!/bin/sh\necho wrong; exit 1\n")
        self.environment["CAIRN_DOUBLE_CUDNN"] = "91000"
        said, summary, _ = self.rehearse("first", 1)
        told = [(row["outcome"], row.get("why")) for row in summary["rows"]]
        self.assertEqual(told[2], ("failed", "exit code 1"))
        self.assertEqual(set(told[3:]), {("left out", "kernels are right failed")})
        out = self.folder / "second"
        _, summary, _ = self.rehearse("second")
        left_out = {row["name"]: row["why"] for row in summary["rows"] if row["outcome"] == "left out"}
        self.assertEqual(set(left_out), {"1.5B by cuDNN", "PyTorch, 1.5B"})
        self.assertRegex(left_out["1.5B by cuDNN"], "^no cuDNN: ")
        self.assertRegex(left_out["PyTorch, 1.5B"], "^no PyTorch: .* has none")
        self.assertTrue(out.exists())

    def test_a_folder_with_files_a_program_without_a_double_and_a_machine_without_a_gpu(self):
        (self.folder / "first").mkdir()
        (self.folder / "first/summary.json").write_text("{}")
        self.rehearse("first", 1)
        for words, code, why in ((("--rehearse", "--cairn", PROGRAM), 1, "--rehearse runs on a double of a device"),
                                 (("--cairn", PROGRAM), 77, "NOT RUN: no GPU can be used here"),
                                 (("--archive", __file__), 1, "is no archive of tools/package --cuda"),
                                 (("--archive", __file__, "--cairn", PROGRAM), 2, "--archive has its own program")):
            done = subprocess.run([ROOT / "bench/gpu_day", "first", "--out", self.folder / "new", *words], capture_output=True,
                                  text=True, timeout=100, env={**os.environ, "CAIRN_NVIDIA_ROOT": "/nonexistent"})
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            self.assertIn(why, done.stdout + done.stderr)
            self.assertNotIn("PASS", done.stdout)


class Promises(InFolder):
    """By tables of this test's own, in a process of its own each: a half kills all that is below its process."""

    def half(self, rows, limit_s=100, end=None, missing=()):
        """The summary of a half with these rows, and the files that it wrote; ended by a signal once `end` exists."""
        out = self.folder / f"out-{len(list(self.folder.iterdir()))}"
        out.mkdir()
        running = os.fork()
        if running == 0:
            try:
                def cut(*_):
                    raise DAY.Cut()
                signal.signal(signal.SIGTERM, cut)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                DAY.adopt_orphans()
                DAY.Day("first", rows, limit_s, out, FACTS, {}, dict(missing)).run()
                os._exit(0)
            except DAY.Cut:
                os._exit(3)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        while end and not end.exists():
            self.assertEqual(os.waitpid(running, os.WNOHANG)[0], 0)
            time.sleep(0.01)
        if end:
            os.kill(running, signal.SIGTERM)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(running, 0)[1]), 3 if end else 0)
        self.out = out
        return json.loads((out / "summary.json").read_text())

    def test_a_row_over_its_limit_is_killed_with_all_that_it_started_and_the_next_one_runs(self):
        pids = self.folder / "pids"
        # A child in a session of its own, whose parent is gone.
        hides = f"(setsid sh -c 'echo $$ >>{pids}; exec sleep 600' &); echo $$ >>{pids}; while [ $(wc -l <{pids}) -lt 2 ]; do :; done; echo begun; exec sleep 600"
        summary = self.half([DAY.Row("stands", ("sh", "-c", hides), 2, ""), DAY.Row("fine", ("echo", "done"), 2, "")])
        stands, fine = summary["rows"]
        self.assertEqual((stands["outcome"], stands["why"], stands["said"]), ("out of time", "killed after 2 s", ["begun"]))
        self.assertEqual((fine["outcome"], fine["said"]), ("ok", ["done"]))
        left = [int(pid) for pid in pids.read_text().split()]
        self.assertEqual(len(left), 2)
        self.assertEqual([pid for pid in left if alive(pid)], [])
        self.assertEqual(DAY.mistakes([DAY.Row("stands", (), 2, ""), DAY.Row("fine", (), 2, "")], 100, self.out, summary), [])

    def test_a_row_that_needs_more_than_is_left_or_what_is_missing_is_left_out_with_the_reason(self):
        summary = self.half([DAY.Row("short", ("true",), 2, ""), DAY.Row("long", ("true",), 9, ""),
                             DAY.Row("other", ("true",), 2, "", needs=("torch",)), DAY.Row("bad", ("false",), 2, ""),
                             DAY.Row("none", ("/nonexistent",), 2, "")], limit_s=10, missing={"torch": "no PyTorch"})
        told = [(row["outcome"], row.get("why", "")) for row in summary["rows"]]
        self.assertEqual(told[0], ("ok", ""))
        self.assertEqual(told[1], ("left out", "no time left: 10 s, it may take 9 s"))
        self.assertEqual(told[2:4], [("left out", "no PyTorch"), ("failed", "exit code 1")])
        self.assertRegex(told[4][1], "^cannot be started: ")

    def test_a_failed_row_that_stops_leaves_the_others_out(self):
        rows = [DAY.Row("right", ("false",), 2, "", stops=True), DAY.Row("next", ("true",), 2, "")]
        self.assertEqual([(row["outcome"], row["why"]) for row in self.half(rows)["rows"]],
                         [("failed", "exit code 1"), ("left out", "right failed")])

    def test_a_half_that_is_cut_leaves_a_summary_and_no_process(self):
        pid = self.folder / "pid"
        rows = [DAY.Row("first", ("echo", '{"ms": 3}'), 2, ""),
                DAY.Row("cut", ("sh", "-c", f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"), 60, ""),
                DAY.Row("last", ("true",), 2, "")]
        summary = self.half(rows, end=pid)
        self.assertEqual([row["outcome"] for row in summary["rows"]], ["ok", "cut", "not reached"])
        self.assertEqual(summary["rows"][0]["result"], {"ms": 3})
        self.assertFalse(alive(int(pid.read_text())))
        self.assertIn("         cut  cut (", (self.out / "summary.txt").read_text())
        self.assertEqual(DAY.mistakes(rows, 100, self.out, summary), ["last: missing"])

    def test_missing_rows_late_ones_and_more_files_are_mistakes(self):
        rows = [DAY.Row("one", (), 5, ""), DAY.Row("two", (), 5, "")]
        good = {"took_s": 9, "rows": [{"name": "one", "outcome": "ok", "took_s": 4}, {"name": "two", "outcome": "left out"}]}
        self.assertEqual(DAY.mistakes(rows, 10, self.folder, good), [])
        self.assertEqual(DAY.mistakes(rows, 10, self.folder, {**good, "rows": good["rows"][:1]}),
                         ["rows ['one'] instead of ['one', 'two']", "two: missing"])
        late = {"took_s": 11, "rows": [{**good["rows"][0], "took_s": 7.5}, good["rows"][1]]}
        self.assertEqual(DAY.mistakes(rows, 10, self.folder, late),
                         ["one: took 7.5 s, its limit is 5 s", "took 11 s, the limit is 10 s"])
        self.assertEqual(DAY.mistakes(rows, 9, self.folder, good), ["limits of 10 s in a half of 9 s"])
        for k in range(9):
            (self.folder / f"f{k}").write_text("")
        self.assertRegex(DAY.mistakes(rows, 10, self.folder, good)[0], "^9 files, 8 are promised: f0, ")


if __name__ == "__main__":
    if not DoubleDevice.module_of(PROGRAM).exists():
        print(f"skipped: {DoubleDevice.module_of(PROGRAM)} is not there")
        sys.exit(77)
    unittest.main(verbosity=2)
