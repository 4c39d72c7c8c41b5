#pragma once
// Adafactor for CUDA: runtime/kernels/adafactor.h. What threads add up is cut by shapes alone. Each launch goes through
// a table of all runs or tensors of a rank. An update is five of them, since each reads all that those before it left:
//
//   1. square_runs(): squares of rows, and of parts of columns (square_rounds.h)
//   2. make_factors(): the parts of columns, second moments, factors, for each tensor its mean
//   3. adafactor_norms(): squares of weights and of steps, for each chunk
//   4. adafactor_rates(): these for each tensor, and its rate
//   5. adafactor_step()
//
// Where other ranks have squares or norms to add, add_columns() stands behind 1, and 4 is two launches.

#include <cstdint>

#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/cuda/queue.h"
#include "runtime/kernels/cuda/run_tables.h"
#include "runtime/kernels/cuda/update.h"

namespace cairn::kernels::cuda {

/// SquaresRun, for a table on the device, with its rows and the parts that they are cut into. Its blocks are
/// `row_blocks` of rows, then `col_blocks` for each part.
struct SquaredRun {
  const float* grad = nullptr;
  double* row_sums = nullptr;  // null: a vector
  int64_t begin = 0, count = 0, cols = 1;
  int64_t first_row = 0, rows = 0, rows_each = 1;  // the first and the last row may be parts of rows
  int64_t first_part = 0;                          // where the parts' sums over columns begin, [parts, cols]
  uint32_t first_chunk = 0;                        // of all runs' blocks
  uint32_t row_blocks = 0, col_blocks = 0;
};
/// The parts of one tensor's columns, of all its runs.
struct ColumnParts {
  double* sums = nullptr;
  int64_t first_part = 0, parts = 0, cols = 0;
  uint32_t first_chunk = 0;  // of all tensors' blocks
};
/// FactoredDim; its squares are of `parts`, [parts, count].
struct MomentsOfDim {
  const double* squares = nullptr;
  const float* from = nullptr;
  float *to = nullptr, *factors = nullptr;
  int64_t count = 0, parts = 1;
  double terms = 1;
};
struct MomentsOfTensor {
  MomentsOfDim rows, cols;
  bool mean_of_cols = false;
};

/// Threads that go through a run's columns, and warps that have a row each.
constexpr int64_t kSquareColumns = 256, kSquareRows = 8;
using SquaredRuns = RunTable<SquaredRun>;
/// Rows' sums are added to; those of columns are left in partials.
void square_runs(Queue& on, const SquaredRuns& runs, const Clip* clip, double* partials);
void add_columns(Queue& on, const RunTable<ColumnParts>& tensors, const double* partials);
void make_factors(Queue& on, double old_part, const Clip* clip, const MomentsOfTensor* tensors, int64_t count);

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
/// add_words_of_tensors() (update.h), and the rates of those tensors.
void add_words_for_rates(Queue& on, const double* partials, const UpdateTables& tables, double* words,
                         const AdafactorLimits& limits, const AdafactorRate* tensors, float* rates);
void adafactor_step(Queue& on, const FactoredRuns& runs, const Clip* clip, const float* rates);

}  // namespace cairn::kernels::cuda
