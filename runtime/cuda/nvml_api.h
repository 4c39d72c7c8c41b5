#pragma once
// The part of NVML that is used, as a table like that of the runtime (runtime/cuda/api.h). The library comes with the
// driver. It says how devices are without taking any of their memory.
//
// Types and constants are those of nvml.h; runtime/cuda/linked compares them.

#include <cstdint>
#include <span>
#include <string>

#include "runtime/core/result.h"
#include "runtime/cuda/api.h"

struct nvmlDevice_st;

namespace cairn::cuda {

using NvmlDevice = nvmlDevice_st*;

/// Where a device is.
struct NvmlPci {
  char legacy_text[16];
  unsigned domain, bus, device;
  unsigned id, subsystem;
  char text[32];
};

/// A process that computes on a device.
struct NvmlProcess {
  unsigned pid;
  unsigned long long memory_bytes;
  unsigned gpu_instance, compute_instance;
};

// Of nvmlReturn_t.
constexpr int kNvmlOk = 0, kNvmlTooSmall = 7, kNvmlLost = 15, kNvmlNeedsReset = 16;
constexpr int kNvmlUncorrected = 1, kNvmlSinceDriver = 0;   // errors of memory, and since when they are counted
constexpr int kNvmlBySingleBits = 0, kNvmlByDoubleBit = 1;  // why a page was retired
constexpr unsigned kNvmlLinks = 18;                         // at most, of a device
constexpr uint64_t kSlowedByHardware = 0x8, kSlowedByHeat = 0x20, kSlowedByHeatInHardware = 0x40,
                   kSlowedByPowerBrake = 0x80;  // why clocks are not what they could be

/// X(member, function of the library, parameters). Each gives an nvmlReturn_t.
// clang-format off
#define RT_NVML_CALLS(X)                                                                                             \
  X(open, nvmlInit_v2, ())                                                                                           \
  X(close, nvmlShutdown, ())                                                                                         \
  X(count, nvmlDeviceGetCount_v2, (unsigned*))                                                                       \
  X(device, nvmlDeviceGetHandleByIndex_v2, (unsigned, NvmlDevice*))                                                  \
  X(name, nvmlDeviceGetName, (NvmlDevice, char*, unsigned))                                                          \
  X(uuid, nvmlDeviceGetUUID, (NvmlDevice, char*, unsigned))                                                          \
  X(pci, nvmlDeviceGetPciInfo_v3, (NvmlDevice, NvmlPci*))                                                            \
  X(mig, nvmlDeviceGetMigMode, (NvmlDevice, unsigned*, unsigned*))                                                   \
  X(ecc_errors, nvmlDeviceGetTotalEccErrors, (NvmlDevice, int, int, unsigned long long*))                            \
  X(remapped_rows, nvmlDeviceGetRemappedRows, (NvmlDevice, unsigned*, unsigned*, unsigned*, unsigned*))              \
  X(retired_pages, nvmlDeviceGetRetiredPages, (NvmlDevice, int, unsigned*, unsigned long long*))                     \
  X(retirement_pending, nvmlDeviceGetRetiredPagesPendingStatus, (NvmlDevice, int*))                                  \
  X(slowed_by, nvmlDeviceGetCurrentClocksEventReasons, (NvmlDevice, unsigned long long*))                            \
  X(link_state, nvmlDeviceGetNvLinkState, (NvmlDevice, unsigned, int*))                                              \
  X(processes, nvmlDeviceGetComputeRunningProcesses_v3, (NvmlDevice, unsigned*, NvmlProcess*))
// clang-format on

struct NvmlApi {
#define RT_MEMBER(member, name, parameters) int(*member) parameters = nullptr;
  RT_NVML_CALLS(RT_MEMBER)
#undef RT_MEMBER
  const char* (*error_string)(int) = nullptr;  // nvmlErrorString
};

struct LoadedNvml {
  NvmlApi api;
  std::string path;
};

inline constexpr const char* kNvmlFile = "libnvidia-ml.so.1";

/// As load_api(), of kNvmlFile. It is not opened yet: read_gpus() does that (runtime/cuda/gpu_health.h).
Result<LoadedNvml> load_nvml(std::span<const std::string> candidates);

}  // namespace cairn::cuda
