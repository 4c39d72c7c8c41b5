#pragma once
// libcairn_cuda.so: the kernels that nvcc has compiled and the CUDA runtime that launches them, beside the program. It
// is loaded when a run on CUDA begins, so the program starts where there is no driver, and maps no library of NVIDIA's
// before. runtime/cuda/module builds it, with the preset `cuda`.

#include <memory>
#include <string>
#include <string_view>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"
#include "runtime/cuda/machine/machine.h"

namespace cairn::cuda {

/// What the module shows.
struct Module {
  const char* tree_version;  // of the sources that it was built from
  const Api& (*api)();       // of the runtime that it is linked to
  KernelTables (*kernels)();
};

inline constexpr const char* kModuleFile = "libcairn_cuda.so";
inline constexpr const char* kModuleSymbol = "cairn_cuda_module";

struct LoadedModule {
  const Module* module = nullptr;
  std::string path;
};

/// Loaded once a process. Errors: kUnsupported where it is not beside the program, cannot be loaded or was built from
/// other sources than `tree_version`, with what to do.
Result<LoadedModule> load_module(std::string_view tree_version);

/// Devices that the runtime shows this process; none is opened. Errors: as load_module(); kUnavailable.
Result<int> visible_devices(std::string_view tree_version);

/// A device with the module's kernels and cuBLASLt. Which one a rank gets: host::gpu_of_rank(). Errors: kUnavailable,
/// kUnsupported, saying what is missing and what to do.
Result<std::unique_ptr<CudaMachine>> open_machine(std::string_view tree_version, const MachineOptions& options);

}  // namespace cairn::cuda
