#include "runtime/kernels/dropout.h"

#include <algorithm>
#include <cmath>

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/parallel.h"
#include "runtime/kernels/simd.h"

namespace cairn::kernels {
namespace {

RT_INLINE void factors_leaf_body(uint32_t low, uint32_t high, uint32_t first, int64_t n, uint32_t threshold,
                                 float scale, float* factors) {
  for (int64_t i = 0; i < n; ++i) {
    factors[i] = dropout_hash(low, high, first + static_cast<uint32_t>(i)) < threshold ? 0.0f : scale;
  }
}
RT_CLONES(factors_leaf)

template <typename T>
RT_INLINE void multiply_leaf_body(const T* x, const float* factors, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_f32(&out[i], load_f32(x[i]) * factors[i]);
}
RT_CLONES(multiply_leaf)

}  // namespace

DropoutRate DropoutRate::of(double rate) {
  RT_CHECK(rate >= 0 && rate < 1, "a dropout rate of {}", rate);
  if (rate == 0) return {};
  const double threshold = std::clamp(std::nearbyint(rate * 0x1p32), 1.0, 0x1p32 - 1);
  return {static_cast<uint32_t>(threshold), static_cast<float>(1.0 / (1.0 - rate))};
}

void dropout_factors(uint64_t row_key, int64_t first, int64_t n, DropoutRate rate, float* factors) {
  factors_leaf(static_cast<uint32_t>(row_key), static_cast<uint32_t>(row_key >> 32), static_cast<uint32_t>(first), n,
               rate.threshold, rate.keep_scale, factors);
}

template <typename T>
void dropout(const DropoutRows& of, const T* x, T* out) {
  const uint64_t* const sample_keys = of.sample_keys.address();
  const int64_t width = of.width;
  parallel_ranges(of.rows, 1, 4 * width, [&](int64_t r, int64_t end) {
    float factors[kMapBlock];
    for (; r < end; ++r) {
      const TokenRuns::Place place = of.tokens.place(of.first_row + r, of.samples);
      const uint64_t key = dropout_row_key(sample_keys[place.sample], of.site, static_cast<uint64_t>(place.position));
      for (int64_t c = 0; c < width; c += kMapBlock) {
        const int64_t n = std::min(kMapBlock, width - c);
        dropout_factors(key, c, n, of.rate, factors);
        multiply_leaf(x + r * width + c, factors, out + r * width + c, n);
      }
    }
  });
}

#define RT_INSTANTIATE(T) template void dropout<T>(const DropoutRows&, const T*, T*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels
