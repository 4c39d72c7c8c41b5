#pragma once
// Attention that is softmax(scale * q k^T) v and no more than a causal mask, a left window and ALiBi's slopes, by its
// numbers: what a library needs to know to have kernels for it.

#include <compare>
#include <cstdint>

#include "runtime/core/dtype.h"

namespace cairn {

/// Legend and layout: AttentionDims (runtime/kernels/attention.h).
struct AttentionShape {
  DType dtype = DType::kF32;  // of all arrays but logsumexp
  int64_t samples = 0, tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0, out_stride = 0;  // elements
  bool causal = true;
  int64_t window = 0;  // 0: none
  bool alibi = false;  // slopes of a model of `heads` heads

  auto operator<=>(const AttentionShape&) const = default;
};

}  // namespace cairn
