#include "runtime/kernels/cuda/adafactor.h"

#include "runtime/kernels/cuda/chunks.h"
#include "runtime/kernels/cuda/exact.h"
#include "runtime/kernels/cuda/map.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kRoom = kExactWords * kWarps;

/// MatrixRun, for a kernel.
struct Run {
  const float* grad;
  const Clip* clip;
  int64_t begin, count, cols;
  explicit Run(const MatrixRun& run)
      : grad(run.grad.address()), clip(run.clip.address()), begin(run.begin), count(run.count), cols(run.cols) {}
};

/// Element i's gradient / root of its second moment.
__device__ __forceinline__ float step_of(const FactoredRun& run, int64_t i, float scale) {
  const int64_t at = run.begin + i, row = ratio(at, run.cols);
  if (run.row != nullptr) scale *= run.row[row];
  return run.grad[i] * scale * run.col[at - row * run.cols];
}

/// Sums over a block in a fixed order, to all threads. room [warps].
__device__ __forceinline__ double block_sum(double x, double* room) {
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) x += room[warp];
  return x;
}

/// A warp has a row.
__global__ void __launch_bounds__(kThreads) squares_of_rows(Run run, int64_t rows, double* sums) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp, row = run.begin / run.cols + r;
  if (r >= rows) return;
  const int64_t from = row * run.cols - run.begin, first = from > 0 ? from : 0;
  const int64_t end = from + run.cols < run.count ? from + run.cols : run.count;
  const float scale = run.clip->grad_scale;
  double sum = 0;
#pragma unroll 8
  for (int64_t i = first + threadIdx.x % kWarp; i < end; i += kWarp) {  // eight loads at once
    const double g = static_cast<double>(run.grad[i] * scale);
    sum += g * g;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) sums[row] += sum;
}

/// partials [runs of rows, cols].
__global__ void __launch_bounds__(kThreads) squares_of_columns(Run run, RowRuns runs, double* partials) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= run.cols) return;
  const float scale = run.clip->grad_scale;
  double sum = 0;
  int64_t r = runs.begin(blockIdx.y), i = (run.begin / run.cols + r) * run.cols + c - run.begin;
  if (i < 0) {  // the first row begins behind this column
    i += run.cols;
    ++r;
  }
#pragma unroll 8
  for (; r < runs.end(blockIdx.y); ++r, i += run.cols) {  // eight rows' loads at once
    const double g = static_cast<double>((i < run.count ? run.grad[i] : 0.0f) * scale);
    sum += g * g;
  }
  partials[blockIdx.y * run.cols + c] = sum;
}
__global__ void __launch_bounds__(kThreads)
    add_columns_in_order(const double* partials, int64_t count, int64_t cols, double* sums) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= cols) return;
  double sum = 0;
#pragma unroll 16
  for (int64_t k = 0; k < count; ++k) sum += partials[k * cols + c];
  sums[c] += sum;
}

struct Factors {
  double old_part, terms;
  const Clip* clip;
  const double* squares;
  const float* from;
  float *to, *factors;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    if (clip->finite == 0) return;
    const double now = squares[i] / terms + 1e-30;  // eps1 of the paper
    const auto made = static_cast<float>(old_part * static_cast<double>(from[i]) + (1.0 - old_part) * now);
    to[i] = made;
    factors[i] = static_cast<float>(1.0 / sqrt(static_cast<double>(made)));
  }
};

/// One block.
__global__ void __launch_bounds__(kThreads) root_of_mean(const float* moments, int64_t count, float* root) {
  RT_SHARED(double, room, kThreads / kWarp);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += static_cast<double>(moments[i]);
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) *root = static_cast<float>(sqrt(sum / static_cast<double>(count)));
}
struct Scale {
  float* x;
  const float* by;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    x[i] *= *by;
  }
};

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

/// A thread has a tensor. Where numbers do not compare the first counts, as std::max() has it.
__global__ void rates_of_tensors(AdafactorLimits limits, const AdafactorRate* tensors, int64_t count,
                                 const double* words, float* rates) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const AdafactorRate of = tensors[i];
  const double* const squares = words + i * 2 * kExactWords;
  double rate = of.lr;
  if (limits.update_clip > 0) {
    const double over = sqrt(value_of(squares + kExactWords) / of.elems) / limits.update_clip;
    rate /= 1.0 < over ? over : 1.0;
  }
  if (limits.scale_parameter) {
    const double weight = sqrt(value_of(squares) / of.elems);
    rate *= limits.least_scale < weight ? weight : limits.least_scale;
  }
  rates[i] = static_cast<float>(rate);
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

void adafactor_squares(Queue& on, const MatrixRun& run, double* row_sums, double* col_sums) {
  const Run of(run);
  const int64_t rows = rows_of_run(run.begin, run.count, run.cols);
  if (rows == 0) return;
  if (row_sums != nullptr) launch(on, {{blocks_for(rows, kWarps)}, {kThreads}}, squares_of_rows, of, rows, row_sums);
  const RowRuns runs = square_runs(rows);
  auto* const partials = on.room<double>(square_partials(run));
  if (partials == nullptr) return;
  const unsigned blocks = blocks_for(run.cols, kThreads);
  launch(on, {{blocks, static_cast<unsigned>(runs.count())}, {kThreads}}, squares_of_columns, of, runs, partials);
  launch(on, {{blocks}, {kThreads}}, add_columns_in_order, partials, runs.count(), run.cols, col_sums);
}

void adafactor_factors(Queue& on, const AdafactorDecay& decay, const double* squares, const float* from, float* to,
                       float* factors, int64_t count) {
  map<1>(on, Factors{decay.old_part, static_cast<double>(decay.terms), decay.clip.address(), squares, from, to, factors},
         count, true);
}

void scale_by_mean(Queue& on, float* factors, int64_t count, const float* moments, int64_t moments_count) {
  auto* const root = on.room<float>(1);
  if (root == nullptr) return;
  launch(on, {{1}, {kThreads}}, root_of_mean, moments, moments_count, root);
  map<1>(on, Scale{factors, root}, count, true);
}

void adafactor_norms(Queue& on, const FactoredRuns& runs, const Clip* clip, double* partials) {
  launch(on, one_a_chunk(runs.chunks), norms_of_chunks, runs, clip, partials);
}

void adafactor_rates(Queue& on, const AdafactorLimits& limits, const AdafactorRate* tensors, int64_t count,
                     const double* words, float* rates) {
  launch(on, {{blocks_for(count, kWarp)}, {kWarp}}, rates_of_tensors, limits, tensors, count, words, rates);
}

void adafactor_step(Queue& on, const FactoredRuns& runs, const Clip* clip, const float* rates) {
  launch(on, one_a_chunk(runs.chunks), step_of_chunks, runs, clip, rates);
}

}  // namespace cairn::kernels::cuda
