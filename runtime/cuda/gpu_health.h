#pragma once
// How the GPUs of a host are, as NVML says: memory that failed, links that are down, clocks that are held back, who
// computes there. It takes nothing of a device and runs nothing on it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/cuda/nvml_api.h"

namespace cairn::cuda {

/// A number of -1 is not known: the device has no such thing, or does not tell.
struct GpuHealth {
  int64_t index = 0;            // as nvidia-smi counts
  std::string name, uuid, pci;  // "NVIDIA H100 80GB HBM3", "GPU-...", "0000:3b:00.0"
  std::string lost;             // why it answers nothing; empty: it answers
  bool mig = false;
  int64_t ecc_uncorrected = -1;                                               // since the driver was loaded
  int64_t rows_remapped = -1, remapping_pending = -1, remapping_failed = -1;  // rows; 0 or 1
  int64_t pages_retired = -1, retirement_pending = -1;                        // of devices that remap no rows
  int64_t links = 0, links_active = -1;                                       // NVLink
  std::vector<int64_t> links_down;                                            // by number
  uint64_t slowed_by = 0;                                                     // kSlowedBy..., as it is now
  std::vector<int64_t> processes;                                             // that compute on it
  bool operator==(const GpuHealth&) const = default;
};

/// All that NVML shows this process, by number. Errors: kUnavailable where NVML does not begin, with what to do.
Result<std::vector<GpuHealth>> read_gpus(const NvmlApi& api);

/// The same of the library that a run finds, which is opened once. Errors: those of load_nvml(), too.
Result<std::vector<GpuHealth>> read_gpus();

/// "heat, power brake"; empty: nothing that is a fault holds the clocks back.
std::string slowed_text(uint64_t slowed_by);

/// "0000:3b:00.0" of what the kernel, NVML and CUDA write: with four or eight digits of the domain, in capitals or not,
/// with the function or without. Empty: it is none.
std::string pci_text(std::string_view written);

}  // namespace cairn::cuda
