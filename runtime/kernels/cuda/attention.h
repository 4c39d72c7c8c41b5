#pragma once
// Softmax attention for CUDA: attention.h of runtime/kernels, in tiles of shared memory with an online softmax. It
// takes every mask, cap, slope, sink and dropout that the CPU's takes, and heads of up to kWidestHead channels. Matrix
// units multiply bf16 and f16 in rows of whole packs of 16 bytes, of heads of up to 128 channels; the cores that add
// floats the rest. Where the caller names warpgroups, these multiply what has no slope, cap, dropout and maxima.

#include <cstdint>
#include <initializer_list>

#include "runtime/kernels/attention.h"
#include "runtime/kernels/cuda/queue.h"

namespace cairn::kernels::cuda {

constexpr int64_t kWidestHead = 256;
/// Whether attention of these heads is cut into parts, whose sums are a tree: it has no kernel.
inline bool in_parts(const AttentionDims& dims) { return dims.held.parts > 1 || dims.key_parts > 1; }

/// Units that multiply bf16 and f16: warps, on every card (mma.sync), or warpgroups, on those of compute capability 9.x
/// (wgmma), where they take the call. Bits differ: warpgroups have other tiles.
enum class Units { kWarps, kWarpgroups };

/// Whether the calling thread's device has warpgroups: on the executor, what its test says.
bool has_warpgroups();
/// Whether warpgroups, where a device has them, take a pass over these arrays and `others`, which lie beside them.
template <typename T>
bool warpgroups_take(const AttentionDims& dims, const T* q, const T* k, const T* v,
                     std::initializer_list<const void*> others);

/// Floats that attention_forward() needs for partial maxima; 0 where dims has no max_scores.
int64_t attention_maxima(const AttentionDims& dims);
/// The same for so many heads, of all samples, with `queries` rows of `head_dim` channels each.
int64_t attention_maxima(int64_t heads, int64_t queries, int64_t head_dim);
template <typename T>
void attention_forward(Queue& on, const AttentionDims& dims, const T* q, const T* k, const T* v, T* out,
                       float* logsumexp, float* maxima, Units units = Units::kWarps);

/// Floats that attention_backward() needs.
int64_t attention_deltas(const AttentionDims& dims);
/// dk and dv of each key are summed by one block, query by query, and dq of each query by one block, key by key. They
/// are written as G: T or float.
template <typename T, typename G>
void attention_backward(Queue& on, const AttentionDims& dims, const T* q, const T* k, const T* v, const T* out,
                        const float* logsumexp, const T* dout, T* dq, G* dk, G* dv, float* deltas,
                        Units units = Units::kWarps);

/// dsinks [N] gets the gradients of dims.sinks added, from what attention_backward() left in `deltas`.
void sink_gradients(Queue& on, const AttentionDims& dims, const float* logsumexp, const float* deltas, float* dsinks);

template <typename T>
void attention_decode(Queue& on, const AttentionDims& dims, int64_t past, int64_t capacity, const T* q,
                      const T* k_cache, const T* v_cache, T* out);

}  // namespace cairn::kernels::cuda
