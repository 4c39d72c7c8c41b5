#include "runtime/kernels/cuda/sums.h"

#include "runtime/kernels/cuda/column_sums.h"

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

/// A thread has a column of all arrays: the sums of parts are left in the first run of each, and joined there.
__global__ void __launch_bounds__(kThreads)
    add_in_tree(float* partials, RowRuns runs, int64_t width, int64_t all, float* into0, float* into1) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= all) return;
  const int64_t part = runs.part_runs * all;  // floats of a part's runs
  for (int64_t p = 0; p < runs.parts; ++p) {
    float sum = 0;
    for (int64_t k = 0; k < runs.part_runs; ++k) sum += partials[p * part + k * all + c];
    partials[p * part + c] = sum;
  }
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
  const int64_t all = arrays * width;
  const Size size{{blocks_for(all, kThreads)}, {kThreads}};
  if (runs.count() == 0) return;
  if (runs.parts == 1) {
    launch(on, size, add_in_order, partials, runs.count(), width, all, into0, into1);
  } else {
    launch(on, size, add_in_tree, partials, runs, width, all, into0, into1);
  }
}

template <typename T>
void bias_backward(Queue& on, const T* dy, float* dbias, int64_t rows, int64_t width, float* partials, int64_t parts) {
  add_columns(on, Elements<T>{dy, width}, rows, width, aligned_to(4 * static_cast<int64_t>(sizeof(T)), dy), dbias,
              partials, parts);
}

#define RT_INSTANTIATE(T) template void bias_backward<T>(Queue&, const T*, float*, int64_t, int64_t, float*, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::kernels::cuda
