#include "runtime/kernels/cuda/update.h"

#include "runtime/kernels/cuda/exact.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kBlock = 16;  // elements whose squares are summed first
constexpr int kMany = 4;    // elements at once
constexpr int kRoom = kExactWords * kThreads / kWarp;

// --- the norm
// ---------------------------------------------------------------------------------------------------------

/// The sum of so many, a power of two: the upper half to the lower, and so on. A loop over halves nvcc does not unroll,
/// and its array would lie in memory.
template <int kCount>
__device__ __forceinline__ double folded(double* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[i] += x[i + kCount / 2];
    return folded<kCount / 2>(x);
  }
}

__device__ __forceinline__ double sum_of_squares(const float* x) {
  double squares[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) squares[i] = static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return folded<kBlock>(squares);
}

/// Of elements [first, end) of `x`, which may be of any alignment, those of this thread of the block.
__device__ __forceinline__ void add_squares(const float* x, int64_t first, int64_t end, ExactDigits& mine) {
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  for (int64_t i = first + static_cast<int64_t>(threadIdx.x) * kBlock; i < end; i += kThreads * kBlock) {
    float of[kBlock];
    if (aligned && i + kBlock <= end) {
#pragma unroll
      for (int k = 0; k < kBlock; k += kMany) {
        const auto pack = load_pack<kMany>(x + i + k);
#pragma unroll
        for (int j = 0; j < kMany; ++j) of[k + j] = pack.at[j];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kBlock; ++k) of[k] = i + k < end ? x[i + k] : 0.0f;
    }
    mine.add(sum_of_squares(of));
  }
}

__global__ void __launch_bounds__(kThreads) chunk_squares(const Floats* runs, const Chunk* chunks, double* partials) {
  RT_SHARED(double, room, kRoom);
  const Chunk chunk = chunks[blockIdx.x];
  const Floats of = runs[chunk.run];
  const int64_t first = chunk.number * kChunk;
  ExactDigits mine;
  mine.clear();
  add_squares(of.data, first, first + kChunk < of.count ? first + kChunk : of.count, mine);
  block_words(mine, partials + static_cast<int64_t>(blockIdx.x) * kExactWords, room);
}

/// A block has each kSquareBlocks-th of the chunks of all runs, as if they stood one after the other. Which sums meet
/// where does not matter: they are exact.
__global__ void __launch_bounds__(kThreads, 4)
    run_squares(const float* x, const ElemRun* runs, int64_t run_count, double* partials) {
  RT_SHARED(double, room, kRoom);
  RT_SHARED(int64_t, some, 2 * kThreads);  // where runs begin, their counts
  ExactDigits mine;
  mine.clear();
  bool any = false;
  int64_t next = blockIdx.x;  // chunk of this block's, counted from the run's first
  for (int64_t from = 0; from < run_count; from += kThreads) {
    __syncthreads();
    if (from + threadIdx.x < run_count) {
      some[2 * threadIdx.x] = runs[from + threadIdx.x].begin;
      some[2 * threadIdx.x + 1] = runs[from + threadIdx.x].count;
    }
    __syncthreads();
    const int64_t here = run_count - from < kThreads ? run_count - from : kThreads;
    for (int64_t r = 0; r < here; ++r) {
      const int64_t count = some[2 * r + 1], chunks = (count + kChunk - 1) / kChunk;
      for (; next < chunks; next += kSquareBlocks) {
        const int64_t first = next * kChunk;
        any = true;
        add_squares(x + some[2 * r], first, first + kChunk < count ? first + kChunk : count, mine);
      }
      next -= chunks;
    }
  }
  double* const words = partials + blockIdx.x * static_cast<int64_t>(kExactWords);
  if (any) return block_words(mine, words, room);
  if (threadIdx.x < kExactWords) words[threadIdx.x] = 0;
}

constexpr int kAdders = 32;  // threads that share a word's chunks

/// A block for each sum of each group.
__global__ void __launch_bounds__(kAdders * 16)
    words_added(const double* partials, const int32_t* begins, int64_t sums, double* words) {
  RT_SHARED(double, room, kAdders* kExactWords);
  const int64_t group = blockIdx.x / sums, sum = blockIdx.x % sums;
  const int word = static_cast<int>(threadIdx.x) % 16, adder = static_cast<int>(threadIdx.x) / 16;
  if (word < kExactWords) {
    double part = 0;
    for (int64_t chunk = begins[group] + adder; chunk < begins[group + 1]; chunk += kAdders) {
      part += partials[(chunk * sums + sum) * kExactWords + word];
    }
    room[adder * kExactWords + word] = part;
  }
  __syncthreads();
  if (adder != 0 || word >= kExactWords) return;
  double all = 0;
  for (int a = 0; a < kAdders; ++a) all += room[a * kExactWords + word];
  words[blockIdx.x * static_cast<int64_t>(kExactWords) + word] = all;
}

