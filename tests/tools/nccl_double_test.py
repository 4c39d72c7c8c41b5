"""Several ranks of a run, each on a device of its own, that communicate by NCCL: on doubles of the devices, of their
libraries and of NCCL. Which way ranks communicate is chosen once, told, written down, and refused with what to do."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_device import DoubleDevice  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import RECIPE, write_tokens  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()


class NcclDouble(unittest.TestCase):
    devices = 2

    def setUp(self):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="nccl-double-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, PROGRAM, gpus=self.devices)
        write_tokens(self.folder / "tokens", 3000)

    def recipe(self, name, tp=1, pp=1, dp=1, zero=1, sp="false", steps=3):
        path = self.folder / f"{name}.lua"
        text = RECIPE.format(name=name, steps=steps, precision="fp32", tp=tp, pp=pp, dp=dp, zero=zero, sp=sp, save=steps,
                             keep=1, prefix=self.folder / "tokens")
        for old, new in (("over = T.steps(4)", "over = T.steps(1)"), ("samples = 8", "samples = 4"), ("context = 32", "context = 8"),
                         ("width = 32", "width = 16")):
            self.assertIn(old, text)
            text = text.replace(old, new)
        path.write_text(text)
        return path

    def cairn(self, *args, code=0, without=(), **environment):
        env = {**os.environ, **self.device.environment, **environment}
        for name in without:
            env.pop(name, None)
        done = subprocess.run([self.device.program, *map(str, args)], capture_output=True, text=True, timeout=110, env=env)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("misuse", done.stdout + done.stderr)
        return done.stdout + done.stderr

    def train(self, recipe, run, *args, **how):
        said = self.cairn("train", recipe, "--run", self.folder / run, "--threads", 1, "--device", "cuda", *args, **how)
        metrics = self.folder / run / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return said, {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "step" in line}

    def start_of(self, run):
        lines = (self.folder / run / "events.jsonl").read_text().splitlines()
        return next(event for event in map(json.loads, lines) if event.get("event") == "start")

    def test_ranks_train_by_nccl_with_the_bits_of_ranks_that_go_through_the_host(self):
        layouts = {"replicas": dict(dp=2, zero=1), "divided": dict(dp=2, zero=3), "tensors": dict(tp=2, sp="true"),
                   "stages": dict(pp=2)}
        for seed, (name, layout) in enumerate(layouts.items()):
            with self.subTest(name):
                recipe = self.recipe(name, **layout)
                staged, wanted = self.train(recipe, f"{name}-staged", "--comm", "staged")
                self.assertIn("ranks communicate through the host's memory: --comm staged\n", staged)
                self.assertEqual(self.start_of(f"{name}-staged")["communication"],
                                 {"engine": "staged", "why": "--comm staged"})
                self.assertEqual(sorted(wanted), [1, 2, 3])
                said, found = self.train(recipe, f"{name}-nccl", CAIRN_DOUBLE_SEED=str(seed))
                self.assertIn("ranks communicate by NCCL 2.28.9 (", said)
                self.assertEqual(found, wanted)

    def test_what_ranks_have_of_nccl_is_written_down_and_a_person_s_word_wins(self):
        recipe = self.recipe("recorded", dp=2)
        self.train(recipe, "recorded", NCCL_NVLS_ENABLE="1", NCCL_ALGO="Ring", NCCL_LAUNCH_ORDER_IMPLICIT="1")
        told = self.start_of("recorded")["communication"]
        self.assertEqual((told["engine"], told["version"]), ("nccl", "2.28.9"))
        self.assertTrue(pathlib.Path(told["path"]).exists())
        self.assertEqual(told["environment"], {"NCCL_NVLS_ENABLE": "1", "NCCL_ALGO": "Ring", "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
                                               "CUDA_MODULE_LOADING": "EAGER"})
        self.cairn("resume", self.folder / "recorded", "--comm", "staged", "--dry-run")

    def test_nccl_s_own_sums_repeat_their_bits_are_close_to_ranked_ones_and_are_written_down(self):
        recipe = self.recipe("summed", dp=2, zero=2, steps=5)
        _, ranked = self.train(recipe, "ranked")
        self.assertEqual(self.start_of("ranked")["communication"]["sums"], "ranked")
        recipe.write_text(recipe.read_text().replace("seed = 11,", 'seed = 11, sums = "nccl",'))
        said, found = self.train(recipe, "summed")
        self.assertIn("; sums as NCCL adds, NCCL_ALGO=Ring, NCCL_PROTO=Simple, NCCL_NVLS_ENABLE=0\n", said)
        told = self.start_of("summed")["communication"]
        self.assertEqual(told["sums"], "nccl")
        for name, value in (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"), ("NCCL_NVLS_ENABLE", "0")):
            self.assertEqual(told["environment"][name], value)
        self.assertNotEqual(found, ranked)
        for step, numbers in ranked.items():
            for mine, theirs in zip(found[step], numbers):
                self.assertLess(abs(mine / theirs - 1), 1e-4)
        _, again = self.train(recipe, "again", CAIRN_DOUBLE_SEED="5")
        self.assertEqual(again, found)
        _, killed = self.train(recipe, "killed-sums", "--kill", "1@3", NCCL_PROTO="LL")
        self.assertEqual(killed, found)
        self.assertEqual(len(self.events_of("killed-sums", "start")), 2)
        self.assertEqual(self.start_of("killed-sums")["communication"]["environment"]["NCCL_PROTO"], "LL")

    def test_ranks_whose_memory_nccl_has_registered_train_to_the_same_bits_through_a_killed_rank(self):
        recipe = self.recipe("registered", dp=2, zero=3, steps=5)
        _, wanted = self.train(recipe, "without", "--comm", "nccl")
        self.assertIs(self.start_of("without")["communication"]["registered"], False)
        said, found = self.train(recipe, "registered", "--comm", "registered", "--kill", "1@3")
        _, crashed = self.train(recipe, "crashed", "--comm", "registered", "--kill", "1@3", CAIRN_DOUBLE_ABORTS_CRASH="1")
        self.assertIn("a device for each of the 2, its memory registered; sums in the order of ranks\n", said)
        told = [start["communication"] for start in self.events_of("registered", "start")]
        self.assertEqual([(one["engine"], one["registered"]) for one in told], [("nccl", True)] * 2)
        self.assertEqual(found, wanted)
        self.assertEqual(crashed, wanted)
        for run in ("registered", "crashed"):
            self.assertIn("rank 1", json.dumps(self.events_of(run, "failure")[0]))
        # It is no part of the recipe: who continues says it again, or does without.
        for words, registered in (((), False), (("--comm", "registered"), True)):
            said = self.cairn("resume", self.folder / "registered", "--dry-run", "--device", "cuda", *words)
            self.assertEqual("its memory registered" in said, registered)
        said = self.cairn("train", recipe, "--run", self.folder / "dry", "--dry-run", "--device", "cuda", "--comm", "registered")
        self.assertRegex(said, r"device memory: .*, each rank's in whole pieces of 2.00 MiB\n")

    def test_registered_memory_is_refused_where_it_cannot_be(self):
        recipe, run = self.recipe("unregistered", dp=2), self.folder / "unregistered"
        for words, environment, what in (
                (("--device", "cpu"), {}, "ranks on the CPU have no use for NCCL"),
                (("--device", "cuda", "--nproc", "4", "--set", "mesh.dp=4"), {}, "4 ranks share 2 CUDA devices; NCCL takes a device for each rank"),
                (("--device", "cuda"), {"NCCL_CUMEM_ENABLE": "0"}, "with NCCL_CUMEM_ENABLE=0 NCCL registers no memory; leave the variable out, or do "
                                                                   "without: --comm nccl"),
                (("--device", "cuda"), {"NCCL_LOCAL_REGISTER": "0"}, "with NCCL_LOCAL_REGISTER=0 NCCL registers no memory")):
            said = self.cairn("train", recipe, "--run", run, "--comm", "registered", *words, code=2, **environment)
            self.assertIn(f"--comm registered: {what}", said)
            self.assertFalse(run.exists())

    def test_nccl_s_own_sums_are_refused_to_ranks_that_communicate_otherwise(self):
        recipe = self.recipe("refused", dp=2)
        recipe.write_text(recipe.read_text().replace("seed = 11,", 'seed = 11, sums = "nccl",'))
        run = self.folder / "refused"
        for words, what in ((("--device", "cpu"), "ranks on the CPU do not communicate by NCCL; sums = \"ranked\""),
                            (("--device", "cuda", "--comm", "staged"), "and --comm staged: ranks that communicate through"),
                            (("--device", "cuda", "--nproc", "4", "--set", "mesh.dp=4"), "4 ranks share 2 CUDA devices")):
            said = self.cairn("train", recipe, "--run", run, *words, code=2)
            self.assertIn('sums = "nccl"', said)
            self.assertIn(what, said)
            self.assertFalse(run.exists())

    def test_ranks_that_share_a_device_go_through_the_host_and_nccl_is_refused_to_them(self):
        recipe = self.recipe("shared", tp=2, dp=2)
        why = "4 ranks share 2 CUDA devices"
        said = self.cairn("train", recipe, "--run", self.folder / "shared", "--dry-run")
        self.assertIn(f"ranks communicate through the host's memory: {why}\n", said)
        said, _ = self.train(recipe, "shared", "--comm", "nccl", code=2)
        self.assertIn(f"--comm nccl: {why}; NCCL takes a device for each rank: start no more than 2 (--nproc)", said)
        self.assertFalse((self.folder / "shared").exists())

    def test_nccl_that_cannot_be_opened_is_told_or_refused(self):
        recipe = self.recipe("missing", dp=2)
        missing = dict(without=("CAIRN_DOUBLE_NCCL",))
        said = self.cairn("train", recipe, "--run", self.folder / "missing", "--dry-run", **missing)
        self.assertIn("ranks communicate through the host's memory: ", said)
        self.assertIn("ncclGetVersion: refused by the double", said)
        said, _ = self.train(recipe, "missing", "--comm", "nccl", code=2, **missing)
        self.assertIn("name its folder in CAIRN_CUDA_PATH", said)
        self.assertFalse((self.folder / "missing").exists())

    def test_ranks_on_the_cpu_have_no_use_for_it(self):
        recipe = self.recipe("cpu", dp=2)
        said = self.cairn("train", recipe, "--run", self.folder / "cpu", "--device", "cpu", "--comm", "nccl", code=2)
        self.assertIn("--comm nccl: ranks on the CPU have no use for NCCL", said)
        said = self.cairn("train", recipe, "--run", self.folder / "cpu", "--device", "cpu", "--dry-run")
        self.assertNotIn("ranks communicate", said)

    def events_of(self, run, kind):
        lines = (self.folder / run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event.get("event") == kind]

    def test_a_killed_rank_comes_back_with_the_same_bits_also_where_nccl_never_ends_its_communicators(self):
        recipe = self.recipe("killed", dp=2, zero=2, steps=5)
        _, wanted = self.train(recipe, "untouched")
        for hang in ({}, {"CAIRN_DOUBLE_ABORTS_HANG": "1"}):
            run = f"killed-{len(hang)}"
            _, found = self.train(recipe, run, "--kill", "1@3", **hang)
            self.assertEqual(found, wanted)
            self.assertEqual(len(self.events_of(run, "start")), 2)

    def test_a_stopped_rank_is_named_within_the_deadline_also_where_nccl_never_ends_its_communicators(self):
        recipe = self.recipe("stopped", dp=2, steps=100_000)
        recipe.write_text(recipe.read_text().replace("seed = 11,", "seed = 11, restart = { deadline = 6 },"))
        for hang in ({}, {"CAIRN_DOUBLE_ABORTS_HANG": "1"}):
            run = self.folder / f"stopped-{len(hang)}"
            with open(self.folder / "log", "w") as log:
                agent = subprocess.Popen([self.device.program, "train", recipe, "--run", run, "--threads", "1", "--device", "cuda"],
                                         stdout=log, stderr=log, env={**os.environ, **self.device.environment, **hang})
            self.addCleanup(agent.kill)
            self.wait_for(lambda: len(self.steps_of(run)) >= 2, agent)
            rank = self.rank_of(agent.pid, 1)
            self.assertIn(b"NCCL_LAUNCH_ORDER_IMPLICIT=1", pathlib.Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"))
            os.kill(rank, signal.SIGSTOP)
            stopped = time.monotonic()
            self.wait_for(lambda: len(self.events_of(run.name, "start")) == 2, agent)
            self.assertLess(time.monotonic() - stopped, 15)
            said = json.dumps(self.events_of(run.name, "failure"))
            self.assertRegex(said, r"dp\[0,1\]\.\w+\([a-z ]+\): not done after 6000 ms on the device of rank 0 on \S+ \(operation \d+ of its "
                                   r"stream, step \d+ \([a-z ]+\)\); rank 1 \(pid \d+\) is stopped")
            agent.terminate()
            agent.wait(timeout=60)
            self.assertNotIn("misuse", (self.folder / "log").read_text())

    def steps_of(self, run):
        path = run / "metrics.jsonl"
        return [line for line in path.read_text().splitlines() if '"loss"' in line] if path.exists() else []

    def rank_of(self, agent, rank):
        for pid in pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--rank" in words and words[words.index(b"--rank") + 1] == str(rank).encode():
                return int(pid)
        self.fail(f"no rank {rank} among the children of {agent}")

    def wait_for(self, condition, agent, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            self.assertIsNone(agent.poll(), (self.folder / "log").read_text())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_the_room_for_sums_is_part_of_what_is_told_before_a_start(self):
        recipe = self.recipe("room", dp=2)
        told = json.loads(self.cairn("plan", recipe, "--json"))
        self.assertGreater(told["cuda_sum_room_bytes"], 0)
        run = self.folder / "room"
        facts = self.cairn("train", recipe, "--run", run, "--device", "cuda", "--dry-run")
        self.assertRegex(facts, r"device memory: .* of state and activations, .* to sum what ranks send each other\n")
        recipe.write_text(recipe.read_text().replace("seed = 11,", 'seed = 11, sums = "nccl",'))
        self.assertLess(json.loads(self.cairn("plan", recipe, "--json"))["cuda_sum_room_bytes"], told["cuda_sum_room_bytes"])
        recipe.write_text(recipe.read_text().replace('sums = "nccl",', ""))
        facts = self.cairn("train", recipe, "--run", run, "--device", "cuda", "--comm", "staged", "--dry-run")
        self.assertRegex(facts, r"device memory: .* of state and activations, [^,]* more for norms' outputs where there is room\n")


    def cluster(self, *words, **environment):
        done = subprocess.run([ROOT / "bench/gpu_cluster", "--cairn", self.device.program, "--tiny", *words], text=True,
                              capture_output=True, timeout=280, env={**os.environ, **self.device.environment, **environment})
        self.assertEqual(done.returncode, 77, done.stdout + done.stderr)
        self.assertNotIn("PASS", done.stdout)
        self.assertNotIn("WRONG", done.stdout)
        return done.stdout

    def test_the_command_for_several_gpus_runs_whole_on_doubles_and_passes_nothing(self):
        os.link(PROGRAM.parent / "gpu_comm_bench", self.device.bin / "gpu_comm_bench")
        said = self.cluster()
        self.assertRegex(said, r"\n  all_reduce +0.02 MiB .* us \(.*\) +\d+\.\d GB/s\n")
        self.assertRegex(said, r"\n    registered .* us \(.*\) +\d+\.\d GB/s, [\d.]+ times as fast\n")
        self.assertRegex(said, r"\n  2 GPUs: [\d,]+ tokens/s, .* % of 2 times one\n")
        self.assertRegex(said, r"\n  2 GPUs, registered: [\d,]+ tokens/s, .* ms a step \(.*\), [\d.]+ times as fast\n")
        self.assertRegex(said, r"\nNOT RUN: a rehearsal on doubles, 4 checks right, 0 wrong\n$")

    def test_the_command_for_several_gpus_wants_several(self):
        said = self.cluster(CAIRN_DOUBLE_DEVICES="1")
        self.assertIn("NOT RUN: several GPUs are needed, each for a rank by NCCL: 1 can be seen\n", said)
        self.assertIn("NOT RUN: several GPUs are needed, each for a rank by NCCL: --gpus\n", self.cluster("--gpus", "1"))


if __name__ == "__main__":
    if not DoubleDevice.module_of(PROGRAM).exists():
        print(f"skipped: {DoubleDevice.module_of(PROGRAM)} is not there")
        sys.exit(77)
    unittest.main(verbosity=2)
