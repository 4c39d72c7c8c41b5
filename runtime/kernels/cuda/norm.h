#pragma once
// LayerNorm and RMSNorm for CUDA: the functions of runtime/kernels/norm.h, and each fused with the sum before it.
// Backward passes take norm_partials() floats as scratch.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sums.h"
#include "runtime/kernels/norm.h"

namespace cairn::kernels::cuda {

constexpr int64_t kNormRunRows = 4, kNormRuns = 512;  // rows of a run at least, runs of a part at most
constexpr RowRuns norm_runs(int64_t rows, int64_t parts = 1) {
  return RowRuns::of(rows, kNormRunRows, kNormRuns, parts);
}
/// Of a backward pass over so many rows; `biased`: with dbias.
constexpr int64_t norm_partials(int64_t rows, int64_t width, bool biased, int64_t parts = 1) {
  return norm_runs(rows, parts).count() * (biased ? 2 : 1) * width;
}

template <typename T>
void layer_norm_forward(Queue& on, const NormRows& of, const T* x, const T* weight, const T* bias, T* y, float* mean,
                        float* rstd);
template <typename T>
void layer_norm_backward(Queue& on, const NormRows& of, const T* dy, const T* x, const T* weight, const float* mean,
                         const float* rstd, T* dx, const NormGradients& to);
template <typename T>
void rms_norm_forward(Queue& on, const NormRows& of, const T* x, const T* weight, T* y, float* rstd);
template <typename T>
void rms_norm_backward(Queue& on, const NormRows& of, const T* dy, const T* x, const T* weight, const float* rstd,
                       T* dx, const NormGradients& to);

/// sum = a + b, rounded; y is its norm. sum may be a or b.
template <typename T>
void add_layer_norm_forward(Queue& on, const NormRows& of, const T* a, const T* b, T* sum, const T* weight,
                            const T* bias, T* y, float* mean, float* rstd);
template <typename T>
void add_rms_norm_forward(Queue& on, const NormRows& of, const T* a, const T* b, T* sum, const T* weight, T* y,
                          float* rstd);

/// With own_weights d is centred.
template <typename T>
void head_norm_forward(Queue& on, const HeadNorm& d, const Rows<const T>& x, const T* weight, const T* bias,
                       const Rows<T>& y);
/// Scratch of head_norm_backward(), in floats.
constexpr int64_t head_norm_partials(const HeadNorm& d, bool biased, int64_t parts = 1) {
  return d.own_weights ? norm_partials(d.rows, d.heads * d.head_dim, false, parts)
                       : norm_partials(d.rows * d.heads, d.head_dim, biased, parts);
}
/// stats is written by centred norms alone.
template <typename T>
void head_norm_backward(Queue& on, const HeadNorm& d, const Rows<const T>& dy, const Rows<const T>& x, const T* weight,
                        const Rows<T>& dx, const NormGradients& to, float* stats);

}  // namespace cairn::kernels::cuda
