#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/device/copy_gate.h"

namespace cairn::testing {

/// As an update whose work is done at once, before it overwrites this area of the device.
inline void wait_for(CopyGate& gate, std::span<std::byte> area) {
  const std::unique_ptr<Stream> stream = make_cpu_stream();
  const DeviceBytes bytes{DevicePtr(area.data()), std::ssize(area)};
  gate.order_after_copy(*stream, {&bytes, 1});
}

}  // namespace cairn::testing
