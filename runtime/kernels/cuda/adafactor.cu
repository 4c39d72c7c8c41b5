#include "runtime/kernels/cuda/adafactor.h"

#include "runtime/kernels/cuda/chunks.h"
#include "runtime/kernels/cuda/exact.h"
#include "runtime/kernels/cuda/map.h"
#include "runtime/kernels/cuda/tensor_words.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kRoom = kExactWords * kWarps;

constexpr int kFactorThreads = 1024;  // of a tensor, of which one may have many rows
static_assert(kSquareColumns == kThreads && kSquareRows == kWarps);

/// Element i's gradient / root of its second moment.
__device__ __forceinline__ float step_of(const FactoredRun& run, int64_t i, float scale) {
  const int64_t at = run.begin + i, row = ratio(at, run.cols);
  if (run.row != nullptr) scale *= run.row[row];
  return run.grad[i] * scale * run.col[at - row * run.cols];
}

/// Sums over a block of kFactorThreads in a fixed order, to all threads. room [warps].
__device__ __forceinline__ double block_sum(double x, double* room) {
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < kFactorThreads / kWarp; ++warp) x += room[warp];
  return x;
}

/// A warp has a row.
__device__ __forceinline__ void squares_of_rows(const SquaredRun& run, int64_t block, float scale) {
  const int64_t r = block * kWarps + threadIdx.x / kWarp, row = run.first_row + r;
  if (r >= run.rows) return;
  const int64_t from = row * run.cols - run.begin, first = from > 0 ? from : 0;
  const int64_t end = from + run.cols < run.count ? from + run.cols : run.count;
  double sum = 0;
#pragma unroll 8
  for (int64_t i = first + threadIdx.x % kWarp; i < end; i += kWarp) {  // eight loads at once
    const double g = static_cast<double>(run.grad[i] * scale);
    sum += g * g;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) run.row_sums[row] += sum;
}

/// A thread has a column of a part. partials [parts, cols].
__device__ __forceinline__ void squares_of_columns(const SquaredRun& run, int64_t block, float scale,
                                                   double* partials) {
  const int64_t part = ratio(block, run.col_blocks), c = (block - part * run.col_blocks) * kThreads + threadIdx.x;
  if (c >= run.cols) return;
  int64_t r = part * run.rows_each, i = (run.first_row + r) * run.cols + c - run.begin;
  const int64_t end = r + run.rows_each < run.rows ? r + run.rows_each : run.rows;
  double sum = 0;
  if (i < 0) {  // the first row begins behind this column
    i += run.cols;
    ++r;
  }
#pragma unroll 8
  for (; r < end; ++r, i += run.cols) {  // eight rows' loads at once
    const double g = static_cast<double>((i < run.count ? run.grad[i] : 0.0f) * scale);
    sum += g * g;
  }
  partials[part * run.cols + c] = sum;
}

__global__ void __launch_bounds__(kThreads) squares_of_runs(SquaredRuns runs, const Clip* clip, double* partials) {
  const SquaredRun run = run_of_block(runs);
  const int64_t block = blockIdx.x - run.first_chunk;
  const float scale = clip->grad_scale;
  if (block < run.row_blocks) return squares_of_rows(run, block, scale);
  squares_of_columns(run, block - run.row_blocks, scale, partials + run.first_part);
}

/// The sum over parts [parts, count] of column c, in their order.
__device__ __forceinline__ double sum_of_parts(const double* of, int64_t parts, int64_t count, int64_t c) {
  double sum = 0;
#pragma unroll 8
  for (int64_t part = 0; part < parts; ++part) sum += of[part * count + c];
  return sum;
}

__global__ void __launch_bounds__(kThreads) columns_added(RunTable<ColumnParts> tensors, const double* partials) {
  const ColumnParts of = run_of_block(tensors);
  const int64_t c = static_cast<int64_t>(blockIdx.x - of.first_chunk) * kThreads + threadIdx.x;
  if (c < of.cols) of.sums[c] += sum_of_parts(partials + of.first_part, of.parts, of.cols, c);
}

__device__ __forceinline__ void make_moments(const MomentsOfDim& of, double old_part) {
  for (int64_t i = threadIdx.x; i < of.count; i += kFactorThreads) {
    const double now = sum_of_parts(of.squares, of.parts, of.count, i) / of.terms + 1e-30;  // eps1 of the paper
    const auto made = static_cast<float>(old_part * static_cast<double>(of.from[i]) + (1.0 - old_part) * now);
    of.to[i] = made;
    of.factors[i] = static_cast<float>(1.0 / sqrt(static_cast<double>(made)));
  }
}

