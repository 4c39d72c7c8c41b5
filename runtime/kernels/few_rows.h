#pragma once
// y = x W^T for a handful of rows x, as in generation: W is read once, from memory, and its bandwidth is the limit.

#include <cstdint>

namespace cairn::kernels {

/// x [rows, in], weight [out, in], y with `y_stride` elements from row to row; bias [out] or null. T is float, bf16 or
/// f16, sums are float. A row's bits depend on neither the other rows nor the number of threads.
template <typename T>
void few_rows_matmul(const T* x, const T* weight, const T* bias, T* y, int64_t y_stride, int64_t rows, int64_t out,
                     int64_t in);

/// From here on a matrix product that reuses what it loads is faster.
constexpr int64_t kFewRows = 16;

}  // namespace cairn::kernels
