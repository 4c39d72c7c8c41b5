#pragma once
// The one sum and the one maximum over ranks, for CUDA: runtime/comm/reduce.h on a device, in the same order with the
// same roundings, so the bits are the host's. What the ranks gave lies in the device's memory.

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::kernels::cuda {

/// The input of rank r begins r * stride_bytes behind `inputs`; that of `own_rank` is `own` instead, where it is not
/// null.
struct RankInputs {
  const void* inputs = nullptr;
  int64_t stride_bytes = 0;
  int64_t ranks = 0;
  int64_t own_rank = 0;
  const void* own = nullptr;
};

constexpr int64_t kMostRankSums = 4095;  // ranks of a tree

enum class RankFold { kSum, kMax, kTreeSum };

/// out[i] = the fold of the ranks' inputs at i, in their order, or by a tree (reduce_ordered()). `out` may be an input.
/// dtype: f32, bf16, f16, f64, i64.
void fold_ranks(Queue& on, const RankInputs& from, void* out, int64_t count, DType dtype, RankFold fold);

/// out[i] += the inputs, in order; each `tree` of them, neighbours, as a tree (add_ordered()).
void add_ranks(Queue& on, const RankInputs& from, int64_t tree, void* out, int64_t count, DType dtype);

/// Both, for who is not linked to kernels. They give a cudaError_t.
struct RankSums {
  int (*fold)(CUstream_st* on, const RankInputs& from, void* out, int64_t count, DType dtype, RankFold fold) = nullptr;
  int (*add)(CUstream_st* on, const RankInputs& from, int64_t tree, void* out, int64_t count, DType dtype) = nullptr;
};
const RankSums& rank_sums();

}  // namespace cairn::kernels::cuda
