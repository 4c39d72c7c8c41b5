#pragma once
// Which GPUs of its host a process may use, and which of them a rank gets.
//
// What restricts them, in this order, each within what those before it leave:
//   NVIDIA_VISIBLE_DEVICES  of containers and Kubernetes' device plugin: numbers or UUIDs of the node, "all", "none".
//                           "void", a path, and a list no shorter than what the container has say nothing more: the
//                           container has the GPUs that it was given (CDI writes "void" beside them).
//   SLURM_STEP_GPUS, SLURM_JOB_GPUS  where CUDA_VISIBLE_DEVICES is not set: numbers of the node, whatever a device
//                           cgroup shows. As many or more than it shows: the cgroup has chosen already.
//   CUDA_VISIBLE_DEVICES    as CUDA reads it: numbers in CUDA's order, beginnings of UUIDs, MIG ids; empty, "-1" or
//                           Slurm's NoDevFiles: none; a -1 ends the list.
// CUDA takes a list up to its first mistake and says nothing. Here a mistake is an error.
//
// Sources: CUDA's programming guide ("CUDA Environment Variables"), man srun (Slurm 22.05), NVIDIA's container toolkit
// (pull request 395 for "void"). Not run on a device.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/host/gpu_list.h"

namespace cairn::host {

struct VisibleGpu {
  std::string id;          // as CUDA_VISIBLE_DEVICES names it: "2", "GPU-...", "MIG-..."
  std::optional<Gpu> gpu;  // of the host; nullopt: its pages do not say which it is, as of a MIG device
  bool operator==(const VisibleGpu&) const = default;
};

struct VisibleGpus {
  std::vector<VisibleGpu> gpus;  // in the order in which CUDA numbers them
  int64_t of_machine = 0;        // that the kernel shows to this process
  std::string by;                // "CUDA_VISIBLE_DEVICES=2,3": what restricts them; empty: nothing does
  /// To be set in this process, before it looks for devices, and so in those that it starts: CUDA sees these GPUs then,
  /// in this order.
  std::vector<std::pair<std::string, std::string>> variables;

  int64_t size() const { return std::ssize(gpus); }
};

/// The value of a variable; nullopt where it is not set. As cluster::process_environment() gives it.
using Variables = std::function<std::optional<std::string>(const char* name)>;

/// `machine`: gpus_of_machine(). Errors: kInvalidInput: a value that names no GPU, or one that another variable does
/// not give, or one twice; with the value, what is there, and what to do.
Result<VisibleGpus> visible_gpus(const std::vector<Gpu>& machine, const Variables& environment);

/// The GPU of a rank.
struct RankGpu {
  int index = 0;  // CUDA's number in the rank's process
  /// CUDA_VISIBLE_DEVICES of the rank, where that is not the agent's: a process sees one MIG device at most.
  std::optional<std::string> visible;
  bool operator==(const RankGpu&) const = default;
};

/// Ranks of a host get its GPUs in turn, one each; more ranks than GPUs share them. `rank_on_host` from 0. Of no
/// visible GPU (device = "cuda" refuses that before): CUDA's first.
RankGpu gpu_of_rank(const VisibleGpus& visible, int64_t rank_on_host);

/// PCI address of a rank's GPU; empty: not known.
std::string pci_of_rank(const VisibleGpus& visible, int64_t rank_on_host);

/// "2 of 8 GPUs by CUDA_VISIBLE_DEVICES=2,3, a rank on each", for people. `ranks`: of this host.
std::string placed_text(const VisibleGpus& visible, int64_t ranks);

}  // namespace cairn::host
