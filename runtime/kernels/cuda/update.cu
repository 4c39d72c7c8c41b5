#include "runtime/kernels/cuda/update.h"

#include "runtime/kernels/cuda/chunks.h"
#include "runtime/kernels/cuda/exact.h"
#include "runtime/kernels/cuda/tensor_words.h"

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

constexpr int kAdders = 32;  // threads that share a word's blocks

/// For words_of_tensors() without more.
struct Words {
  __device__ void operator()(int32_t, const double*) const {}
};

/// words [blocks, .] = the sum over partials [count, blocks, .].
__global__ void __launch_bounds__(kAdders * 16) words_of_all(const double* partials, int64_t count, double* words) {
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
  double all = 0;
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

__global__ void clip_factor(const double* words, const ClipNumbers* numbers, const double* ruined,
                            const double* counted, Clip* out) {
  ClipNumbers of = *numbers;
  if (counted != nullptr) of.gradient_scale /= *counted;
  const double norm = sqrt(value_of(words)) / of.loss_scale * of.gradient_scale;
  const double scale = of.most > 0 && of.most / (norm + 1e-6) < 1.0 ? of.most / (norm + 1e-6) : 1.0;
  out->norm = norm;
  out->grad_scale = static_cast<float>(scale * of.gradient_scale / of.loss_scale);
  out->finite = isfinite(norm) && (ruined == nullptr || *ruined == 0) ? 1 : 0;
}

// --- updates
// ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned16(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }
__device__ __forceinline__ bool in_packs(const UpdateRun& run) {
  return aligned16(run.grad) && aligned16(run.from.master) && aligned16(run.from.exp_avg) &&
         aligned16(run.from.exp_avg_sq) && aligned16(run.to.master) && aligned16(run.to.exp_avg) &&
         aligned16(run.to.exp_avg_sq) && aligned16(run.weights);
}

/// f.at<N>(run, i) for the elements of the block's chunk.
template <typename F>
__device__ __forceinline__ void for_chunk(const UpdateRun& run, F& f) {
  // The difference in 32 bits: from one in 64 nvcc 13 does not see which stores make a pack, and stores one by one.
  const int64_t first = static_cast<int64_t>(blockIdx.x - run.first_chunk) * kChunk;
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
    auto w = load_pack<N>(run.from.master + i);  // before the moments are stored, behind which no load may move
    const Moments<N> made = moments<N>(run, i, of, scale);
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
    const auto w = load_pack<N>(run.from.master + i);  // as Adamw's
    const Moments<N> made = moments<N>(run, i, of, scale);
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

/// An average: `grad` of the run is what is averaged.
struct Average {
  float rest;
  template <int N>
  __device__ void at(const UpdateRun& run, int64_t i) const {
    const auto w = load_pack<N>(run.grad + i);
    auto of = load_pack<N>(run.from.master + i);
#pragma unroll
    for (int k = 0; k < N; ++k) of.at[k] += rest * (w.at[k] - of.at[k]);
    store_pack<N>(run.to.master + i, of);
  }
};

__global__ void __launch_bounds__(kThreads) adamw_of_runs(UpdateTables tables, const Clip* clip) {
  if (clip->finite == 0) return;
  const UpdateRun run = run_of_block(tables);
  Adamw f{run.of, clip->grad_scale};
  for_chunk(run, f);
}

__global__ void __launch_bounds__(kThreads, 3)
    lamb_moments_of_runs(UpdateTables tables, const Clip* clip, double* partials) {
  RT_SHARED(double, room, 2 * kRoom);
  const UpdateRun run = run_of_block(tables);
  LambMoments f{run.of, clip->grad_scale, 0, 0};
  if (clip->finite != 0) for_chunk(run, f);
  if (!run.counts) return;
  ExactDigits sum;
  double* const out = partials + static_cast<int64_t>(blockIdx.x) * 2 * kExactWords;
  sum.clear();
  sum.add(f.weight);
  block_words(sum, out, room);
  sum.clear();
  sum.add(f.step);
  block_words(sum, out + kExactWords, room + kRoom);
}

/// trust_of() (runtime/kernels/lamb.h) of a tensor's words.
__device__ __forceinline__ float trust_of_words(const double* words) {
  const double weight = sqrt(value_of(words)), step = sqrt(value_of(words + kExactWords));
  return static_cast<float>(weight > 0 && step > 0 ? weight / step : 1.0);
}

__global__ void __launch_bounds__(kThreads, 1)  // as many registers as it takes: else ptxas spills for 12.0
    lamb_step_of_runs(UpdateTables tables, const Clip* clip, const double* words) {
  RT_SHARED(float, trust, 1);
  if (clip->finite == 0) return;
  const UpdateRun run = run_of_block(tables);
  if (threadIdx.x == 0) *trust = trust_of_words(words + static_cast<int64_t>(run.tensor) * 2 * kExactWords);
  __syncthreads();
  LambStep f{run.of, run.of.lr * *trust};
  for_chunk(run, f);
}

__global__ void __launch_bounds__(kThreads, 4) ema_of_runs(UpdateTables tables, float rest, const Clip* clip) {
  if (clip != nullptr && clip->finite == 0) return;
  const UpdateRun run = run_of_block(tables);
  Average f{rest};
  for_chunk(run, f);
}

}  // namespace

void add_squares_of_runs(Queue& on, const float* x, const ElemRun* runs, int64_t run_count, double* words) {
  auto* const partials = on.room<double>(kSquaresPartials);
  if (partials == nullptr) return;
  launch(on, one_a_chunk(kSquareBlocks), run_squares, x, runs, run_count, partials);
  launch(on, {{1}, {kAdders * 16}}, words_of_all, partials, kSquareBlocks, words);
  launch(on, {{1}, {32}}, words_carried, int64_t{1}, words);
}
void add_words_of_tensors(Queue& on, const double* partials, const UpdateTables& tables, double* words) {
  add_words(on, partials, tables, words, Words());
}

void clip_by_norm(Queue& on, const double* words, const ClipNumbers* numbers, const double* ruined,
                  const double* counted, Clip* out) {
  launch(on, {{1}, {1}}, clip_factor, words, numbers, ruined, counted, out);
}

void adamw(Queue& on, const UpdateTables& tables, const Clip* clip) {
  launch(on, one_a_chunk(tables.chunks), adamw_of_runs, tables, clip);
}
void lamb_moments(Queue& on, const UpdateTables& tables, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(tables.chunks), lamb_moments_of_runs, tables, clip, partials);
}
void lamb_step(Queue& on, const UpdateTables& tables, const Clip* clip, const double* words) {
  launch(on, one_a_chunk(tables.chunks), lamb_step_of_runs, tables, clip, words);
}
void ema(Queue& on, double decay, const UpdateTables& tables, const Clip* clip) {
  launch(on, one_a_chunk(tables.chunks), ema_of_runs, tables, static_cast<float>(1.0 - decay), clip);
}

}  // namespace cairn::kernels::cuda
