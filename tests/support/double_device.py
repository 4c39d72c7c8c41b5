"""A machine with CUDA devices for the built program: the doubles of the runtime, of cuBLASLt, of NCCL, of NVML and of a device
(tests/simt/module) beside a link to it, and the pages of a driver."""

import os
import pathlib

MODEL = "a double, no device"


class DoubleDevice:
    """In `folder`, of the program's file system. None of it where the program was built without the double."""

    @staticmethod
    def module_of(program):
        return pathlib.Path(program).parent / "cuda_double/libcairn_cuda.so"

    def __init__(self, folder, program, *others, gpus=1):
        folder, program = pathlib.Path(folder), pathlib.Path(program)
        self.bin, root = folder / "bin", folder / "machine"
        self.bin.mkdir()
        for file in (program, *map(pathlib.Path, others)):
            os.link(file, self.bin / file.name)  # a program looks for the module beside itself
        os.link(self.module_of(program), self.bin / "libcairn_cuda.so")
        (folder / "libraries").mkdir()
        # One file by two names is one library.
        for name in ("libcublasLt.so.13", "libcudnn.so.9", "libnccl.so.2", "libnvidia-ml.so.1"):
            os.link(self.module_of(program), folder / "libraries" / name)
        for k in range(gpus):
            gpu = root / f"proc/driver/nvidia/gpus/0000:0{k + 1}:00.0"
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(f"Model: \t\t {MODEL}\nIRQ:   \t\t 10\nGPU UUID: \t GPU-d{k}\nDevice Minor: \t {k}\n")
        (root / "proc/driver/nvidia/version").write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
        self.program = self.bin / program.name
        # The loader's path comes first, before a toolkit's.
        self.environment = {"CAIRN_NVIDIA_ROOT": str(root), "LD_LIBRARY_PATH": str(folder / "libraries"),
                            "CAIRN_DOUBLE_DEVICES": str(gpus), "CAIRN_DOUBLE_NCCL": str(folder / "nccl"),
                            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
