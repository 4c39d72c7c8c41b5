#include "runtime/device/device_link.h"

#include <vector>

namespace cairn {

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
