"""GPUs in a check of hosts, on doubles: what is measured of them, by the process that measures, and that each planted fault
is named by a whole check with what was found and what to do."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from double_device import DoubleDevice  # noqa: E402

PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
TRIES = 3


class GpuCheck(unittest.TestCase):
    def setUp(self):
        if not DoubleDevice.module_of(PROGRAM).exists():
            self.skipTest("built without the double of a device")
        scratch = PROGRAM.parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpu-check-", dir=scratch))
        self.addCleanup(shutil.rmtree, self.folder)
        self.device = DoubleDevice(self.folder, PROGRAM, PROGRAM.parent / "libcairn_gloo.so", gpus=3)
        self.log = self.folder / "kmsg"
        self.log.write_text("")

    def environment(self, faults="", **more):
        return {**os.environ, **self.device.environment, "CAIRN_DOUBLE_FAULTS": faults, "CAIRN_CHECK_GPU_SIZE": "64",
                "CAIRN_KERNEL_LOG": str(self.log), **more}

    def measure(self, faults="", **order):
        """What a host tells of its GPUs, by index."""
        events, told = os.pipe()
        meet, other = socket.socketpair()
        order = {"gpus": True, "gpu_size": 64, "round": 1, **order}
        done = subprocess.run([self.device.program, "_measure", "--order", json.dumps(order), "--meet-fd", str(meet.fileno())],
                              env=self.environment(faults, CAIRN_EVENT_FD=str(told)), pass_fds=(told, meet.fileno()),
                              capture_output=True, text=True, timeout=60)
        os.close(told)
        meet.close()
        other.close()
        with open(events) as lines:
            all_events = [json.loads(line) for line in lines]
        self.assertEqual((done.returncode, done.stderr), (0, ""), all_events)
        (event,) = [one for one in all_events if one["event"] == "gpus"]
        return {one["index"]: one for one in event["gpus"]}, event["notes"]

    def test_every_gpu_is_measured_and_gives_the_exact_product_in_both_types(self):
        for dtype in ("fp32", "bf16"):
            gpus, notes = self.measure(dtype=dtype)
            self.assertEqual((sorted(gpus), notes), ([0, 1, 2], []))
            for k, gpu in gpus.items():
                for what in ("product_tflops", "copy_gb_s", "to_device_gb_s", "to_host_gb_s"):
                    self.assertGreater(gpu[what], 0, what)
                self.assertEqual(sorted(gpu["to_gpus_gb_s"]), [f"0000:0{o + 1}:00.0" for o in range(3) if o != k])
                self.assertGreater(min(gpu["to_gpus_gb_s"].values()), 0)
                self.assertEqual((gpu["wrong"], gpu["failed"], gpu["not_measured"]), ("", "", ""))

    def test_what_is_slow_or_wrong_is_so_of_that_gpu_alone(self):
        gpus, _ = self.measure("wrong_product:1,slow_product:2")
        self.assertRegex(gpus[1]["wrong"], r"^the first matrix product: 1 of 4096 elements differ: \[0, 0\] is \w{8}, not \w{8}$")
        self.assertEqual((gpus[0]["wrong"], gpus[2]["wrong"]), ("", ""))
        self.assertLess(3 * gpus[2]["product_tflops"], gpus[0]["product_tflops"])
        gpus, _ = self.measure("slow_pair:0-2")
        rates = {(k, pci): rate for k, gpu in gpus.items() for pci, rate in gpu["to_gpus_gb_s"].items()}
        slow = rates.pop((0, "0000:03:00.0"))
        self.assertLess(3 * slow, min(rates.values()))

    def test_a_gpu_that_somebody_computes_on_is_left_alone_and_its_health_is_told(self):
        gpus, _ = self.measure("busy:1,ecc:1,mig:2,lost:0")
        self.assertIn("process 4711", gpus[1]["not_measured"])
        self.assertEqual((gpus[1]["product_tflops"], gpus[1]["ecc_uncorrected"]), (0, 2))
        self.assertIn("MIG", gpus[2]["not_measured"])
        self.assertEqual((gpus[0]["lost"], gpus[0]["pci"]), ("GPU is lost", "0000:01:00.0"))
        (self.folder / "libraries/libnvidia-ml.so.1").unlink()
        gpus, _ = self.measure()
        for gpu in gpus.values():
            self.assertIn("whether a run computes on it is not known", gpu["not_measured"])
            self.assertEqual((gpu["product_tflops"], gpu["lost"], gpu["failed"]), (0, "", ""))

    def check(self, first="", second="", code=0, gpus=(3, 3)):
        """Rates of a double are those of the processors, which others may need: a check that finds a GPU slow where none is
        planted is made again."""
        for _ in range(TRIES):
            codes, result, said = self.check_once(first, second, gpus)
            slow = {one["gpu"]["index"] for one in result.get("findings", []) if one["kind"] == "slow_gpu"}
            if all(f"slow_product:{k}" in first + second for k in slow):
                break
            print(f"  made again, found slow: {sorted(slow)}", flush=True)
        self.assertEqual(codes, [code, code], said)
        return result, said

    def check_once(self, first, second, gpus):
        """A check of two hosts, with what is wrong on each. Both have this machine's name; their GPUs have UUIDs of their own."""
        shared = self.folder / "shared"
        shared.mkdir(exist_ok=True)
        hosts = []
        for k, faults in enumerate((first, second)):
            hosts.append(subprocess.Popen(
                [self.device.program, "check-hosts", shared, "--hosts", "127.0.0.1,127.0.0.2", "--host-index", str(k),
                 *(["--json"] if k == 0 else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=self.environment(faults, CAIRN_DOUBLE_HOST=f"-h{k}", CAIRN_DOUBLE_DEVICES=str(gpus[k]), **({"CUDA_VISIBLE_DEVICES": "0,1"} if gpus[k] == 2 else {}))))
        said = [host.communicate(timeout=100) for host in hosts]
        return [host.returncode for host in hosts], json.loads(said[0][0]), said

    def test_a_whole_check_names_each_gpu_that_is_not_well_and_nobody_where_all_are(self):
        result, said = self.check()
        self.assertEqual(result["findings"], [], said)
        self.assertIn("3 GPUs (a double, no device)   matrix products ", said[0][1])
        self.assertEqual([len(host["gpus"]) for host in result["figures"]], [3, 3])
        self.log.write_text("NVRM: Xid (PCI:0000:03:00): 63, pid=1, Row Remapper\n")
        result, said = self.check("busy:0", "ecc:0,link_down:1,slow_product:2,wrong_product:0", code=69)
        found = {(one["kind"], one["gpu"].get("index"), one["found"].split(":")[0]) for one in result["findings"]}
        self.assertEqual(found, {("gpu", 0, "the first matrix product"), ("gpu", 1, "16 NVLinks are active, down"),
                                 ("gpu", 0, "2 uncorrected memory errors since the driver was loaded"),
                                 ("slow_gpu", 2, "matrix products")}, said)
        for one in result["findings"]:
            self.assertEqual((one["host"], one["gpu"]["uuid"]), (socket.gethostname(), f"GPU-d{one['gpu']['index']}-h1"))
            self.assertTrue(one["expected"] and one["to_do"])
        notes = "\n".join(result["notes"])
        self.assertIn(": GPU 0 (GPU-d0-h0, 0000:01:00.0): not measured: process 4711", notes)
        self.assertIn("Xid 63 in the kernel's log", notes)
        self.assertIn(": GPU 0 (GPU-d0-h1, 0000:01:00.0) is broken: ", said[1][0])

    def test_a_missing_gpu_and_an_xid_are_named(self):
        self.log.write_text("NVRM: Xid (PCI:0000:02:00): 79, pid=1, GPU has fallen off the bus.\n")
        result, said = self.check(gpus=(3, 2), code=69)
        found = {(one["gpu"]["uuid"], one["gpu"].get("index"), one["gpu"]["pci"], one["found"].split(",")[0])
                 for one in result["findings"]}
        self.assertEqual(found, {("GPU-d1-h0", 1, "0000:02:00.0", "Xid 79 in the kernel's log"),
                                 ("GPU-d1-h1", 1, "0000:02:00.0", "Xid 79 in the kernel's log"),
                                 ("", None, "0000:03:00.0", "2 GPUs")}, said)

    def test_a_run_on_cuda_measures_gpus_before_it_starts_and_tells_the_one_that_is_broken(self):
        recipe = self.folder / "recipe.lua"
        recipe.write_text(RECIPE)
        (self.folder / "text.txt").write_text("some words of a text\n" * 400)
        subprocess.run([PROGRAM, "data", "tokenize", "text.txt", "--out", "text"], check=True, capture_output=True, timeout=60,
                       cwd=self.folder)
        hosts = []
        for k, faults in enumerate(("", "ecc:0")):
            hosts.append(subprocess.Popen(
                [self.device.program, "train", recipe, "--run", self.folder / "run", "--nproc", "1", "--hosts",
                 "127.0.0.1,127.0.0.2", "--host-index", str(k), "--device", "cuda", "--comm", "staged", "--check", "start"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
                env=self.environment(faults, CAIRN_DOUBLE_HOST=f"-h{k}")))
        said = [host.communicate(timeout=100)[0] for host in hosts]
        self.assertEqual([host.returncode for host in hosts], [0, 0], said)
        events = [json.loads(line) for line in (self.folder / "run/events.jsonl").read_text().splitlines()]
        (check,) = [event for event in events if event["event"] == "check"]
        broken = [one["gpu"]["uuid"] for one in check["findings"] if one["kind"] == "gpu"]  # slow ones: see check()
        self.assertEqual(broken, ["GPU-d0-h1"])
        self.assertIn("2 uncorrected memory errors since the driver was loaded", said[0])
        self.assertIn("the run has no other host for its place", said[0])


RECIPE = """local T = require "cairn"
return T.recipe { name = "mine", stop = T.steps(2), data = T.megatron { prefix = "text" },
  model = T.gpt { layers = 2, width = 32, heads = 2, context = 16, vocab = 256 }, batch = { samples = 4, micro = 1 },
  optimizer = T.adamw { peak_lr = 1e-3 }, log = { tensorboard = false } }
"""


if __name__ == "__main__":
    unittest.main(verbosity=2)
