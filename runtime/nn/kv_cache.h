#pragma once
// Keys and values of tokens that were seen, for a forward pass over those that follow them (runtime/inference).

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/device/pointer.h"

namespace cairn::nn {

/// Rows of `row_elems` = K D elements of the compute dtype, after rotary, [layers, sequences, capacity, K D] each. With
/// model.mla a row is a token's latent vector after its norm and the turned key that heads share, kv_rank + rope_dim
/// elements, and values have no memory. Borrowed memory.
struct KvCache {
  DevicePtr<void> key_memory;
  DevicePtr<void> value_memory;
  int64_t sequences = 0, capacity = 0, row_elems = 0;

  template <typename Real>
  DevicePtr<Real> keys(int64_t layer, int64_t sequence) const {
    return key_memory.as<Real>() + (layer * sequences + sequence) * capacity * row_elems;
  }
  template <typename Real>
  DevicePtr<Real> values(int64_t layer, int64_t sequence) const {
    return value_memory.as<Real>() + (layer * sequences + sequence) * capacity * row_elems;
  }
};

/// Where the rows [T] of a pass stand. A row sees its own token and all before it in its sequence.
struct CachedRows {
  const KvCache* cache = nullptr;
  std::span<const int32_t> sequence;
  std::span<const int32_t> place;     // in its sequence, so in the cache, [0, capacity); -1: padding, its output means
                                      // nothing
  std::span<const int32_t> position;  // what rotary and learned positions take it for; empty: its place
  std::span<const int32_t> ends;      // from_start: SequenceRows::ends; empty: no row sees what follows it
  DevicePtr<const int64_t>
      cache_rows;           // of `place`: which row of a layer's keys and values; -1: none. Filled by the pass
  bool from_start = false;  // row r is place r of one sequence: nothing before it is in the cache

  int32_t position_of(int64_t row) const { return position.empty() ? place[row] : position[row]; }
};

}  // namespace cairn::nn
