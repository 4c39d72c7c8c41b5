#pragma once
// What the GPUs of hosts say of themselves and have reached in a check, and which of them are not well: by what NVML
// and the kernel's log tell of one alone, and beside the others of the same product. Pure.

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/agent/kernel_log.h"
#include "runtime/cuda/gpu_health.h"

namespace cairn::tools {

inline constexpr double kSlowGpu = 1.5;    // times the median's time: nothing else computes there
inline constexpr double kSlowGpuCopy = 2;  // what goes to the host or to another GPU may share its way

/// Of those above 0; of two the higher one; 0 where there is none.
double upper_median(std::vector<double> values);

/// Of a GPU. A rate of 0 was not measured.
struct GpuFigures {
  cuda::GpuHealth health;
  std::vector<agent::Xid> xids;
  double product_tflops = 0, copy_gb_s = 0;     // copies within its memory: read and written
  double to_device_gb_s = 0, to_host_gb_s = 0;  // from and to pinned memory of the host
  std::map<std::string, double> to_gpus_gb_s;   // by the other's PCI address
  std::string wrong;                            // what it computed or brought wrongly
  std::string failed;                           // what it could not do
  std::string not_measured;                     // why; empty: it was
  bool operator==(const GpuFigures&) const = default;
};
/// Of a host, with what else is to be said of them.
struct HostGpus {
  std::vector<GpuFigures> gpus;
  std::vector<std::string> notes;
  bool operator==(const HostGpus&) const = default;
};

struct GpuFault {
  int64_t index = -1;  // as nvidia-smi counts; -1: a GPU that is not there
  std::string uuid, pci;
  bool slow = false;     // and else well
  std::string measured;  // what: of one GPU at most one fault each
  std::string found, expected, todo;
  bool operator==(const GpuFault&) const = default;
};
/// "GPU 3 (GPU-..., 0000:3b:00.0): found, expected ...; to do: ..."
std::string fault_text(const GpuFault& fault);

/// What is wrong with one whatever the others are.
std::vector<GpuFault> faults_of(const GpuFigures& gpu);
/// What it lacks that others of its product have, and GPUs that its host lacks. `hosts`: those that were asked.
std::vector<GpuFault> faults_beside(const std::map<int64_t, const HostGpus*>& hosts, int64_t host);
/// Those that are slow beside all of their product, measured at the same time.
std::vector<GpuFault> slow_beside(const std::map<int64_t, const HostGpus*>& hosts, int64_t host);
/// What is no fault, and a person may want to know, without the GPU's name.
std::vector<std::string> notes_of(const GpuFigures& gpu);
/// "GPU 3 (GPU-..., 0000:3b:00.0)"
std::string gpu_text(const cuda::GpuHealth& gpu);
/// What NVML says of it, in a line.
std::string health_text(const GpuFigures& gpu);

/// What NVML and the kernel's log say of the GPUs of this host; nothing is measured. Errors: those of
/// cuda::read_gpus().
Result<HostGpus> look_at_gpus();

/// A line for people: how many of which product, and the range of each rate.
std::string gpus_text(const HostGpus& gpus);
nlohmann::json to_json(const HostGpus& gpus);
/// Of another host: nothing is believed to be there or of its type.
HostGpus host_gpus_from_json(const nlohmann::json& from);

}  // namespace cairn::tools
