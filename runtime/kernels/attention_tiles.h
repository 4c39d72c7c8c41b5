#pragma once
// What attention's tiles are, for its two ways of working on them.

#include <cstdint>

namespace cairn::kernels {

constexpr int64_t kQueries = 64;  // queries a tile
constexpr int64_t kKeys = 64;     // keys a tile

/// Columns of a tile that each of its rows sees: [first, end), empty where first >= end.
struct VisibleColumns {
  int64_t first[kQueries], end[kQueries];
};

}  // namespace cairn::kernels