/// A block has a tensor.
__global__ void __launch_bounds__(kFactorThreads)
    factors_of_tensors(double old_part, const Clip* clip, const MomentsOfTensor* tensors) {
  RT_SHARED(double, room, kFactorThreads / kWarp);
  if (clip->finite == 0) return;
  const MomentsOfTensor of = tensors[blockIdx.x];
  make_moments(of.rows, old_part);
  make_moments(of.cols, old_part);
  if (of.rows.count == 0) return;
  __syncthreads();
  const float* const moments = of.mean_of_cols ? of.cols.to : of.rows.to;
  const int64_t count = of.mean_of_cols ? of.cols.count : of.rows.count;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kFactorThreads) sum += static_cast<double>(moments[i]);
  const auto root = static_cast<float>(sqrt(block_sum(sum, room) / static_cast<double>(count)));
  for (int64_t i = threadIdx.x; i < of.rows.count; i += kFactorThreads) of.rows.factors[i] *= root;
}

/// A block has a chunk: partials [chunks, 2, kExactWords].
__global__ void __launch_bounds__(kThreads) norms_of_chunks(FactoredRuns runs, const Clip* clip, double* partials) {
  RT_SHARED(double, room, 2 * kRoom);
  const FactoredRun run = run_of_block(runs);
  const int64_t first = static_cast<int64_t>(blockIdx.x - run.first_chunk) * kChunk;
  const int64_t end = clip->finite == 0 ? first : first + kChunk < run.count ? first + kChunk : run.count;
  const float scale = clip->grad_scale;
  double weight = 0, step = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    const double w = static_cast<double>(run.master[i]), u = static_cast<double>(step_of(run, i, scale));
    weight += w * w;
    step += u * u;
  }
  ExactDigits sum;
  double* const out = partials + static_cast<int64_t>(blockIdx.x) * 2 * kExactWords;
  sum.clear();
  sum.add(weight);
  block_words(sum, out, room);
  sum.clear();
  sum.add(step);
  block_words(sum, out + kExactWords, room + kRoom);
}

/// Makes the rate of a tensor from its words. Where numbers do not compare the first counts, as std::max() has it.
struct Rates {
  AdafactorLimits limits;
  const AdafactorRate* tensors;
  float* rates;
  __device__ void operator()(int64_t tensor, const double* words) const {
    const AdafactorRate of = tensors[tensor];
    double rate = of.lr;
    if (limits.update_clip > 0) {
      const double over = sqrt(value_of(words + kExactWords) / of.elems) / limits.update_clip;
      rate /= 1.0 < over ? over : 1.0;
    }
    if (limits.scale_parameter) {
      const double weight = sqrt(value_of(words) / of.elems);
      rate *= limits.least_scale < weight ? weight : limits.least_scale;
    }
    rates[tensor] = static_cast<float>(rate);
  }
};

/// A thread has a tensor.
__global__ void rates_of_tensors(Rates of, int64_t count, const double* words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) of(i, words + i * 2 * kExactWords);
}

__global__ void __launch_bounds__(kThreads) step_of_chunks(FactoredRuns runs, const Clip* clip, const float* rates) {
  if (clip->finite == 0) return;
  const FactoredRun run = run_of_block(runs);
  const int64_t first = static_cast<int64_t>(blockIdx.x - run.first_chunk) * kChunk;
  const int64_t end = first + kChunk < run.count ? first + kChunk : run.count;
  const float scale = clip->grad_scale, rate = rates[run.tensor];
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    const float w = run.master[i];
    float by = rate * step_of(run, i, scale);
    if (run.avg != nullptr) {
      by = run.beta1 * run.avg[i] + (1.0f - run.beta1) * by;
      run.avg_out[i] = by;
    }
    Pack<float, 1> out;
    out.at[0] = w - run.decay * w - by;
    run.master_out[i] = out.at[0];
    put_weights<1>(run, i, out);
  }
}

}  // namespace

void square_runs(Queue& on, const SquaredRuns& runs, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(runs.chunks), squares_of_runs, runs, clip, partials);
}
void add_columns(Queue& on, const RunTable<ColumnParts>& tensors, const double* partials) {
  launch(on, one_a_chunk(tensors.chunks), columns_added, tensors, partials);
}
void make_factors(Queue& on, double old_part, const Clip* clip, const MomentsOfTensor* tensors, int64_t count) {
  launch(on, {{static_cast<unsigned>(count)}, {kFactorThreads}}, factors_of_tensors, old_part, clip, tensors);
}

void adafactor_norms(Queue& on, const FactoredRuns& runs, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(runs.chunks), norms_of_chunks, runs, clip, partials);
}

void adafactor_rates(Queue& on, const AdafactorLimits& limits, const AdafactorRate* tensors, int64_t count,
                     const double* words, float* rates) {
  launch(on, {{blocks_for(count, kWarp)}, {kWarp}}, rates_of_tensors, Rates{limits, tensors, rates}, count, words);
}
void add_words_for_rates(Queue& on, const double* partials, const UpdateTables& tables, double* words,
                         const AdafactorLimits& limits, const AdafactorRate* tensors, float* rates) {
  add_words(on, partials, tables, words, Rates{limits, tensors, rates});
}

void adafactor_step(Queue& on, const FactoredRuns& runs, const Clip* clip, const float* rates) {
  launch(on, one_a_chunk(runs.chunks), step_of_chunks, runs, clip, rates);
}

}  // namespace cairn::kernels::cuda
