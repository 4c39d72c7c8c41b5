#include "runtime/device/device_link.h"

#include <algorithm>
#include <vector>

#include "runtime/device/copy_gate.h"

namespace cairn {

int64_t DeviceLink::piece_bytes(int64_t copy_bytes) const {
  constexpr int64_t kLeast = int64_t{64} << 20;  // so large that a block of an update is worth a launch
  return std::max(kLeast, (copy_bytes + kMostGateCalls - 1) / kMostGateCalls);
}

Status DeviceLink::fill(std::span<const DeviceBytes> device, const Write& write) {
  std::vector<std::vector<std::byte>> host;
  std::vector<std::span<std::byte>> areas;
  for (const DeviceBytes& run : device) host.emplace_back(static_cast<size_t>(run.size));
  for (std::vector<std::byte>& area : host) areas.emplace_back(area);
  RT_TRY(write(areas));
  for (size_t k = 0; k < areas.size(); ++k) RT_TRY(store(areas[k], device[k].first));
  return settle();
}

}  // namespace cairn
