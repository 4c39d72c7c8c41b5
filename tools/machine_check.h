#pragma once
// What this machine has of what runs need: `cairn doctor`, and before a start the part about its devices.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/host/topology.h"
#include "runtime/host/visible_gpus.h"

namespace cairn::tools {

struct MachineCheck {
  enum class Verdict { kFine, kNote, kProblem };
  std::string what;    // "NVIDIA driver"
  std::string found;   // "580.65.06, /proc/driver/nvidia/version"
  std::string needed;  // "580 or newer, for CUDA 13"
  Verdict verdict = Verdict::kFine;
  std::string todo;  // empty where there is nothing to do
};

/// The GPUs that this process may use, whether they can be used or not. Looks at /dev, /proc and the environment alone.
/// Errors: those of host::visible_gpus().
Result<host::VisibleGpus> own_gpus();
/// In the environment of this process and of those that it starts: CUDA sees these. Before CUDA is asked for anything.
void show_to_cuda(const host::VisibleGpus& visible);
/// Their names, apart by commas.
std::string names_of(const host::VisibleGpus& visible);

/// Devices, driver, kernels, libraries. Without a device nothing of it is a problem. Loads what a run on CUDA loads,
/// and calls show_to_cuda(). `opens`: opens the first device, too, which takes half a GiB of it until this process
/// ends.
std::vector<MachineCheck> check_cuda(bool opens);
/// Whether attention by cuDNN can be had: a run does without it, so it is no problem in any case. Loads it.
MachineCheck check_cudnn();
/// For each GPU that may be used: its memory node, the cores that one rank on each would get, the network devices next
/// to it. Nothing without a GPU. `topology`: an error is a note.
std::vector<MachineCheck> check_places(const Result<host::VisibleGpus>& visible,
                                       const Result<host::Topology>& topology);
/// How each GPU is that NVML shows: memory that failed, links, clocks, Xids of the kernel's log. Nothing without a GPU.
std::vector<MachineCheck> check_gpu_health();
/// NCCL's variables in the environment, and the mistakes in them that one host shows. Nothing where none is set.
std::vector<MachineCheck> check_nccl_here();
/// Shared memory, io_uring, the disk of `folder`, Gloo and its addresses, processors and memory.
std::vector<MachineCheck> check_host(const std::filesystem::path& folder);

bool any_problem(const std::vector<MachineCheck>& checks);
/// A line for each, what to do below it.
std::string machine_text(const std::vector<MachineCheck>& checks);
nlohmann::json machine_json(const std::vector<MachineCheck>& checks);

}  // namespace cairn::tools
