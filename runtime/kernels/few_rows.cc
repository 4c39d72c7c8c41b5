#include "runtime/kernels/few_rows.h"

#include <algorithm>

#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

constexpr int64_t kOutputs = 4;  // sums at a time, so that their additions overlap

/// sums[j] = x . weight[j] for kOutputs rows of the weight.
template <typename T>
RT_INLINE void dots_body(const T* x, const T* weight, int64_t in, float* sums) {
  const T *w0 = weight, *w1 = w0 + in, *w2 = w1 + in, *w3 = w2 + in;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < in; ++i) {
    const float v = load_f32(x[i]);
    s0 += v * load_f32(w0[i]);
    s1 += v * load_f32(w1[i]);
    s2 += v * load_f32(w2[i]);
    s3 += v * load_f32(w3[i]);
  }
  sums[0] = s0;
  sums[1] = s1;
  sums[2] = s2;
  sums[3] = s3;
}
RT_CLONES(dots)

template <typename T>
RT_INLINE float one_dot_body(const T* x, const T* weight, int64_t in) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < in; ++i) sum += load_f32(x[i]) * load_f32(weight[i]);
  return sum;
}
RT_CLONES(one_dot)

}  // namespace

template <typename T>
void few_rows_matmul(const T* x, const T* weight, const T* bias, T* y, int64_t y_stride, int64_t rows, int64_t out,
                     int64_t in) {
  // Ranges begin at multiples of kOutputs: which outputs are summed together does not depend on the threads.
  parallel_ranges(out, kOutputs, rows * in, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j += kOutputs) {
      const int64_t count = std::min(kOutputs, end - j);
      for (int64_t r = 0; r < rows; ++r) {
        float sums[kOutputs];
        if (count == kOutputs) {
          dots(x + r * in, weight + j * in, in, sums);
        } else {
          for (int64_t k = 0; k < count; ++k) sums[k] = one_dot(x + r * in, weight + (j + k) * in, in);
        }
        for (int64_t k = 0; k < count; ++k) {
          store_f32(&y[r * y_stride + j + k], sums[k] + (bias != nullptr ? load_f32(bias[j + k]) : 0.0f));
        }
      }
    }
  });
}

template void few_rows_matmul<float>(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t,
                                     int64_t);
template void few_rows_matmul<bf16>(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t);
template void few_rows_matmul<f16>(const f16*, const f16*, const f16*, f16*, int64_t, int64_t, int64_t, int64_t);

}  // namespace cairn::kernels
