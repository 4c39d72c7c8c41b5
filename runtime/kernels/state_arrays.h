#pragma once
// The arrays that an optimizer keeps of weights, whatever its rule, and what kernels over them give to the host.

#include <cstdint>
#include <span>

#include "runtime/core/word_sums.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"

namespace cairn::kernels {

/// One run of them. Adafactor has no exp_avg_sq, and exp_avg if the recipe averages steps.
struct StateArrays {
  DevicePtr<float> master;
  DevicePtr<float> exp_avg;
  DevicePtr<float> exp_avg_sq;
  DevicePtr<float> ema;  // of the masters; null where none is kept. No rule reads it
};

/// Elements of a chunk. Kernels add up state chunk by chunk, and callers cut a run between chunks, so a cut changes no
/// bit.
inline constexpr int64_t kStateChunk = 16384;

/// Where a kernel leaves word_sums (runtime/core/word_sums.h) of what it writes, for the host: one for each array.
/// What is written begins at element `first` of the arrays: with 0 the sums begin anew, else they are added to, so the
/// blocks of an array come in order. Empty: no sums are wanted.
struct BlockSums {
  std::span<uint64_t> sums = {};
  int64_t first = 0;

  /// For kernels. `of_block`: of the block alone, whose first word stands at index 0.
  void put(size_t array, uint64_t of_block) const {
    sums[array] = add_word_sums(first == 0 ? 0 : sums[array], shift_word_sums(of_block, first));
  }
};
inline void add_dims(OpDims& /*to*/, const BlockSums& /*of*/) {}

}  // namespace cairn::kernels
