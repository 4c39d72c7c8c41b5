#pragma once
// Where memory lies and kernels run.

#include <compare>
#include <string>

namespace cairn {

enum class DeviceKind { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  auto operator<=>(const Device&) const = default;
};

/// "cpu", "cuda:1".
std::string device_name(Device device);

}  // namespace cairn
