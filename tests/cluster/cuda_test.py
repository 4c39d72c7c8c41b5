"""A run over hosts with CUDA devices, which are doubles, as is NCCL: the bits of one host's run on such devices, through a
host that loses its power, whichever way ranks communicate; and a host without a device, which may not join."""

import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from bed import main  # noqa: E402
from double_device import DoubleDevice  # noqa: E402
from train_test import PROGRAM, RUN, TrainBed  # noqa: E402


class Cuda(TrainBed):
    count = 2
    steps = 24
    layout = dict(tp=2, dp=2, sp="true")
    comm = "staged"

    def setUp(self):
        super().setUp()
        scratch = pathlib.Path(PROGRAM).parent / "test-tmp"
        scratch.mkdir(exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="cuda-hosts-", dir=scratch)
        self.addCleanup(folder.cleanup)
        self.device = DoubleDevice(folder.name, PROGRAM, pathlib.Path(PROGRAM).parent / "libcairn_gloo.so",
                                   gpus=2)
        with_device = [f"{name}={value}" for name, value in self.device.environment.items()]
        self.start_command = ("env", *with_device, str(self.device.program))

    def where(self):
        return ("--nproc", 2, "--hosts", "h0,h1", "--comm", self.comm)

    def test_a_host_loses_its_power_and_the_run_has_the_bits_of_one_hosts(self):
        self.loses_power("staged")

    def test_the_same_by_nccl(self):
        self.loses_power("nccl")

    def loses_power(self, comm):
        self.comm = comm
        for index in (1, 0):
            self.start(index)
        self.until_step(8)
        self.hosts("kill", "h1")
        self.hosts("boot", "h1")
        self.start(1)
        self.until_done()
        self.hosts("run", "h0", *self.start_command, "train", "/mnt/shared/recipe.lua", "--run", "/mnt/shared/one",
                   "--threads", "1", "--comm", "staged")
        got, wanted = self.metrics(), self.metrics("one")
        self.assertEqual(sorted(got), list(range(1, self.steps + 1)))
        for step in wanted:
            for key in ("loss", "grad_norm"):
                self.assertEqual(got[step][key], wanted[step][key], f"step {step}: {key}{self.all_logs()}")
        self.assertIn(", 0 differ", self.hosts("run", "h0", PROGRAM, "ckpt", "diff", "/mnt/shared/one", RUN))
        self.assertEqual((self.shared_folder / "run" / "device").read_text().strip(), "cuda")

    def test_a_host_without_a_device_may_not_join(self):
        with_device = self.start_command
        self.start(0)
        self.start_command, self.comm = (PROGRAM,), "auto"  # a machine without devices has no other
        log = self.start(1)
        self.until(lambda: "ranks compute by other means: cpu there, cuda, staged, attention auto at the leader" in log.read_text(),
                   "the refusal")
        self.start_command, self.comm = with_device, "staged"
        self.start(1)
        self.until_step(2)


if __name__ == "__main__":
    main()
