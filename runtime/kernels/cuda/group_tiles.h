#pragma once
// Which rows of which group a block has (Groups, grouped.h). For .cu files.

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/grouped.h"

namespace cairn::kernels::cuda {

/// group < 0: the block has no rows.
struct TileOfGroup {
  int64_t group, row;  // row: the tile's first, of the group's
};

/// blockIdx.x counts the tiles of the rows of all groups.
__device__ __forceinline__ TileOfGroup tile_of_block(const Groups& of) {
  const int64_t tile = of.rows[of.begin].tiles + blockIdx.x;
  if (tile >= of.rows[of.end].tiles) return {-1, 0};
  int64_t group = of.begin;  // the last one that does not begin behind the tile
  for (int64_t behind = of.end; behind - group > 1;) {
    const int64_t middle = (group + behind) / 2;
    (of.rows[middle].tiles <= tile ? group : behind) = middle;
  }
  return {group, (tile - of.rows[group].tiles) * kGroupTile};
}

}  // namespace cairn::kernels::cuda
