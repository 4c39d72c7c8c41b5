#pragma once
// LayerNorm and RMSNorm for CUDA: the functions of runtime/kernels/norm.h, and each fused with the sum before it.
// Statistics in float. `partials` is memory for norm_partials() floats. Channels have the factors weight + offset;
// `weight` and its gradient may be null, then they are 1.

#include <cstdint>

#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sums.h"

namespace cairn::kernels::cuda {

constexpr int64_t kNormRunRows = 4, kNormRuns = 512;  // rows of a run at least, runs of a part at most
constexpr RowRuns norm_runs(int64_t rows, int64_t parts = 1) {
  return RowRuns::of(rows, kNormRunRows, kNormRuns, parts);
}
/// Of a backward pass over so many rows (heads of rows, for head_norm_backward()); `biased`: with dbias.
constexpr int64_t norm_partials(int64_t rows, int64_t width, bool biased, int64_t parts = 1) {
  return norm_runs(rows, parts).count() * (biased ? 2 : 1) * width;
}
/// The widest row of a backward pass: sums of its columns lie in shared memory, of which compute capability 8.0 has
/// 163 KiB a block.
constexpr int64_t widest_norm(bool biased) { return (int64_t{163} << 10) / 4 / (biased ? 2 : 1); }

template <typename T>
void layer_norm_forward(Queue& on, const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd,
                        int64_t rows, int64_t width, float eps, float offset = 0);
/// dx may be dy. dbias may be null. Gradients of channels are added by a tree of `parts` (RowRuns).
template <typename T>
void layer_norm_backward(Queue& on, const T* dy, const T* x, const T* weight, const float* mean, const float* rstd,
                         T* dx, float* dweight, float* dbias, int64_t rows, int64_t width, float* partials,
                         float offset = 0, int64_t parts = 1);
template <typename T>
void rms_norm_forward(Queue& on, const T* x, const T* weight, T* y, float* rstd, int64_t rows, int64_t width, float eps,
                      float offset = 0);
template <typename T>
void rms_norm_backward(Queue& on, const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* dweight,
                       int64_t rows, int64_t width, float* partials, float offset = 0, int64_t parts = 1);

/// sum = a + b, rounded; y is its norm. sum may be a or b.
template <typename T>
void add_layer_norm_forward(Queue& on, const T* a, const T* b, T* sum, const T* weight, const T* bias, T* y,
                            float* mean, float* rstd, int64_t rows, int64_t width, float eps, float offset = 0);
template <typename T>
void add_rms_norm_forward(Queue& on, const T* a, const T* b, T* sum, const T* weight, T* y, float* rstd, int64_t rows,
                          int64_t width, float eps, float offset = 0);

template <typename T>
void head_norm_forward(Queue& on, const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int64_t rows,
                       int64_t heads, int64_t head_dim, float eps, float offset = 0);
/// dx may be dy.
template <typename T>
void head_norm_backward(Queue& on, const T* dy, int64_t dy_stride, const T* x, int64_t x_stride, const T* weight, T* dx,
                        int64_t dx_stride, float* dweight, int64_t rows, int64_t heads, int64_t head_dim, float eps,
                        float* partials, float offset = 0);

}  // namespace cairn::kernels::cuda
