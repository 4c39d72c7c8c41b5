#include "runtime/kernels/cuda/sums.h"

#include "runtime/kernels/cuda/column_sums.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kAdders = 16;  // threads that share a column

/// A block has kWarp columns of all arrays. The sum over a part is that of its adders in order, each of which adds
/// every kAdders-th run. The sums of parts are left in the first run of each, and joined there.
__global__ void __launch_bounds__(kWarp* kAdders)
    add_runs(float* partials, RowRuns runs, int64_t width, int64_t all, float* into0, float* into1) {
  RT_SHARED(float, room, kWarp* kAdders);
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const int64_t part = runs.part_runs * all;  // floats of a part's runs
  for (int64_t p = 0; p < runs.parts; ++p) {
    float sum = 0;
    if (c < all) {
#pragma unroll 8
      for (int64_t k = threadIdx.y; k < runs.part_runs; k += kAdders) sum += partials[p * part + k * all + c];
    }
    room[threadIdx.y * kWarp + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < all) {
      sum = 0;
#pragma unroll
      for (int adder = 0; adder < kAdders; ++adder) sum += room[adder * kWarp + threadIdx.x];
      partials[p * part + c] = sum;
    }
    __syncthreads();  // before the room is written again
  }
  if (threadIdx.y != 0 || c >= all) return;
  for (int64_t step = 1; step < runs.parts; step *= 2) {
    for (int64_t p = 0; p < runs.parts; p += 2 * step) partials[p * part + c] += partials[(p + step) * part + c];
  }
  float* const into = c < width ? into0 + c : into1 + (c - width);
  *into += partials[c];
}

template <typename T>
struct Elements {
  const T* x;
  int64_t width;
  template <int N>
  __device__ __forceinline__ Pack<float, N> at(int64_t row, int64_t c) const {
    const auto of = load_pack<N>(x + row * width + c);
    Pack<float, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) out.at[k] = load_f32(of.at[k]);
    return out;
  }
};

}  // namespace

void add_partials(Queue& on, float* partials, const RowRuns& runs, int64_t arrays, int64_t width, float* into0,
                  float* into1) {
  if (runs.count() == 0) return;
  const int64_t all = arrays * width;
  launch(on, {{blocks_for(all, kWarp)}, {kWarp, kAdders}}, add_runs, partials, runs, width, all, into0, into1);
}

template <typename T>
void bias_backward(Queue& on, const T* dy, float* dbias, int64_t rows, int64_t width, const TreeParts& parts) {
  add_columns(on, Elements<T>{dy, width}, rows, width, aligned_to(4 * static_cast<int64_t>(sizeof(T)), dy), dbias,
              parts_of(parts));
}

#define RT_INSTANTIATE(T) template decltype(bias_backward<T>) bias_backward<T>
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
