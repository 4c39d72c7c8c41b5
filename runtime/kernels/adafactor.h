#pragma once
// Adafactor (Shazeer & Stern 2018): the second moment of a matrix is the product of what its rows and its columns have,
// so a number for each of them is kept and not one for each element. Passes over runs of a row-major matrix, since a
// rank's share of one begins and ends anywhere; in between sums of all ranks are added up (runtime/optim).

#include <cstdint>

#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/tensor_norms.h"

namespace cairn::kernels {

/// Elements [begin, begin + count) of a matrix of `cols` columns; a vector is a matrix of one row.
struct MatrixRun {
  DevicePtr<const float> grad;  // of the run's first element; times clip.grad_scale it is what counts
  DevicePtr<const Clip> clip;   // of the step's gradients
  int64_t begin = 0, count = 0, cols = 1;
};
inline void add_dims(OpDims& to, const MatrixRun& of) {
  to.add(of.count);
  to.add(of.cols);
}

/// 1 / root of the second moment as a product; `row` is null for a vector.
struct AdafactorFactors {
  DevicePtr<const float> row;
  DevicePtr<const float> col;
};
inline void add_dims(OpDims& /*to*/, const AdafactorFactors& /*of*/) {}

/// Adds the squares of the gradients to those of their rows and columns; `row_sums` is null for a vector. The same bits
/// on any number of threads.
void adafactor_squares(const MatrixRun& run, double* row_sums, double* col_sums);

/// What the second moments of rows or columns become.
struct AdafactorDecay {
  double old_part = 0;  // of the moments; the rest is of the means of new squares
  int64_t terms = 1;    // that each of the squares is a sum of
};
inline void add_dims(OpDims& /*to*/, const AdafactorDecay& /*of*/) {}

/// to = old_part * from + (1 - old_part) * (squares / terms + 1e-30), and factors = 1 / root of it. `to` may be `from`.
void adafactor_factors(const AdafactorDecay& decay, const double* squares, const float* from, float* to, float* factors,
                       int64_t count);
/// A matrix's second moments are rows times columns over their common mean: factors [count] are multiplied by the root
/// of the mean of `moments` [moments_count].
void scale_by_mean(float* factors, int64_t count, const float* moments, int64_t moments_count);

/// Adds to `norms` the squares of the weights and of the steps, gradient / root of the second moment. `master` begins
/// with the run.
void adafactor_norms(const MatrixRun& run, const AdafactorFactors& factors, const float* master,
                     const TensorNorms& norms);

struct AdafactorArgs {
  float rate = 0;   // of the step
  float decay = 0;  // part of the weight that goes
  float beta1 = 0;  // of the steps' average, where one is kept
};
inline void add_dims(OpDims& /*to*/, const AdafactorArgs& /*of*/) {}

/// master_out = master - decay * master - rate * step, or with an average of the steps, which is not null then,
/// avg_out = beta1 * avg + (1 - beta1) * rate * step in place of the last term. Outputs may be the inputs.
void adafactor_step(const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out);

}  // namespace cairn::kernels
