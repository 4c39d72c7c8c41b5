#pragma once
// Shapes of attention for the tests of libraries that have plans for it.

#include <cstdint>

#include "runtime/device/attention_shape.h"

namespace cairn::testing {

/// bf16, causal; queries, keys and values of a token lie in one row, as a trainer has them.
inline AttentionShape shape(int64_t samples, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t row = (heads + 2 * kv_heads) * head_dim;
  return {.dtype = DType::kBf16,
          .samples = samples,
          .tokens = tokens,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .q_stride = row,
          .kv_stride = row,
          .out_stride = heads * head_dim};
}

}  // namespace cairn::testing
