#pragma once
// What a recipe leaves to the device.

#include "runtime/config/recipe.h"

namespace cairn {

/// The recipe as it trains on that device, which is kCpu or kCuda: what it leaves open is decided.
void settle_device(Recipe& recipe, DeviceChoice device);

}  // namespace cairn