/// words [blocks, .] = the sum over partials [count, blocks, .], or are added to.
__global__ void __launch_bounds__(kAdders * 16)
    words_of_all(const double* partials, int64_t count, bool added, double* words) {
  RT_SHARED(double, room, kAdders* kExactWords);
  const int word = static_cast<int>(threadIdx.x) % 16, adder = static_cast<int>(threadIdx.x) / 16;
  if (word < kExactWords) {
    double part = 0;
#pragma unroll 8
    for (int64_t i = adder; i < count; i += kAdders) {
      part += partials[(i * gridDim.x + blockIdx.x) * kExactWords + word];
    }
    room[adder * kExactWords + word] = part;
  }
  __syncthreads();
  if (adder != 0 || word >= kExactWords) return;
  words += static_cast<int64_t>(blockIdx.x) * kExactWords;
  double all = added ? words[word] : 0.0;
  for (int a = 0; a < kAdders; ++a) all += room[a * kExactWords + word];
  words[word] = all;
}

__global__ void words_carried(int64_t count, double* words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  double* const at = words + i * kExactWords;
  const ExactDigits of = carried(at);
#pragma unroll
  for (int k = 0; k < kExactDigits; ++k) at[k] = static_cast<double>(of.digit[k]);
}

__global__ void clip_factor(const double* words, const ClipNumbers* numbers, Clip* out) {
  const ClipNumbers of = *numbers;
  const double norm = sqrt(value_of(words)) / of.loss_scale * of.gradient_scale;
  const double scale = of.most > 0 && of.most / (norm + 1e-6) < 1.0 ? of.most / (norm + 1e-6) : 1.0;
  out->norm = norm;
  out->grad_scale = static_cast<float>(scale * of.gradient_scale / of.loss_scale);
  out->finite = isfinite(norm) ? 1 : 0;
}

// --- updates
// ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned16(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }
__device__ __forceinline__ bool in_packs(const UpdateRun& run) {
  return aligned16(run.grad) && aligned16(run.from.master) && aligned16(run.from.exp_avg) &&
         aligned16(run.from.exp_avg_sq) && aligned16(run.to.master) && aligned16(run.to.exp_avg) &&
         aligned16(run.to.exp_avg_sq) && aligned16(run.weight) && aligned16(run.weight_bf16) &&
         aligned16(run.weight_f16);
}

template <int N>
__device__ __forceinline__ void put_weights(const UpdateRun& run, int64_t i, const Pack<float, N>& master) {
  if (run.weight != nullptr) store_pack<N>(run.weight + i, master);
  if (run.weight_bf16 != nullptr) {
    Pack<bf16, N> low;
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&low.at[k], master.at[k]);
    store_pack<N>(run.weight_bf16 + i, low);
  }
  if (run.weight_f16 != nullptr) {
    Pack<f16, N> low;
#pragma unroll
    for (int k = 0; k < N; ++k) store_f32(&low.at[k], master.at[k]);
    store_pack<N>(run.weight_f16 + i, low);
  }
}

/// f.at<N>(run, i) for the elements of the block's chunk.
template <typename F>
__device__ __forceinline__ void for_chunk(const UpdateRun& run, int64_t number, F& f) {
  const int64_t first = number * kChunk;
  const int64_t end = first + kChunk < run.count ? first + kChunk : run.count;
  if (in_packs(run)) {
    for (int64_t i = first + static_cast<int64_t>(threadIdx.x) * kMany; i < end; i += kThreads * kMany) {
      if (i + kMany <= end) {
        f.template at<kMany>(run, i);
      } else {
        for (int64_t k = i; k < end; ++k) f.template at<1>(run, k);
      }
    }
  } else {
    for (int64_t i = first + threadIdx.x; i < end; i += kThreads) f.template at<1>(run, i);
  }
}

template <int N>
struct Moments {
  Pack<float, N> m, v;
};

