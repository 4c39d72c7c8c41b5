#pragma once
// Of which form a run's numbers are, what gives the same ones, and on which device. runtime/config/recipe.h says how it
// is filled.

namespace cairn {

enum class Precision { kF32, kBf16, kF16 };
enum class Deterministic { kRun, kLayout };
enum class Sums { kRanked, kNccl };

/// kAuto: CUDA where the machine has an NVIDIA device.
enum class DeviceChoice { kAuto, kCpu, kCuda };

}  // namespace cairn
