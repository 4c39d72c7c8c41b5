"""The commands for a GPU, all of them, on doubles of the device and its libraries: so that no code of theirs runs first on
a person's card. What they find is right, and they pass nothing."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_device import MODEL, DoubleDevice  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
FAKE_TORCH = """#!/bin/sh
# Stands for a Python with PyTorch, of which these tests need no more than what bench/torch_train.py prints.
[ "$1" = -c ] && exit 0
echo "$@" >>"$0.calls"
echo '{"step_ms": [10.0, 11.0, 12.0], "torch": "of a test", "cuda": "none", "first_step_s": 1, "attention": "flash"}'
"""


class GpuDouble(unittest.TestCase):
    def setUp(self):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpu-double-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, PROGRAM, PROGRAM.parent / "gpu_kernel_bench")

    def run_bench(self, name, *args, code=77, **environment):
        done = subprocess.run([ROOT / "bench" / name, *map(str, args)], capture_output=True, text=True, timeout=280,
                              env={**os.environ, **self.device.environment, **environment}, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("PASS", done.stdout)
        self.assertNotIn("WRONG", done.stdout)
        self.assertNotIn("misuse", done.stdout + done.stderr)
        return done.stdout

    def test_the_doctor_finds_the_double_and_a_run_trains_on_it(self):
        done = subprocess.run([self.device.program, "doctor", "--json"], capture_output=True, text=True, timeout=60,
                              env={**os.environ, **self.device.environment})
        checks = {one["what"]: one for one in json.loads(done.stdout)["checks"]}
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(checks["devices"]["found"], MODEL)
        self.assertEqual(checks["a device opens"]["found"], "cuda:0")
        self.assertRegex(checks["cuBLASLt"]["found"], ", version 13.1$")

    def doctor(self, code, **environment):
        done = subprocess.run([self.device.program, "doctor", "--json"], capture_output=True, text=True, timeout=60,
                              env={**os.environ, **self.device.environment, **environment})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return {one["what"]: one for one in json.loads(done.stdout)["checks"]}

    def test_the_doctor_says_how_gpus_are_by_nvml_and_by_the_kernels_log(self):
        log = self.folder / "kmsg"
        log.write_text("")
        two = {"CAIRN_DOUBLE_DEVICES": "2", "CAIRN_KERNEL_LOG": str(log)}
        checks = self.doctor(0, **two)
        for k in range(2):
            self.assertEqual(checks[f"health of GPU {k}"]["found"], f"GPU-d{k} 0000:0{k + 1}:00.0, "
                             "uncorrected memory errors: 0, rows remapped: 0, NVLinks: 18 of 18")
            self.assertEqual(checks[f"health of GPU {k}"]["verdict"], "ok")
        checks = self.doctor(0, CAIRN_DOUBLE_FAULTS="hot:1,remapping_pending:0", **two)
        self.assertIn("its clocks are held back by heat", checks["health of GPU 1"]["found"])
        self.assertIn("to be remapped when it is reset", checks["health of GPU 0"]["found"])
        self.assertEqual([checks[f"health of GPU {k}"]["verdict"] for k in range(2)], ["note", "note"])
        log.write_text("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n")
        checks = self.doctor(2, CAIRN_DOUBLE_FAULTS="ecc:1", **two)
        self.assertIn("2 uncorrected memory errors since the driver was loaded", checks["health of GPU 1"]["found"])
        self.assertIn("reset it (nvidia-smi --gpu-reset -i 1)", checks["health of GPU 1"]["to_do"])
        self.assertIn("Xid 79 in the kernel's log, fallen off the bus: NVRM: Xid", checks["health of GPU 0"]["found"])
        checks = self.doctor(2, CAIRN_DOUBLE_FAULTS="link_down:0,lost:1", CAIRN_DOUBLE_DEVICES="3", CAIRN_KERNEL_LOG="/none")
        self.assertIn("16 NVLinks are active, down: 3, 4, expected 18", checks["health of GPU 0"]["found"])
        self.assertIn("NVML: GPU is lost", checks["health of GPU 1"]["found"])
        self.assertIn("Xids are not known, /none", checks["Xids of GPUs"]["found"])
        (self.folder / "libraries/libnvidia-ml.so.1").unlink()
        self.assertEqual(self.doctor(0, **two)["health of GPUs"]["verdict"], "note")

    def test_each_kernel_and_product_is_measured(self):
        said = self.run_bench("gpu_kernels", "--cairn", self.device.program, "--tiny")
        self.assertRegex(said, "on a double, no device, driver 580.65.06, .*; cairn ")
        self.assertRegex(said, r"memory \d+ GB/s read and written .*; matrix units \d+.\d TFLOP/s")
        for kernel in ("matmul .*qkv forward, 32 x 96 x 32 ", "matmul .*head weight's gradient", "attention_backward ",
                       "matmul .*down forward with the residual", "matmul .*up forward with gelu",
                       "matmul .*down input's gradient with gelu's", "matmul .*qkv weight's gradient with the bias'",
                       "layer_norm_backward ", "rms_norm_backward ", "gated_backward ", "adamw_of_runs ", "route_forward ",
                       "attention_forward by cuDNN ", "attention_backward by cuDNN ",
                       "matmul_groups .*8 experts of 8 x 32 x 64 ", "matmul_groups .*8 experts of 8 x 32 x 64, sums ",
                       "matmul of each expert .*8 experts of 8 x 32 x 64, sums "):
            self.assertRegex(said, rf"\n  {kernel}.* us \(.*% of the limit")
        self.assertNotIn("left out", said)
        self.assertRegex(said, r"\nNOT RUN: a rehearsal on a double, \d\d\d measurements right, 0 wrong\n$")

    def test_attention_by_warpgroups_is_measured_where_a_card_has_them(self):
        done = subprocess.run([self.device.bin / "gpu_kernel_bench", "--tiny", "--model=tiny-gpt"], capture_output=True, text=True,
                              timeout=120, env={**os.environ, **self.device.environment, "CAIRN_DOUBLE_WARPGROUPS": "1"})
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        for kernel in ("attention_forward by warpgroups ", "attention_backward by warpgroups "):
            self.assertRegex(done.stdout, rf"\n  {kernel}.* us \(.*% of the limit")

    def test_of_a_model_that_is_named_nothing_else_is_asked(self):
        done = subprocess.run([self.device.bin / "gpu_kernel_bench", "--tiny", "--others", "--model=tiny-gpt"],
                              capture_output=True, text=True, timeout=120, env={**os.environ, **self.device.environment})
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertIn("\n  embedding_backward_parts ", done.stdout)
        self.assertNotIn("rms_norm_forward", done.stdout)

    def test_a_kernel_that_does_not_fit_is_told_and_not_passed_over(self):
        done = subprocess.run([self.device.bin / "gpu_kernel_bench", "--tiny", "--model=tiny-gpt", "--gib=0.0002"],
                              capture_output=True, text=True, timeout=120, env={**os.environ, **self.device.environment})
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stdout, "adamw_of_runs .* left out: needs .*MiB")
        self.assertIn("\nleft out: adamw_of_runs ", done.stdout)

    def test_an_unknown_model_is_misuse(self):
        done = subprocess.run([self.device.bin / "gpu_kernel_bench", "--model=gpt5"], capture_output=True, text=True,
                              timeout=60, env={**os.environ, **self.device.environment})
        self.assertEqual(done.returncode, 2)
        self.assertIn("no model gpt5; there are gpt2-124m, gpt2-1558m", done.stderr)

    def test_models_train_in_pairs_with_another_program(self):
        python = self.folder / "python"
        python.write_text(FAKE_TORCH)
        python.chmod(0o755)
        said = self.run_bench("gpu_all", "--cairn", self.device.program, "--tiny", "--torch", python, "--peak", 1)
        for model in ("tiny-gpt", "tiny-llama"):
            self.assertRegex(said, rf"\n{model}, 2 x 16 tokens a step, 0.\d+ GFLOP a token, attention of auto\n  Cairn, run 1: .*"
                             r" ms\n  PyTorch: 11.00 \(10.00 to 12.00\) ms, .*\n  Cairn, run 2: .* ms\n")
        self.assertEqual(said.count("PyTorch of a test, CUDA none, attention of flash: 2909 (2667 to 3200) tokens/s; Cairn has"), 2)
        self.assertEqual(said.count("  MFU 0.0 % of 1 TFLOP/s (bar 0, aim 0)"), 2)
        self.assertRegex(said, r"exec to first step \d")
        self.assertRegex(said, r"a snapshot costs -?\d+\.\d+ ms, .* % of a step of .* ms \(median of [23]\)")
        self.assertRegex(said, r"MISSED tokens a second over PyTorch's: 0\.\d+, the bar is 1.1\n")
        self.assertRegex(said, r"costliest kernels:\n(    \w+ .*: \d+\.\d\d ms a step, \d+ % of the limit\n){3}")
        self.assertIn("NOT RUN: a rehearsal on a double", said)
        calls = (self.folder / "python.calls").read_text().splitlines()
        self.assertEqual(len(calls), 2)  # one PyTorch a model
        self.assertIn("--family llama --seconds 0.1 --vocab 192 --layers 2 --width 32 --heads 2 --kv-heads 1 --ffn 48", calls[1])

    def test_a_series_takes_the_runs_the_attention_and_the_time_that_it_is_given(self):
        python = self.folder / "python"
        python.write_text(FAKE_TORCH)
        python.chmod(0o755)
        words = ("--cairn", self.device.program, "--tiny", "--torch", python, "--model", "tiny-llama")
        said = self.run_bench("gpu_all", *words, "--pairs", 1, "--attention", "cudnn")
        self.assertIn("attention of cudnn\n  Cairn, run 1: ", said)
        self.assertNotIn("run 2", said)
        done = subprocess.run([ROOT / "bench/gpu_all", *map(str, words), "--attention", "cudnn"], capture_output=True, text=True,
                              timeout=100, env={**os.environ, **self.device.environment, "CAIRN_DOUBLE_CUDNN": "91000"})
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"WRONG: cairn ended with 2:\n(.*\n)*.*--attention cudnn: ")
        done = subprocess.run([ROOT / "bench/gpu_all", *map(str, words), "--seconds", "0.2"], capture_output=True, text=True,
                              timeout=100, env={**os.environ, **self.device.environment})
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("WRONG: the time is over", done.stdout)
        for bad, why in ((("--model", "gpt5"), "no model gpt5; there are tiny-gpt, tiny-llama"), (("--pairs", "0"), "at least 1")):
            done = subprocess.run([ROOT / "bench/gpu_all", "--tiny", *bad], capture_output=True, text=True, timeout=100)
            self.assertEqual(done.returncode, 2)
            self.assertIn(why, done.stderr)

    def test_steps_of_a_model_are_repeated_with_the_same_numbers(self):
        metrics = self.folder / "metrics.jsonl"
        said = self.run_bench("gpu_step", "--cairn", self.device.program, "--tiny", "--steps", 12, "--repeat", 2, "--snapshot",
                              "never", "--snapshot", 4, "--metrics", metrics)
        result = json.loads(said.splitlines()[-1])
        for name in ("snapshot never", "snapshot every 4"):
            self.assertEqual(len(result[name]["step_ms"]), 2)
            self.assertIn("forward", result[name]["parts_ms"])
        self.assertIn("snapshot_ms", result["snapshot every 4"])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        self.assertGreaterEqual(len(lines), 4 * 15)
        self.assertEqual({line["snapshot"] for line in lines}, {1000000, 4})

    def test_without_pytorch_the_comparison_is_told_to_be_missing(self):
        python = self.folder / "python"
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        said = self.run_bench("gpu_all", "--cairn", self.device.program, "--tiny", "--torch", python, "--model", "tiny-gpt")
        self.assertIn("PyTorch is missing", said)
        self.assertIn("MISSED tokens a second over PyTorch's: not measured", said)
        self.assertIn("MISSED MFU: not measured", said)

    def test_training_on_the_double_gives_the_cpus_numbers_and_resumes_with_the_same_bits(self):
        said = self.run_bench("gpu_test", "--cairn", self.device.program, "--short")
        self.assertRegex(said, r"NOT RUN: a rehearsal on a double, \d checks right, 0 wrong\n$")


RECIPE = """local T = require "cairn"
return T.recipe { name = "mine", stop = T.steps(2), data = T.megatron { prefix = "text" },
  model = T.gpt { layers = 2, width = 32, heads = 2, context = 16, vocab = 256 }, batch = { samples = 4, micro = 1 },
  optimizer = T.adamw { peak_lr = 1e-3 }, log = { tensorboard = false } }
