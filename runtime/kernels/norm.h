#pragma once
// LayerNorm and RMSNorm over rows of `width` elements. Statistics in float.

#include <cstdint>

namespace cairn::kernels {

/// y = (x - mean) * rstd * weight + bias. mean, rstd: [rows] float, kept for the backward pass. bias may be null.
template <typename T>
void layer_norm_forward(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, int64_t rows,
                        int64_t width, float eps);

/// dx is overwritten; dweight, dbias (float) are added to. dbias may be null.
template <typename T>
void layer_norm_backward(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, T* dx,
                         float* dweight, float* dbias, int64_t rows, int64_t width);

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).
template <typename T>
void rms_norm_forward(const T* x, const T* weight, T* y, float* rstd, int64_t rows, int64_t width, float eps);
template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* dweight, int64_t rows,
                       int64_t width);

}  // namespace cairn::kernels
