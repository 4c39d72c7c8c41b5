#pragma once
// LayerNorm and RMSNorm over rows of `width` elements. Statistics in float.

#include <cstdint>

#include "runtime/kernels/sums_over_rows.h"

namespace cairn::kernels {

/// y = (x - mean) * rstd * weight + bias. mean, rstd: [rows] float, kept for the backward pass. bias may be null.
template <typename T>
void layer_norm_forward(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, int64_t rows,
                        int64_t width, float eps);

/// dx is overwritten; dweight, dbias (float) are added to, by a tree of `parts`. dbias may be null.
template <typename T>
void layer_norm_backward(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx,
                         float* dweight, float* dbias, int64_t rows, int64_t width, const TreeParts& parts = {});

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).
template <typename T>
void rms_norm_forward(const T* x, const T* weight, T* y, float* rstd, int64_t rows, int64_t width, float eps);
template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* dweight, int64_t rows,
                       int64_t width, const TreeParts& parts = {});

/// RMSNorm of each head's channels: x [rows, heads, D] and y with row strides in elements, one weight [D] for all
/// heads. y may be x.
template <typename T>
void head_norm_forward(const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int64_t rows,
                       int64_t heads, int64_t head_dim, float eps);
/// dx is overwritten and may be dy; dweight is added to. rstd [rows, heads] is scratch.
template <typename T>
void head_norm_backward(const T* dy, int64_t dy_stride, const T* x, int64_t x_stride, const T* weight, T* dx,
                        int64_t dx_stride, float* dweight, float* rstd, int64_t rows, int64_t heads, int64_t head_dim,
                        float eps);

}  // namespace cairn::kernels