"""


class TwoGpus(unittest.TestCase):
    def setUp(self):
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpu-double-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, PROGRAM, gpus=2)
        (self.folder / "r.lua").write_text(RECIPE)
        (self.folder / "text.txt").write_text("some words of a text\n" * 400)
        self.cairn("data", "tokenize", "text.txt", "--out", "text")

    def cairn(self, *args, code=0, **variables):
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("SLURM_", "CUDA_", "NVIDIA_VISIBLE"))}
        done = subprocess.run([self.device.program, *map(str, args)], capture_output=True, text=True, timeout=100,
                              cwd=self.folder, env={**clean, **self.device.environment, **variables},
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_a_run_has_one_rank_for_each_gpu_that_it_may_use(self):
        said = self.cairn("train", "r.lua", "--run", "two")
        self.assertIn("2 GPUs, a rank on each\n", said)
        self.assertIn("on 2 ranks", said)
        for k in range(2):
            self.assertIn(f"rank {k} leaves after step 2", (self.folder / f"two/logs/rank-{k}.log").read_text())
        for variables, words in (
                (dict(CUDA_VISIBLE_DEVICES="1"), "1 of 2 GPUs by CUDA_VISIBLE_DEVICES=1, one rank\n"),
                (dict(SLURM_STEP_GPUS="1", SLURM_JOB_GPUS="0,1"), "1 of 2 GPUs by SLURM_STEP_GPUS=1, one rank\n"),
                (dict(NVIDIA_VISIBLE_DEVICES="GPU-d1"), "1 of 2 GPUs by NVIDIA_VISIBLE_DEVICES=GPU-d1, one rank\n")):
            with self.subTest(variables):
                said = self.cairn("train", "r.lua", "--run", "dry", "--dry-run", **variables)
                self.assertIn(words, said)
                self.assertIn("on 1 rank ", said)

    def test_the_mesh_and_nproc_come_first_and_what_cannot_be_cut_for_all_takes_fewer(self):
        for words, ranks in ((("--nproc", 4), "shared by 4 ranks: what they send each other goes through the host's memory"),
                             (("--nproc", 1), ", 1 in use: 1 rank\n"), (("--set", "mesh.dp=1"), ", 1 in use: 1 rank\n"),
                             (("--set", "batch.samples=3"), ", 1 in use: 1 rank\n"),
                             (("--set", "mesh.tp=2"), ", a rank on each\n")):
            with self.subTest(words):
                said = self.cairn("train", "r.lua", "--run", "dry", "--dry-run", *words)
                self.assertIn("2 GPUs" + ranks if ranks[0] == "," else ranks, said)

    def test_nccls_variables_of_the_cluster_file_are_checked_and_recorded(self):
        cluster = self.folder / "cluster.lua"
        form = 'local T = require "cairn" return T.hosts {{ names = {{ "a" }}, ranks_per_host = 2, nccl = {{ {} }} }}'
        cluster.write_text(form.format('"NCCL_SOCKET_IFNAME==bond7"'))
        said = self.cairn("train", "r.lua", "--run", "bad", "--cluster", cluster, code=2)
        self.assertRegex(said, r"NCCL_SOCKET_IFNAME==bond7: no interface is bond7; interfaces here: .*\blo\b")
        self.assertFalse((self.folder / "bad").exists())
        cluster.write_text(form.format('"NCCL_DEBUG=TRACE", "NCCL_ALGO=Ring"'))
        said = self.cairn("train", "r.lua", "--run", "good", "--cluster", cluster, NCCL_ALGO="Tree", NCCL_PROTO="LL")
        self.assertIn("warning: NCCL_DEBUG=TRACE: each operation", said)
        start = next(json.loads(line) for line in (self.folder / "good/events.jsonl").read_text().splitlines()
                     if '"start"' in line)
        had = start["communication"]["environment"]
        self.assertEqual({name: had[name] for name in ("NCCL_ALGO", "NCCL_DEBUG", "NCCL_PROTO")},
                         {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "TRACE", "NCCL_PROTO": "LL"})
        said = self.cairn("doctor", code=2, NCCL_IB_HCA="mlx9", CAIRN_SYS_ROOT=str(self.folder))
        self.assertIn("PROBLEM NCCL's variables: NCCL_IB_HCA=mlx9: no device begins with mlx9", said)

    def test_a_value_that_names_no_gpu_is_refused_and_none_at_all_leaves_the_cpu(self):
        said = self.cairn("train", "r.lua", "--run", "bad", code=2, CUDA_VISIBLE_DEVICES="0,2")
        self.assertIn("CUDA_VISIBLE_DEVICES=0,2: '2' is no GPU that this process sees; visible here: 0 (GPU-d0), 1 (GPU-d1)", said)
        self.assertFalse((self.folder / "bad").exists())
        self.assertIn("PROBLEM devices: CUDA_VISIBLE_DEVICES=GPU-x: ", self.cairn("doctor", code=2, CUDA_VISIBLE_DEVICES="GPU-x"))
        said = self.cairn("train", "r.lua", "--run", "none", "--device", "cuda", code=2, CUDA_VISIBLE_DEVICES="-1")
        self.assertIn("--device cuda: CUDA_VISIBLE_DEVICES=-1 lets this process use none of 2 NVIDIA devices; to train on the "
                      "CPU: --device cpu", said)
        said = self.cairn("train", "r.lua", "--run", "none", CUDA_VISIBLE_DEVICES="")
        self.assertIn("on 1 rank ", said)
        self.assertFalse((self.folder / "none/device").exists())


class NoDevice(unittest.TestCase):
    def test_a_machine_without_a_device_is_told_and_nothing_is_passed(self):
        for name in ("gpu_kernels", "gpu_all"):
            with self.subTest(name):
                done = subprocess.run([ROOT / "bench" / name, "--cairn", PROGRAM], capture_output=True, text=True, timeout=100,
                                      env=dict(os.environ, CAIRN_NVIDIA_ROOT="/nonexistent"))
                self.assertEqual(done.returncode, 77, done.stdout + done.stderr)
                self.assertIn("NOT RUN: no GPU can be used here: devices: no NVIDIA device", done.stdout)
                self.assertNotIn("PASS", done.stdout)


if __name__ == "__main__":
    if not DoubleDevice.module_of(PROGRAM).exists():
        print(f"skipped: {DoubleDevice.module_of(PROGRAM)} is not there")
        sys.exit(77)
    unittest.main(verbosity=2)
