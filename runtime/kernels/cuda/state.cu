#include "runtime/kernels/cuda/state.h"

#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kMany = 4;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;  // packs of a thread that are under way

struct Balance {
  float rate, mean;
  const Clip* clip;
  const float *choices, *from;
  float* to;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    if (clip != nullptr && clip->finite == 0) return;
    const float of = choices[i];
    to[i] = from[i] + (of < mean ? rate : of > mean ? -rate : 0.0f);
  }
};

struct Fill {
  double value;
  double* numbers;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    numbers[i] = value;
  }
};

__device__ __forceinline__ uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t out;
  __builtin_memcpy(&out, &x, sizeof(out));
  return out;
#endif
}

/// Sums of integers: the same in any order. What a term is says F: add(word, index, sum), and join(a, b).
struct WordSums {
  using Sum = uint64_t;
  __device__ static Sum add(uint32_t word, int64_t i, Sum sum) {
    return join(sum, static_cast<uint64_t>(word * static_cast<uint32_t>(i)) << 32 | word);
  }
  __device__ static Sum join(Sum a, Sum b) { return cairn::add_word_sums(a, b); }
};
struct NotFinite {
  using Sum = int64_t;
  __device__ static Sum add(uint32_t word, int64_t, Sum sum) {
    return sum + ((word & 0x7f800000u) == 0x7f800000u ? 1 : 0);
  }
  __device__ static Sum join(Sum a, Sum b) { return a + b; }
};

/// Of all threads of the block, to the first one. room [kWarps].
template <typename F>
__device__ __forceinline__ typename F::Sum joined(typename F::Sum sum, typename F::Sum* room) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum = F::join(sum, __shfl_xor_sync(kAllLanes, sum, step));
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = room[0];
  for (int warp = 1; warp < kWarps; ++warp) sum = F::join(sum, room[warp]);
  return sum;
}

/// Sums x[i] and each element a multiple of `step` further on, up to `end`, in packs of N; the last pack may be short.
template <typename F, int N>
__device__ __forceinline__ typename F::Sum sum_of_thread(const float* x, int64_t i, int64_t step, int64_t end) {
  typename F::Sum sum = 0;
  for (; i + (kLoads - 1) * step + N <= end; i += kLoads * step) {
    Pack<float, N> of[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) of[load] = load_pack<N>(x + i + load * step);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum = F::add(bits_of(of[load].at[k]), i + load * step + k, sum);
    }
  }
  for (; i + N <= end; i += step) {
    const auto of = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) sum = F::add(bits_of(of.at[k]), i + k, sum);
  }
  for (; i < end; ++i) sum = F::add(bits_of(x[i]), i, sum);  // by one thread, of the last pack
  return sum;
}

