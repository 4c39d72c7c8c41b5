#pragma once
// Sums of columns over runs of rows, by a functor. For .cu files.

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/sums.h"

namespace cairn::kernels::cuda {

constexpr int kRowLanes = 8;

/// partials[run, c] = the sum of f.at<N>(row, c) over the rows of the run. A block has kWarp * N columns, each warp
/// every kRowLanes-th row.
template <int N, typename F>
__global__ void __launch_bounds__(kWarp* kRowLanes, 4) column_sums(F f, RowRuns runs, int64_t width, float* partials) {
  RT_SHARED(float, room, kRowLanes* kWarp* N);
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * N;
  const int64_t first = runs.begin(blockIdx.y), end = runs.end(blockIdx.y);
  Pack<float, N> sum;
#pragma unroll
  for (int k = 0; k < N; ++k) sum.at[k] = 0;
  if (c < width) {
#pragma unroll 8
    for (int64_t r = first + threadIdx.y; r < end; r += kRowLanes) {  // eight rows' loads at once
      const Pack<float, N> of = f.template at<N>(r, c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += of.at[k];
    }
  }
  store_pack<N>(room + (threadIdx.y * kWarp + threadIdx.x) * N, sum);
  __syncthreads();
  if (threadIdx.y != 0 || c >= width) return;
  for (int lane = 1; lane < kRowLanes; ++lane) {
    const auto other = load_pack<N>(room + (lane * kWarp + threadIdx.x) * N);
#pragma unroll
    for (int k = 0; k < N; ++k) sum.at[k] += other.at[k];
  }
  store_pack<N>(partials + blockIdx.y * width + c, sum);
}

/// into[c] += the sum of f.at<N>(row, c) over all rows. Scratch: bias_partials(rows, width, parts) floats. `aligned`: f
/// takes packs of 4 columns.
template <typename F>
void add_columns(Queue& on, const F& f, int64_t rows, int64_t width, bool aligned, float* into, int64_t parts) {
  constexpr int kMany = 4;
  auto* const partials = on.room<float>(bias_partials(rows, width, parts));
  if (partials == nullptr) return;
  const RowRuns runs = bias_runs(rows, parts);
  const auto count = static_cast<unsigned>(runs.count());
  const dim3 threads{kWarp, kRowLanes};
  if (width % kMany == 0 && aligned && aligned_to(16, partials)) {
    launch(on, {{blocks_for(width, kWarp * kMany), count}, threads}, column_sums<kMany, F>, f, runs, width, partials);
  } else {
    launch(on, {{blocks_for(width, kWarp), count}, threads}, column_sums<1, F>, f, runs, width, partials);
  }
  add_partials(on, partials, runs, 1, width, into, nullptr);
}

}  // namespace cairn::kernels::cuda
