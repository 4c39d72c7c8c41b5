"""What `cairn doctor` says of machines, and what a run on the CPU does not load."""

import json
import pathlib

from harness import DEVICE_MODEL, RunTest, main


class Doctor(RunTest):
    def one_rank(self, **changes):
        return self.recipe(**{**dict(steps=6, tp=1, pp=1, dp=1, sp="false"), **changes})

    def test_a_run_on_the_cpu_maps_no_library_of_nvidia(self):
        job = self.start(self.one_rank(steps=4000), "run")
        self.until_step("run", 3, job)
        for pid in (job.pid, *job.children().values()):
            maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
            self.assertIn("cairn", maps)
            for name in ("libcuda", "libcudart", "libcublas", "libcairn_cuda", "libnvidia"):
                self.assertNotIn(name, maps)
        job.kill_group()

    def test_a_device_that_cannot_be_used_is_a_problem_with_what_to_do(self):
        with self.with_device(driver=""):
            said = self.cairn("doctor", code=2).stdout.decode()
            for words in (DEVICE_MODEL, "PROBLEM NVIDIA driver: none", "needed: 580 or newer"):
                self.assertIn(words, said)
            told = json.loads(self.cairn("doctor", "--json", code=2).stdout)
        self.assertFalse(told["ok"])
        driver = next(one for one in told["checks"] if one["what"] == "NVIDIA driver")
        self.assertEqual(driver["verdict"], "problem")
        self.assertIn("install the driver", driver["to_do"])

    def test_an_old_driver_is_named_with_the_one_that_is_needed(self):
        with self.with_device(driver="470.129.06"):
            said = self.cairn("doctor", code=2).stdout.decode()
        self.assertRegex(said, "PROBLEM NVIDIA driver: 470.129.06, .*\n +needed: 580 or newer.*\n +to do: install a newer")

    def test_the_doctor_says_what_a_machine_without_a_device_has(self):
        told = json.loads(self.cairn("doctor", "--json").stdout)
        self.assertTrue(told["ok"])
        found = {one["what"]: one for one in told["checks"]}
        self.assertEqual(found["devices"]["verdict"], "note")
        self.assertIn("runs use the CPU", found["devices"]["found"])
        self.assertIn("free", found["shared memory"]["found"])
        for what in ("io_uring", "disk of .", "several hosts", "processors, memory", "cuBLASLt", "kernels for CUDA"):
            self.assertTrue(found[what]["found"] and found[what]["needed"], what)
        missing = json.loads(self.cairn("doctor", "--run", "/proc/none", "--json", code=2).stdout)
        self.assertIn("name another run folder",
                      next(one for one in missing["checks"] if one["what"] == "disk of /proc/none")["to_do"])


if __name__ == "__main__":
    main()