template <typename F, int N>
__global__ void __launch_bounds__(kThreads) sums_of_blocks(const float* x, int64_t count, typename F::Sum* partials) {
  RT_SHARED(typename F::Sum, room, kWarps);
  typename F::Sum sum = sum_of_thread<F, N>(x, (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N,
                                            static_cast<int64_t>(gridDim.x) * kThreads * N, count);
  sum = joined<F>(sum, room);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// A block for each chunk.
__global__ void __launch_bounds__(kThreads)
    word_sums_of_chunks(const WordRun* runs, int64_t count, uint64_t* partials) {
  RT_SHARED(uint64_t, room, kWarps);
  const int64_t chunk = blockIdx.x;
  int64_t at = 0;
  for (int64_t behind = count; behind - at > 1;) {
    const int64_t middle = (at + behind) / 2;
    (runs[middle].first_chunk <= chunk ? at : behind) = middle;
  }
  const WordRun run = runs[at];
  const int64_t begin = (chunk - run.first_chunk) * kSumChunkWords;
  const int64_t end = begin + kSumChunkWords < run.count ? begin + kSumChunkWords : run.count;
  uint64_t sum;
  if (reinterpret_cast<uintptr_t>(run.words) % 16 == 0) {
    sum = sum_of_thread<WordSums, kMany>(run.words, begin + static_cast<int64_t>(threadIdx.x) * kMany,
                                         int64_t{kThreads} * kMany, end);
  } else {
    sum = sum_of_thread<WordSums, 1>(run.words, begin + threadIdx.x, kThreads, end);
  }
  sum = joined<WordSums>(sum, room);
  if (threadIdx.x == 0) partials[chunk] = sum;
}

template <typename F>
__device__ __forceinline__ typename F::Sum all_blocks(const typename F::Sum* partials, int64_t blocks,
                                                      typename F::Sum* room) {
  typename F::Sum sum = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += kThreads) sum = F::join(sum, partials[i]);
  return joined<F>(sum, room);
}

__global__ void __launch_bounds__(kThreads)
    put_word_sums(const uint64_t* partials, int64_t blocks, int64_t first, const Clip* clip, uint64_t* sum) {
  RT_SHARED(uint64_t, room, kWarps);
  const uint64_t all = all_blocks<WordSums>(partials, blocks, room);
  if (threadIdx.x != 0 || (clip != nullptr && clip->finite == 0)) return;
  *sum = cairn::add_word_sums(first == 0 ? 0 : *sum, shift_word_sums(all, first));
}
/// A block for each run.
__global__ void __launch_bounds__(kThreads)
    word_sums_of_runs(const WordRun* runs, const uint64_t* partials, uint64_t* sums) {
  RT_SHARED(uint64_t, room, kWarps);
  const WordRun run = runs[blockIdx.x];
  const uint64_t all = all_blocks<WordSums>(partials + run.first_chunk, sum_chunks(run.count), room);
  if (threadIdx.x == 0) sums[blockIdx.x] = all;
}
__global__ void __launch_bounds__(kThreads) add_counts(const int64_t* partials, int64_t blocks, int64_t* counts) {
  RT_SHARED(int64_t, room, kWarps);
  const int64_t all = all_blocks<NotFinite>(partials, blocks, room);
  if (threadIdx.x == 0) *counts += all;
}

__global__ void __launch_bounds__(kThreads) note_found(const float* x, int64_t count, bool first, double* found) {
  RT_SHARED(int64_t, room, kWarps);
  const int64_t all = joined<NotFinite>(sum_of_thread<NotFinite, 1>(x, threadIdx.x, kThreads, count), room);
  if (threadIdx.x == 0 && (first || all > 0)) *found = all > 0 ? 1.0 : 0.0;
}

/// Returns of how many blocks there are sums. A thread has kLoads packs, or more.
template <typename F>
int64_t sum_blocks(Queue& on, const float* x, int64_t count, typename F::Sum* partials) {
  const int64_t wanted = blocks_for(count, int64_t{kLoads} * kMany * kThreads);
  const int64_t blocks = wanted < kSumBlocks ? wanted : kSumBlocks;
  const Size size{{static_cast<unsigned>(blocks)}, {kThreads}};
  if (aligned_to(16, x)) {
    launch(on, size, sums_of_blocks<F, kMany>, x, count, partials);
  } else {
    launch(on, size, sums_of_blocks<F, 1>, x, count, partials);
  }
  return blocks;
}

}  // namespace

void fill_doubles(Queue& on, double value, double* numbers, int64_t count) {
  map<1>(on, Fill{value, numbers}, count, true);
}

void balance_bias(Queue& on, float rate, float mean, const Clip* clip, const float* choices, const float* from,
                  float* to, int64_t count) {
  map<1>(on, Balance{rate, mean, clip, choices, from, to}, count, true);
}
void add_word_sums(Queue& on, const float* x, int64_t count, int64_t first, const Clip* clip, uint64_t* partials,
                   uint64_t* sum) {
  const int64_t blocks = sum_blocks<WordSums>(on, x, count, partials);
  launch(on, {{1}, {kThreads}}, put_word_sums, partials, blocks, first, clip, sum);
}
int sum_runs(CUstream_st* stream, const WordRun* runs, int64_t count, int64_t chunks, uint64_t* partials,
             uint64_t* sums) {
  Queue on{stream};
  if (chunks > 0) {
    launch(on, {{static_cast<unsigned>(chunks)}, {kThreads}}, word_sums_of_chunks, runs, count, partials);
  }
  launch(on, {{static_cast<unsigned>(count)}, {kThreads}}, word_sums_of_runs, runs, partials, sums);
  return on.error;
}
void count_not_finite(Queue& on, const float* x, int64_t count, int64_t* partials, int64_t* counts) {
  const int64_t blocks = sum_blocks<NotFinite>(on, x, count, partials);
  launch(on, {{1}, {kThreads}}, add_counts, partials, blocks, counts);
}
void note_not_finite(Queue& on, const float* x, int64_t count, bool first, double* found) {
  launch(on, {{1}, {kThreads}}, note_found, x, count, first, found);
}

}  // namespace cairn::kernels::cuda
