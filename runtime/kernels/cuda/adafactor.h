#pragma once
// Adafactor for CUDA: runtime/kernels/adafactor.h. What threads add up is cut by shapes alone.

#include <cstdint>

#include "runtime/core/exact_sum.h"
#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/sums.h"
#include "runtime/kernels/cuda/update.h"

namespace cairn::kernels::cuda {

/// Rows of a run, the first and the last of which may be parts of rows.
constexpr int64_t rows_of_run(int64_t begin, int64_t count, int64_t cols) {
  return count == 0 ? 0 : (begin + count - 1) / cols - begin / cols + 1;
}
/// Doubles that adafactor_squares() takes as scratch, for partial sums of columns.
constexpr RowRuns square_runs(int64_t rows) { return RowRuns::of(rows, 32, 128); }
constexpr int64_t square_partials(const MatrixRun& run) {
  return square_runs(rows_of_run(run.begin, run.count, run.cols)).count() * run.cols;
}
void adafactor_squares(Queue& on, const MatrixRun& run, double* row_sums, double* col_sums);

void adafactor_factors(Queue& on, const AdafactorDecay& decay, const double* squares, const float* from, float* to,
                       float* factors, int64_t count);
/// Scratch: one float.
void scale_by_mean(Queue& on, float* factors, int64_t count, const float* moments, int64_t moments_count);

/// words [2, ExactSum::kWords] += the squares of the weights, and of the steps. partials: as many for each chunk.
constexpr int64_t norm_chunks(int64_t count) { return (count + kChunk - 1) / kChunk; }
void adafactor_norms(Queue& on, const MatrixRun& run, const AdafactorFactors& factors, const float* master,
                     double* partials, double* words);
void adafactor_step(Queue& on, const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out);

}  // namespace cairn::kernels::cuda