/// New moments, stored.
template <int N>
__device__ __forceinline__ Moments<N> moments(const UpdateRun& run, int64_t i, const UpdateNumbers& of, float scale) {
  const auto grad = load_pack<N>(run.grad + i);
  Moments<N> out{load_pack<N>(run.from.exp_avg + i), load_pack<N>(run.from.exp_avg_sq + i)};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = grad.at[k] * scale;
    out.m.at[k] = of.beta1 * out.m.at[k] + of.one_minus_beta1 * g;
    out.v.at[k] = of.beta2 * out.v.at[k] + of.one_minus_beta2 * g * g;
  }
  store_pack<N>(run.to.exp_avg + i, out.m);
  store_pack<N>(run.to.exp_avg_sq + i, out.v);
  return out;
}

struct Adamw {
  UpdateNumbers of;
  float scale;
  template <int N>
  __device__ void at(const UpdateRun& run, int64_t i) const {
    const Moments<N> made = moments<N>(run, i, of, scale);
    auto w = load_pack<N>(run.from.master + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w.at[k] = of.kept * w.at[k] - of.step_size * made.m.at[k] / (sqrtf(made.v.at[k]) * of.inv_sqrt_bias2 + of.eps);
    }
    store_pack<N>(run.to.master + i, w);
    put_weights<N>(run, i, w);
  }
};

__device__ __forceinline__ float lamb_step_of(const UpdateNumbers& of, float w, float m, float v) {
  return m * of.inv_bias1 / (sqrtf(v) * of.inv_sqrt_bias2 + of.eps) + of.weight_decay * w;
}

struct LambMoments {
  UpdateNumbers of;
  float scale;
  double weight, step;  // sums of squares
  template <int N>
  __device__ void at(const UpdateRun& run, int64_t i) {
    const Moments<N> made = moments<N>(run, i, of, scale);
    const auto w = load_pack<N>(run.from.master + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double of_weight = w.at[k], of_step = lamb_step_of(of, w.at[k], made.m.at[k], made.v.at[k]);
      weight += of_weight * of_weight;
      step += of_step * of_step;
    }
  }
};

struct LambStep {
  UpdateNumbers of;
  float rate;
  template <int N>
  __device__ void at(const UpdateRun& run, int64_t i) const {
    const auto m = load_pack<N>(run.to.exp_avg + i), v = load_pack<N>(run.to.exp_avg_sq + i);
    auto w = load_pack<N>(run.from.master + i);
#pragma unroll
    for (int k = 0; k < N; ++k) w.at[k] -= rate * lamb_step_of(of, w.at[k], m.at[k], v.at[k]);
    store_pack<N>(run.to.master + i, w);
    put_weights<N>(run, i, w);
  }
};

__global__ void __launch_bounds__(kThreads) adamw_chunks(UpdateTables tables, const Clip* clip) {
  if (clip->finite == 0) return;
  const Chunk chunk = tables.chunks[blockIdx.x];
  const UpdateRun run = tables.runs[chunk.run];
  Adamw f{tables.numbers[run.numbers], clip->grad_scale};
  for_chunk(run, chunk.number, f);
}

__global__ void __launch_bounds__(kThreads) adamw_of_run(UpdateRun run, UpdateNumbers numbers, const Clip* clip) {
  if (clip->finite == 0) return;
  Adamw f{numbers, clip->grad_scale};
  for_chunk(run, blockIdx.x, f);
}

/// Of the block's chunk. room [2 * kRoom].
__device__ __forceinline__ void lamb_moments_of(const UpdateRun& run, const UpdateNumbers& numbers, int64_t number,
                                                const Clip* clip, double* partials, double* room) {
  LambMoments f{numbers, clip->grad_scale, 0, 0};
  if (clip->finite != 0) for_chunk(run, number, f);
  if (partials == nullptr) return;
  ExactDigits sum;
  double* const out = partials + static_cast<int64_t>(blockIdx.x) * 2 * kExactWords;
  sum.clear();
  sum.add(f.weight);
  block_words(sum, out, room);
  sum.clear();
  sum.add(f.step);
  block_words(sum, out + kExactWords, room + kRoom);
}

__global__ void __launch_bounds__(kThreads, 3)
    lamb_moments_chunks(UpdateTables tables, const Clip* clip, double* partials) {
  RT_SHARED(double, room, 2 * kRoom);
  const Chunk chunk = tables.chunks[blockIdx.x];
  const UpdateRun run = tables.runs[chunk.run];
  lamb_moments_of(run, tables.numbers[run.numbers], chunk.number, clip, partials, room);
}
__global__ void __launch_bounds__(kThreads, 3)
    lamb_moments_of_run(UpdateRun run, UpdateNumbers numbers, const Clip* clip, double* partials) {
  RT_SHARED(double, room, 2 * kRoom);
  lamb_moments_of(run, numbers, blockIdx.x, clip, partials, room);
}

