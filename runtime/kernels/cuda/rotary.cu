#include "runtime/kernels/cuda/rotary.h"

#include "runtime/core/check.h"
#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {
namespace {

struct Args {
  int64_t rows, tokens, heads, head_dim, stride, pairs;
  const int32_t* positions;
  float sign;
};

/// A thread turns N pairs of a head.
template <bool kInterleaved, int N, typename T>
__global__ void __launch_bounds__(kThreads) turn(Args of, T* x, const float* table) {
  const int64_t packs = of.pairs / N;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= of.rows * of.heads * packs) return;
  const int64_t first = i % packs * N, head = i / packs % of.heads, row = i / packs / of.heads;
  const int64_t position = of.positions != nullptr ? of.positions[row] : row % of.tokens;
  const float* const angles = table + (position * of.pairs + first) * 2;
  float cosines[N], sines[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const auto angle = load_pack<2>(angles + 2 * k);
    cosines[k] = angle.at[0];
    sines[k] = of.sign * angle.at[1];
  }
  T* const at = x + row * of.stride + head * of.head_dim;
  if constexpr (kInterleaved) {
    auto pairs = load_pack<2 * N>(at + 2 * first);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float a = load_f32(pairs.at[2 * k]), b = load_f32(pairs.at[2 * k + 1]);
      store_f32(&pairs.at[2 * k], a * cosines[k] - b * sines[k]);
      store_f32(&pairs.at[2 * k + 1], b * cosines[k] + a * sines[k]);
    }
    store_pack<2 * N>(at + 2 * first, pairs);
  } else {
    T *const low_at = at + first, *const high_at = low_at + of.pairs;
    auto low = load_pack<N>(low_at), high = load_pack<N>(high_at);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float a = load_f32(low.at[k]), b = load_f32(high.at[k]);
      store_f32(&low.at[k], a * cosines[k] - b * sines[k]);
      store_f32(&high.at[k], b * cosines[k] + a * sines[k]);
    }
    store_pack<N>(low_at, low);
    store_pack<N>(high_at, high);
  }
}

template <bool kInterleaved, int N, typename T>
void turn_all(Queue& on, const Args& of, T* x, const float* table) {
  launch(on, {{blocks_for(of.rows * of.heads * (of.pairs / N), kThreads)}, {kThreads}}, turn<kInterleaved, N, T>, of, x,
         table);
}

}  // namespace

template <typename T>
void rotary(Queue& on, const RotaryDims& d, T* x, const float* table, bool inverse) {
  RT_CHECK(d.turning % 2 == 0 && d.turning <= d.head_dim, "rotary of {} channels of {}", d.turning, d.head_dim);
  const Args of{
      d.rows, d.tokens, d.heads, d.head_dim, d.stride, d.turning / 2, address_of(d.positions), inverse ? -1.0f : 1.0f};
  if (of.pairs == 0) return;
  if (d.interleaved) {
    constexpr int64_t kPairBytes = 2 * sizeof(T);
    // Two neighbours are one access where rows and heads begin at whole pairs.
    if (of.pairs % 2 == 0 && d.head_dim % 4 == 0 && d.stride % 4 == 0 && aligned_to(2 * kPairBytes, x)) {
      turn_all<true, 2>(on, of, x, table);
    } else {
      RT_CHECK(d.head_dim % 2 == 0 && d.stride % 2 == 0 && aligned_to(kPairBytes, x),
               "interleaved rotary of {} channels a head, {} a row", d.head_dim, d.stride);
      turn_all<true, 1>(on, of, x, table);
    }
  } else if (of.pairs % 4 == 0 && d.head_dim % 4 == 0 && d.stride % 4 == 0 &&
             aligned_to(4 * static_cast<int64_t>(sizeof(T)), x)) {
    turn_all<false, 4>(on, of, x, table);
  } else {
    turn_all<false, 1>(on, of, x, table);
  }
}

#define RT_INSTANTIATE(T) template void rotary<T>(Queue&, const RotaryDims&, T*, const float*, bool)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
