#pragma once
// Rows of experts as the device places them (Dispatch, runtime/nn/dispatch.h): where each group of them is, known only
// to kernels. The host knows how many rows there are at most.

#include <cstdint>

#include "runtime/device/op_dims.h"

namespace cairn::kernels {

/// Rows that a block of the products of groups has.
inline constexpr int64_t kGroupTile = 128;

/// Neighbouring rows of one expert. One more behind the last has where all of them end: no rows.
struct GroupRows {
  int64_t first = 0, filled = 0, rows = 0;  // rows: with padding
  int64_t tiles = 0;                        // of kGroupTile rows, of all groups before this one

  static constexpr int64_t tiles_of(int64_t rows) { return (rows + kGroupTile - 1) / kGroupTile; }
};

/// Choices that group_choices() places. Groups begin at multiples of `align` rows.
struct GroupDims {
  int64_t choices = 0, experts = 0, align = 1;
};
inline void add_dims(OpDims& to, const GroupDims& of) {
  to.add(of.choices);
  to.add(of.experts);
}

}  // namespace cairn::kernels
