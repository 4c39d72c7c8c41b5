#pragma once
// One layer of an MLP, on the host's memory: y = x W^T + b. Float goes to the packed kernels
// (runtime/kernels/matmul.h); double, which tests compare with, is summed plainly.
//
// Shapes: x [rows, in], W [out, in], b [out], y [rows, out], all row-major.

#include <cstdint>

namespace cairn::dlrm {

/// `b` may be null: no bias.
template <typename T>
void linear_forward(const T* x, int64_t rows, int64_t in, const T* w, const T* b, int64_t out, T* y);

/// dx = dy W (not where dx is null), dw = dy^T x, db = sum of dy over rows (not where null). Overwrites all three;
/// without rows dw and db are zeros.
template <typename T>
void linear_backward(const T* x, const T* dy, int64_t rows, int64_t in, const T* w, int64_t out, T* dx, T* dw, T* db);

/// y = max(y, 0) in place, and dy = 0 where y is 0. A NaN stays one.
template <typename T>
void relu_forward(T* y, int64_t count);
template <typename T>
void relu_backward(const T* y, T* dy, int64_t count);

}  // namespace cairn::dlrm
