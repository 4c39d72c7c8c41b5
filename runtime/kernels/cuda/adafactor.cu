#include "runtime/kernels/cuda/adafactor.h"

#include "runtime/kernels/cuda/exact.h"
#include "runtime/kernels/cuda/map.h"
#include "runtime/kernels/cuda/update.h"

namespace cairn::kernels::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kRoom = kExactWords * kWarps;

/// A run and its factors.
struct Run {
  const float* grad;
  const Clip* clip;
  int64_t begin, count, cols;
  const float *row, *col;
  Run(const MatrixRun& run, const AdafactorFactors& factors)
      : grad(run.grad.address()),
        clip(run.clip.address()),
        begin(run.begin),
        count(run.count),
        cols(run.cols),
        row(factors.row.address()),
        col(factors.col.address()) {}

  /// Element i's gradient / root of its second moment.
  __device__ __forceinline__ float step(int64_t i, float scale) const {
    const int64_t at = begin + i;
    if (row == nullptr) return grad[i] * scale * col[at % cols];
    return grad[i] * (scale * row[at / cols]) * col[at % cols];
  }
};

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
  const double* squares;
  const float* from;
  float *to, *factors;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
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
__global__ void __launch_bounds__(kThreads) norms_of_chunks(Run run, const float* master, double* partials) {
  RT_SHARED(double, room, 2 * kRoom);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t end = first + kChunk < run.count ? first + kChunk : run.count;
  const float scale = run.clip->grad_scale;
  double weight = 0, step = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    const double w = static_cast<double>(master[i]), u = static_cast<double>(run.step(i, scale));
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

struct Step {
  AdafactorArgs args;
  Run run;
  const float *master, *avg;
  float *out, *avg_out;
  template <int N>
  __device__ void at(int64_t i) const {
    static_assert(N == 1);
    const float w = master[i];
    float by = args.rate * run.step(i, run.clip->grad_scale);
    if (avg != nullptr) {
      by = args.beta1 * avg[i] + (1.0f - args.beta1) * by;
      avg_out[i] = by;
    }
    out[i] = w - args.decay * w - by;
  }
};

}  // namespace

void adafactor_squares(Queue& on, const MatrixRun& run, double* row_sums, double* col_sums) {
  const Run of(run, {});
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
  map<1>(on, Factors{decay.old_part, static_cast<double>(decay.terms), squares, from, to, factors}, count, true);
}

void scale_by_mean(Queue& on, float* factors, int64_t count, const float* moments, int64_t moments_count) {
  auto* const root = on.room<float>(1);
  if (root == nullptr) return;
  launch(on, {{1}, {kThreads}}, root_of_mean, moments, moments_count, root);
  map<1>(on, Scale{factors, root}, count, true);
}

void adafactor_norms(Queue& on, const MatrixRun& run, const AdafactorFactors& factors, const float* master,
                     double* partials, double* words) {
  const int64_t chunks = norm_chunks(run.count);
  launch(on, {{static_cast<unsigned>(chunks)}, {kThreads}}, norms_of_chunks, Run(run, factors), master, partials);
  add_words_to(on, partials, chunks, 2, words);
}

void adafactor_step(Queue& on, const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out) {
  map<1>(on, Step{args, Run(run, factors), master, avg, master_out, avg_out}, run.count, true);
}

}  // namespace cairn::kernels::cuda
