#pragma once
// The form of a run's numbers, the device, and where equal runs give equal bits. runtime/config/recipe.h says how it
// is filled.

namespace cairn {

enum class Precision { kF32, kBf16, kF16 };
enum class Deterministic { kRun, kLayout };
enum class Sums { kRanked, kNccl };

/// kAuto: CUDA where the machine has an NVIDIA device.
enum class DeviceChoice { kAuto, kCpu, kCuda };

}  // namespace cairn
