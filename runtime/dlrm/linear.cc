#include "runtime/dlrm/linear.h"

#include <algorithm>
#include <type_traits>

#include "runtime/kernels/matmul.h"
#include "runtime/kernels/parallel.h"

namespace cairn::dlrm {
namespace {

DevicePtr<const void> at(const float* p) { return DevicePtr<const void>(p); }

}  // namespace

template <typename T>
void linear_forward(const T* x, int64_t rows, int64_t in, const T* w, const T* b, int64_t out, T* y) {
  if (rows == 0) return;
  if constexpr (std::is_same_v<T, float>) {
    kernels::matmul({.m = rows,
                     .n = out,
                     .k = in,
                     .a = at(x),
                     .lda = in,
                     .b = at(w),
                     .ldb = in,
                     .trans_b = true,
                     .c = DevicePtr<void>(y),
                     .ldc = out,
                     .bias = at(b)});
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < out; ++o) {
        T sum = b == nullptr ? 0 : b[o];
        for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
        y[r * out + o] = sum;
      }
    }
  }
}

template <typename T>
void linear_backward(const T* x, const T* dy, int64_t rows, int64_t in, const T* w, int64_t out, T* dx, T* dw, T* db) {
  if (rows == 0) {
    std::fill_n(dw, out * in, T{0});
    if (db != nullptr) std::fill_n(db, out, T{0});
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    if (dx != nullptr) {
      kernels::matmul({.m = rows,
                       .n = in,
                       .k = out,
                       .a = at(dy),
                       .lda = out,
                       .b = at(w),
                       .ldb = in,
                       .c = DevicePtr<void>(dx),
                       .ldc = in});
    }
    kernels::matmul({.m = out,
                     .n = in,
                     .k = rows,
                     .a = at(dy),
                     .lda = out,
                     .trans_a = true,
                     .b = at(x),
                     .ldb = in,
                     .c = DevicePtr<void>(dw),
                     .ldc = in,
                     .sums = DevicePtr<float>(db)});
  } else {
    std::fill_n(dw, out * in, T{0});
    if (db != nullptr) std::fill_n(db, out, T{0});
    if (dx != nullptr) std::fill_n(dx, rows * in, T{0});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < out; ++o) {
        const T g = dy[r * out + o];
        if (db != nullptr) db[o] += g;
        for (int64_t i = 0; i < in; ++i) {
          dw[o * in + i] += g * x[r * in + i];
          if (dx != nullptr) dx[r * in + i] += g * w[o * in + i];
        }
      }
    }
  }
}

template <typename T>
void relu_forward(T* y, int64_t count) {
  kernels::parallel_elements(count, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = y[i] < 0 ? T{0} : y[i];
  });
}

template <typename T>
void relu_backward(const T* y, T* dy, int64_t count) {
  kernels::parallel_elements(count, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) dy[i] = y[i] <= 0 ? T{0} : dy[i];
  });
}

#define INSTANTIATE(T)                                                                                \
  template void linear_forward(const T*, int64_t, int64_t, const T*, const T*, int64_t, T*);          \
  template void linear_backward(const T*, const T*, int64_t, int64_t, const T*, int64_t, T*, T*, T*); \
  template void relu_forward(T*, int64_t);                                                            \
  template void relu_backward(const T*, T*, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace cairn::dlrm
