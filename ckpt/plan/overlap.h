#pragma once
// Which bytes of one box of a tensor are also bytes of another box of it. Everything that moves state between layouts
// (load, reshard, restore from another layout's snapshot) comes down to this.

#include <cstdint>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

/// `rows` contiguous byte copies of one length at even distances; each offset counts from its own box's first byte.
struct CopyRows {
  int64_t source_offset = 0, target_offset = 0;  // of the first row
  int64_t bytes = 0;                             // of a row
  int64_t rows = 1;
  int64_t source_stride = 0, target_stride = 0;  // from a row's first byte to the next one's; 0 where there is one row
  bool operator==(const CopyRows&) const = default;
};

/// Byte copies that fill the wanted box of a tensor from one saved box.
///
/// Shapes: `saved` and `wanted` are boxes of one row-major tensor of shape `global` (same number of dims); each is
///         stored densely, row-major over its own extents.
/// Units:  box bounds in elements; returned offsets and lengths in bytes from each box's own start.
/// Returns copies sorted by source offset, rows as long and as many together as possible: a cut of columns is one
/// entry.
///         Empty when the boxes do not meet.
/// Errors: kInvalidInput if a box leaves `global`, is inverted, or the number of dims differs.
/// Threads: pure. Source: own derivation: a row extends over dim d when every inner dim is whole in both boxes, and the
///         rows of dim d go on at the same distance over the dim outside when d is whole in both.
Result<std::vector<CopyRows>> overlap_rows(const Box& saved, const Box& wanted, const Shape& global, DType dtype);

/// Whether `box` is a box of a tensor of `shape`: same number of dims, 0 <= lo <= hi <= shape.
bool inside(const Box& box, const Shape& shape);

/// Whether the boxes have a common element. Precondition: same number of dims.
bool meet(const Box& a, const Box& b);

}  // namespace cairn::ckpt
