#pragma once
// The kernel of all pointwise maps. For .cu files.

#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {

/// f.at<N>(i) does elements [i, i + N). Each thread has kMany of them; the last few of `count` go one by one.
template <int kMany, typename F>
__global__ void __launch_bounds__(kThreads) map_packs(F f, int64_t count) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kMany;
  if (i + kMany <= count) {
    f.template at<kMany>(i);
  } else if constexpr (kMany > 1) {
    for (int64_t k = i; k < count; ++k) f.template at<1>(k);
  }
}

/// kMany where all that f accesses is aligned.
template <int kMany, typename F>
void map(Queue& on, const F& f, int64_t count, bool aligned) {
  if (aligned) {
    launch(on, {{blocks_for(count, int64_t{kThreads} * kMany)}, {kThreads}}, map_packs<kMany, F>, f, count);
  } else {
    launch(on, {{blocks_for(count, kThreads)}, {kThreads}}, map_packs<1, F>, f, count);
  }
}

/// a / b of numbers that are not negative. 64 bits take a hundred instructions, more than most maps.
__device__ __forceinline__ int64_t ratio(int64_t a, int64_t b) {
  if ((static_cast<uint64_t>(a) | static_cast<uint64_t>(b)) >> 32 != 0) return a / b;
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

/// Packs of each row of [rows, width], so that a pack never crosses the end of one: f.at<N>(row, column).
template <int kMany, typename F>
__global__ void __launch_bounds__(kThreads) map_row_packs(F f, int64_t rows, int64_t packs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * packs) return;
  const int64_t row = ratio(i, packs);
  f.template at<kMany>(row, (i - row * packs) * kMany);
}

/// kMany where all that f accesses is aligned, and a row is packs.
template <int kMany, typename F>
void map_rows(Queue& on, const F& f, int64_t rows, int64_t width, bool aligned) {
  if (aligned && width % kMany == 0) {
    const int64_t packs = width / kMany;
    launch(on, {{blocks_for(rows * packs, kThreads)}, {kThreads}}, map_row_packs<kMany, F>, f, rows, packs);
  } else {
    launch(on, {{blocks_for(rows * width, kThreads)}, {kThreads}}, map_row_packs<1, F>, f, rows, width);
  }
}

}  // namespace cairn::kernels::cuda
