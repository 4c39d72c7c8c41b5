#pragma once
// Causal softmax attention, tiled with an online softmax: no S x S matrix is ever stored. Grouped-query attention:
// query head h reads key/value head h * kv_heads / heads.

#include <cstdint>

#include "runtime/kernels/dropout.h"

namespace cairn::kernels {

/// Dropout of the probabilities (runtime/kernels/dropout.h): a row is one query of one head of the whole model, its
/// elements are the keys.
struct AttentionDropout {
  DropoutRate rate;
  const uint64_t* sample_keys = nullptr;  // [B]
  uint64_t site = 0;
  int64_t first_head = 0;  // of these heads in the model

  explicit operator bool() const { return static_cast<bool>(rate); }
};

/// Legend: B samples, S tokens a sample, N query heads, K key/value heads, D head dim; T = B * S rows.
/// q, k, v are row-major [T, ...] with a row stride in elements each, so they may lie side by side in one [T, (N+2K)D].
struct AttentionDims {
  int64_t batch = 0, tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0, out_stride = 0;  // elements from row to row of q; k and v; out and dout
  float scale = 1.0f;                                   // of the scores, 1 / sqrt(D)
  AttentionDropout dropout;                             // attention_decode() has none
};

/// The bits depend on neither the number of threads nor the strides. A thread keeps scratch of its own: 2 S D floats in
/// the forward pass, tiles of 64 rows in the backward pass.
/// out [T, N*D]; logsumexp [B, N, S] float, kept for the backward pass. T is float, bf16 or f16; scores and sums are float.
template <typename T>
void attention_forward(const AttentionDims& dims, const T* q, const T* k, const T* v, T* out, float* logsumexp);

/// dq, dk, dv are overwritten (strides as q, k, v). `scratch` holds attention_backward_scratch_elems() floats.
template <typename T>
void attention_backward(const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                        const float* logsumexp, const T* dout, T* dq, T* dk, T* dv, float* scratch);
int64_t attention_backward_scratch_elems(const AttentionDims& dims);

/// One new token per sample against a cache of `past + 1` keys (the new one included): for generation.
/// q [B, N*D], k_cache and v_cache [B, capacity, K*D], out [B, N*D], all dense: the strides in `dims` are not read.
template <typename T>
void attention_decode(const AttentionDims& dims, int64_t past, int64_t capacity, const T* q, const T* k_cache,
                      const T* v_cache, T* out);

}  // namespace cairn::kernels
