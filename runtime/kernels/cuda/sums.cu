#include "runtime/kernels/cuda/sums.h"

#include "runtime/kernels/cuda/elements.h"

namespace cairn::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    add_in_order(const float* partials, int64_t count, int64_t width, int64_t all, float* into0, float* into1) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= all) return;
  float sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += partials[k * all + c];
  float* const into = c < width ? into0 + c : into1 + (c - width);
  *into += sum;
}

constexpr int kRowLanes = 8;

/// A block has kWarp * N columns and a run of rows, each warp every kRowLanes-th of them.
template <int N, typename T>
__global__ void __launch_bounds__(kWarp* kRowLanes)
    column_sums(const T* x, int64_t rows, int64_t width, int64_t rows_each, float* partials) {
  RT_SHARED(float, room, kRowLanes* kWarp* N);
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * N;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * rows_each;
  const int64_t end = first + rows_each < rows ? first + rows_each : rows;
  Pack<float, N> sum;
#pragma unroll
  for (int k = 0; k < N; ++k) sum.at[k] = 0;
  if (c < width) {
    for (int64_t r = first + threadIdx.y; r < end; r += kRowLanes) {
      const auto of = load_pack<N>(x + r * width + c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += load_f32(of.at[k]);
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

}  // namespace

void add_partials(Queue& on, const float* partials, int64_t count, int64_t arrays, int64_t width, float* into0,
                  float* into1) {
  const int64_t all = arrays * width;
  launch(on, {{blocks_for(all, kThreads)}, {kThreads}}, add_in_order, partials, count, width, all, into0, into1);
}

template <typename T>
void bias_backward(Queue& on, const T* dy, float* dbias, int64_t rows, int64_t width, float* partials) {
  constexpr int kMany = 4;
  const RowRuns runs = bias_runs(rows);
  const auto count = static_cast<unsigned>(runs.count);
  const dim3 threads{kWarp, kRowLanes};
  if (width % kMany == 0 && aligned_to(kMany * static_cast<int64_t>(sizeof(T)), dy) && aligned_to(16, partials)) {
    launch(on, {{blocks_for(width, kWarp * kMany), count}, threads}, column_sums<kMany, T>, dy, rows, width,
           runs.rows_each, partials);
  } else {
    launch(on, {{blocks_for(width, kWarp), count}, threads}, column_sums<1, T>, dy, rows, width, runs.rows_each,
           partials);
  }
  add_partials(on, partials, runs.count, 1, width, dbias, nullptr);
}

#define RT_INSTANTIATE(T) template void bias_backward<T>(Queue&, const T*, float*, int64_t, int64_t, float*)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
