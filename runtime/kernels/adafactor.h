#pragma once
// Adafactor (Shazeer & Stern 2018): the second moment of a matrix is the product of what its rows and its columns have,
// so a number for each of them is kept and not one for each element. Passes over runs of a row-major matrix, since a
// rank's share of one begins and ends anywhere; in between sums of all ranks are added up (runtime/optim).

#include <cstdint>

#include "runtime/core/exact_sum.h"

namespace cairn::kernels {

/// Elements [begin, begin + count) of a matrix of `cols` columns; a vector is a matrix of one row.
struct MatrixRun {
  const float* grad = nullptr;  // of the run's first element; times grad_scale it is what counts
  float grad_scale = 1;
  int64_t begin = 0, count = 0, cols = 1;
};

/// 1 / root of the second moment as a product; `row` is null for a vector.
struct AdafactorFactors {
  const float* row = nullptr;
  const float* col = nullptr;
};

/// Squares of the weights and of the steps, gradient / root of the second moment.
struct AdafactorNorms {
  ExactSum weight, step;
};

/// Adds the squares of the gradients to those of their rows and columns; `row_sums` is null for a vector. The same bits
/// on any number of threads.
void adafactor_squares(const MatrixRun& run, double* row_sums, double* col_sums);

/// Adds to `norms`. `master` begins with the run.
void adafactor_norms(const MatrixRun& run, const AdafactorFactors& factors, const float* master, AdafactorNorms* norms);

struct AdafactorArgs {
  float rate = 0;   // of the step
  float decay = 0;  // part of the weight that goes
  float beta1 = 0;  // of the steps' average, where one is kept
};

/// master_out = master - decay * master - rate * step, or with an average of the steps, which is not null then,
/// avg_out = beta1 * avg + (1 - beta1) * rate * step in place of the last term. Outputs may be the inputs.
void adafactor_step(const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out);

}  // namespace cairn::kernels
