#pragma once
// Adafactor for CUDA: runtime/kernels/adafactor.h. What threads add up is cut by shapes alone.

#include <cstdint>

#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/run_tables.h"
#include "runtime/kernels/cuda/sums.h"

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

/// AdafactorRun, for a table on the device. `avg` is null where steps are not averaged.
struct FactoredRun {
  const float* grad = nullptr;
  const float *row = nullptr, *col = nullptr;
  const float *master = nullptr, *avg = nullptr;
  float *master_out = nullptr, *avg_out = nullptr;
  void* weights = nullptr;
  int64_t begin = 0, count = 0, cols = 1;
  uint32_t first_chunk = 0;
  float decay = 0, beta1 = 0;
  DType dtype = DType::kF32;
  int32_t tensor = 0;
};
using FactoredRuns = RunTable<FactoredRun>;

/// partials [chunks, 2, ExactSum::kWords]: squares of the weights, and of the steps; 0 where the clip is not finite.
void adafactor_norms(Queue& on, const FactoredRuns& runs, const Clip* clip, double* partials);
/// `tensors` [count] on the device; adafactor_rates() of runtime/kernels/adafactor.h.
void adafactor_rates(Queue& on, const AdafactorLimits& limits, const AdafactorRate* tensors, int64_t count,
                     const double* words, float* rates);
void adafactor_step(Queue& on, const FactoredRuns& runs, const Clip* clip, const float* rates);

}  // namespace cairn::kernels::cuda
