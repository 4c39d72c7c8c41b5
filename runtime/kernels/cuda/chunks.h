#pragma once
// Helpers of blocks that have a chunk of a run each (run_tables.h); weights beside a master. For .cu files.

#include "runtime/kernels/cuda/elements.h"
#include "runtime/kernels/cuda/run_tables.h"

namespace cairn::kernels::cuda {

/// The run that has this block's chunk: the last whose first chunk is not behind it.
template <typename Run>
__device__ __forceinline__ Run run_of_block(const RunTable<Run>& tables) {
  int64_t run = 0;
  for (int64_t end = tables.run_count; end - run > 1;) {
    const int64_t middle = run + (end - run) / 2;
    if (tables.runs[middle].first_chunk <= blockIdx.x) {
      run = middle;
    } else {
      end = middle;
    }
  }
  return tables.runs[run];
}

inline Size one_a_chunk(int64_t chunks) { return {{static_cast<unsigned>(chunks)}, {kThreads}}; }

template <typename T, int N>
__device__ __forceinline__ void put_rounded(void* weights, int64_t i, const Pack<float, N>& master) {
  Pack<T, N> low;
#pragma unroll
  for (int k = 0; k < N; ++k) store_f32(&low.at[k], master.at[k]);
  store_pack<N>(static_cast<T*>(weights) + i, low);
}

/// Into the weights of a run, which may be null, from element i on.
template <int N, typename Run>
__device__ __forceinline__ void put_weights(const Run& run, int64_t i, const Pack<float, N>& master) {
  if (run.weights == nullptr) return;
  if (run.dtype == DType::kBf16) {
    put_rounded<bf16>(run.weights, i, master);
  } else if (run.dtype == DType::kF16) {
    put_rounded<f16>(run.weights, i, master);
  } else {
    store_pack<N>(static_cast<float*>(run.weights) + i, master);
  }
}

}  // namespace cairn::kernels::cuda
