#include "runtime/plan/device_choice.h"

#include "runtime/core/check.h"

namespace cairn {

void settle_device(Recipe& recipe, DeviceChoice device) {
  RT_CHECK(device != DeviceChoice::kAuto, "a device that is still to be chosen");
  recipe.device = device;
  if (recipe.checkpoint.snapshot_by == SnapshotBy::kAuto) {
    recipe.checkpoint.snapshot_by = device == DeviceChoice::kCuda ? SnapshotBy::kCopy : SnapshotBy::kBanks;
  }
}

}  // namespace cairn
