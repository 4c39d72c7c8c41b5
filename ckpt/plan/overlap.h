#pragma once
// Which bytes of one box of a tensor are also bytes of another box of it. Everything that moves state between layouts
// (load, reshard, restore from another layout's snapshot) comes down to this.

#include <cstdint>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

/// A contiguous byte copy; each offset counts from its own box's first byte.
struct CopyRun {
  int64_t source_offset = 0;
  int64_t target_offset = 0;
  int64_t bytes = 0;
  bool operator==(const CopyRun&) const = default;
};

/// Byte copies that fill the wanted box of a tensor from one saved box.
///
/// Shapes: `saved` and `wanted` are boxes of one row-major tensor of shape `global` (same number of dims); each is
///         stored densely, row-major over its own extents.
/// Units:  box bounds in elements; returned offsets and lengths in bytes from each box's own start.
/// Returns runs sorted by source offset, each as long as possible; empty when the boxes do not meet.
/// Errors: kInvalidInput if a box leaves `global`, is inverted, or the number of dims differs.
/// Threads: pure. Source: own derivation: a run extends over dim d when every inner dim is whole in both boxes.
Result<std::vector<CopyRun>> overlap_runs(const Box& saved, const Box& wanted, const Shape& global, DType dtype);

/// Whether `box` is a box of a tensor of `shape`: same number of dims, 0 <= lo <= hi <= shape.
bool inside(const Box& box, const Shape& shape);

/// Whether the boxes have a common element. Precondition: same number of dims.
bool meet(const Box& a, const Box& b);

}  // namespace cairn::ckpt
