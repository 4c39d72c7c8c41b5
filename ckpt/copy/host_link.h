#pragma once

#include <memory>

#include "runtime/device/device_link.h"

namespace cairn::ckpt {

/// To host memory from host memory: pieces are copied on the calling thread, with their sums on the way.
std::unique_ptr<DeviceLink> make_host_link();

}  // namespace cairn::ckpt