__global__ void __launch_bounds__(kThreads) trust_of_words(const double* words, int64_t tensors, float* trust) {
  const int64_t tensor = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (tensor >= tensors) return;
  const double* const of = words + tensor * 2 * kExactWords;
  const double weight = sqrt(value_of(of)), step = sqrt(value_of(of + kExactWords));
  trust[tensor] = weight > 0 && step > 0 ? static_cast<float>(weight / step) : 1.0f;
}

__global__ void __launch_bounds__(kThreads)
    lamb_step_chunks(UpdateTables tables, const Clip* clip, const float* trust) {
  if (clip->finite == 0) return;
  const Chunk chunk = tables.chunks[blockIdx.x];
  const UpdateRun run = tables.runs[chunk.run];
  const UpdateNumbers of = tables.numbers[run.numbers];
  LambStep f{of, of.lr * trust[run.tensor]};
  for_chunk(run, chunk.number, f);
}

__global__ void __launch_bounds__(kThreads)
    lamb_step_of_run(UpdateRun run, UpdateNumbers numbers, const Clip* clip, float trust) {
  if (clip->finite == 0) return;
  LambStep f{numbers, numbers.lr * trust};
  for_chunk(run, blockIdx.x, f);
}

Size one_a_chunk(int64_t chunks) { return {{static_cast<unsigned>(chunks)}, {kThreads}}; }

}  // namespace

void squares(Queue& on, const Floats* runs, const Chunk* chunks, int64_t chunk_count, double* partials) {
  launch(on, one_a_chunk(chunk_count), chunk_squares, runs, chunks, partials);
}

void add_squares_of_runs(Queue& on, const float* x, const ElemRun* runs, int64_t run_count, double* partials,
                         double* words) {
  launch(on, one_a_chunk(kSquareBlocks), run_squares, x, runs, run_count, partials);
  launch(on, {{1}, {kAdders * 16}}, words_of_all, partials, kSquareBlocks, false, words);
  launch(on, {{1}, {32}}, words_carried, int64_t{1}, words);
}
void add_words(Queue& on, const double* partials, const int32_t* begins, int64_t groups, int64_t sums, double* words) {
  launch(on, {{static_cast<unsigned>(groups * sums)}, {kAdders * 16}}, words_added, partials, begins, sums, words);
  launch(on, {{blocks_for(groups * sums, 32)}, {32}}, words_carried, groups * sums, words);
}

void add_words_to(Queue& on, const double* partials, int64_t chunks, int64_t sums, double* words) {
  launch(on, {{static_cast<unsigned>(sums)}, {kAdders * 16}}, words_of_all, partials, chunks, true, words);
  launch(on, {{blocks_for(sums, 32)}, {32}}, words_carried, sums, words);
}

void clip_by_norm(Queue& on, const double* words, const ClipNumbers* numbers, Clip* out) {
  launch(on, {{1}, {1}}, clip_factor, words, numbers, out);
}

void adamw(Queue& on, const UpdateTables& tables, const Clip* clip) {
  launch(on, one_a_chunk(tables.chunk_count), adamw_chunks, tables, clip);
}
void adamw(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip) {
  launch(on, {{blocks_for(of.count, kChunk)}, {kThreads}}, adamw_of_run, of, numbers, clip);
}
void lamb_moments(Queue& on, const UpdateTables& tables, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(tables.chunk_count), lamb_moments_chunks, tables, clip, partials);
}
void lamb_trust(Queue& on, const double* words, int64_t tensors, float* trust) {
  launch(on, {{blocks_for(tensors, kThreads)}, {kThreads}}, trust_of_words, words, tensors, trust);
}
void lamb_step(Queue& on, const UpdateTables& tables, const Clip* clip, const float* trust) {
  launch(on, one_a_chunk(tables.chunk_count), lamb_step_chunks, tables, clip, trust);
}
void lamb_moments(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(blocks_for(of.count, kChunk)), lamb_moments_of_run, of, numbers, clip, partials);
}
void lamb_step(Queue& on, const UpdateRun& of, const UpdateNumbers& numbers, const Clip* clip, float trust) {
  launch(on, one_a_chunk(blocks_for(of.count, kChunk)), lamb_step_of_run, of, numbers, clip, trust);
}

}  // namespace cairn::kernels::cuda
