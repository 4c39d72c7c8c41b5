#pragma once
// A double of NVML (runtime/cuda/nvml_api.h): devices that are as a test says. It proves what is made of its answers,
// and nothing of a driver.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "runtime/cuda/nvml_api.h"

namespace cairn::simt {

constexpr int kNvmlInvalid = 2, kNvmlNotSupported = 3, kNvmlUninitialized = 1, kNvmlUnknown = 999;

struct NvmlDeviceState {
  std::string name = "a double, no device", uuid;
  unsigned domain = 0, bus = 1;
  bool lost = false, mig = false;
  unsigned long long ecc_uncorrected = 0;
  bool remaps_rows = true, remapping_pending = false, remapping_failed = false;
  unsigned pages_retired = 0;
  unsigned links = cuda::kNvmlLinks;
  std::set<unsigned> links_down;
  unsigned long long slowed_by = 0;
  std::vector<unsigned> processes;
};

/// One at a time.
class NvmlDouble {
 public:
  explicit NvmlDouble(std::vector<NvmlDeviceState> devices);
  ~NvmlDouble();
  NvmlDouble(const NvmlDouble&) = delete;
  NvmlDouble& operator=(const NvmlDouble&) = delete;

  const cuda::NvmlApi& api() const { return api_; }
  std::vector<NvmlDeviceState>& devices() { return devices_; }
  /// The driver is not there: nothing begins.
  void refuse() { refuses_ = true; }
  bool refuses() const { return refuses_; }
  /// How often it is open.
  int64_t open = 0;

 private:
  std::vector<NvmlDeviceState> devices_;
  cuda::NvmlApi api_;
  bool refuses_ = false;
};

/// GPU k at 0000:0{k + 1}:00.0 by the name "GPU-d{k}", with the faults that the text plants, as "ecc:1,link_down:0".
std::vector<NvmlDeviceState> nvml_devices(int count, const std::string& faults);
/// Whether the text plants that fault on that device. A fault of two devices: "slow_pair:0-1", `other` is the second.
bool is_planted(const std::string& faults, const std::string& fault, int device, int other = -1);

}  // namespace cairn::simt
