#pragma once
// What goes from one stage of the pipeline to the next, and how much of it a rank sends. Pure.
//
// Without sequence parallelism the tp ranks of a stage hold the same boundary tensor, bit for bit: each sends its part
// to the rank at its place in the other stage, and the tp ranks there gather the parts. So a stage sends the tensor
// once, not tp times. With sequence parallelism each has rows of its own and sends them all.

#include <algorithm>
#include <cstdint>

#include "runtime/plan/plan.h"
#include "runtime/plan/schedule.h"

namespace cairn {

/// Bytes of a boundary tensor. Parts are equal, whole cache lines: the last ones may end with, or be, bytes that belong
/// to no row, for which there is room behind the tensor. What is no longer than a line is not cut.
struct BoundaryTensor {
  int64_t bytes = 0;
  int64_t parts = 1;
  int64_t part_bytes = 0;  // bytes when there is one part

  /// What a buffer takes.
  int64_t room_bytes() const { return std::max(bytes, parts * part_bytes); }
  /// It goes in parts, which are gathered behind. Never to the rank itself: it has all of it.
  bool cut(bool to_itself) const { return parts > 1 && !to_itself; }
  /// What a rank sends of it.
  int64_t sent_bytes(bool to_itself) const { return cut(to_itself) ? part_bytes : bytes; }
};
constexpr int64_t kBoundaryPartAlign = 64;

/// `bytes` that `parts` ranks hold alike.
BoundaryTensor cut_boundary(int64_t bytes, int64_t parts);

/// With micro-batches of so many samples; and of the plan's own.
BoundaryTensor boundary_tensor(const Plan& plan, int64_t micro);
BoundaryTensor boundary_tensor(const Plan& plan);

/// Buffers beyond BoundaryBuffers, one for each direction, so that a message comes in while the one before is in use:
/// on a device, whose receives are ordered ahead (runtime/comm/early_receiver.h).
constexpr int64_t kEarlyBuffers = 2;
inline int64_t early_buffers(const Recipe& recipe) { return recipe.device == DeviceChoice::kCuda ? kEarlyBuffers : 0; }

/// `stage` and the one behind it are chunks of one rank, as at the tip of a V.
bool passes_to_itself(const ScheduleShape& shape, int64_t stage);

}  // namespace cairn
