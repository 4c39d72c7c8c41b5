#pragma once
// Adafactor (Shazeer & Stern 2018): the second moment of a matrix is the product of what its rows and its columns have,
// so a number for each of them is kept and not one for each element. Passes over runs of a row-major matrix, since a
// rank's share of one begins and ends anywhere; in between sums of all ranks are added up (runtime/optim). Where the
// gradients' clip is not finite no pass writes state.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/state_arrays.h"
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

/// A run, and its tensor's sums over all rows and all columns.
struct SquaresRun {
  MatrixRun matrix;
  DevicePtr<double> rows, cols;  // a vector has no `rows`
};
/// Runs, and the elements of all.
inline void add_dims(OpDims& to, std::span<const SquaresRun> of) {
  int64_t elems = 0;
  for (const SquaresRun& run : of) elems += run.matrix.count;
  to.add(std::ssize(of));
  to.add(elems);
}
/// adafactor_squares() of each. Runs of one tensor follow one another; all have the same clip.
void adafactor_squares_of_runs(std::span<const SquaresRun> runs);

/// What the second moments of rows or columns become.
struct AdafactorDecay {
  double old_part = 0;         // of the moments; the rest is of the means of new squares
  DevicePtr<const Clip> clip;  // of the step's gradients
};
inline void add_dims(OpDims& /*to*/, const AdafactorDecay& /*of*/) {}

/// The second moments of a tensor's rows or columns.
struct FactoredDim {
  DevicePtr<const double> squares;
  DevicePtr<const float> from;
  DevicePtr<float> to, factors;  // `to` may be `from`
  int64_t count = 0, terms = 1;  // terms: that each of the squares is a sum of
};
/// A matrix, or a vector, which has no rows.
struct FactoredTensor {
  FactoredDim rows, cols;
  bool mean_of_cols = false;  // else of the rows: of a dim that this rank has all of
};
/// Tensors, and the moments of all.
inline void add_dims(OpDims& to, std::span<const FactoredTensor> of) {
  int64_t moments = 0;
  for (const FactoredTensor& tensor : of) moments += tensor.rows.count + tensor.cols.count;
  to.add(std::ssize(of));
  to.add(moments);
}

/// to = old_part * from + (1 - old_part) * (squares / terms + 1e-30), and factors = 1 / root of it. Nothing where the
/// clip is not finite.
void adafactor_factors(const AdafactorDecay& decay, const FactoredDim& of);
/// A matrix's second moments are rows times columns over their common mean: factors [count] are multiplied by the root
/// of the mean of `moments` [moments_count].
void scale_by_mean(float* factors, int64_t count, const float* moments, int64_t moments_count);
/// adafactor_factors() of the rows and columns of each; then scale_by_mean() of its rows, where it has any.
void adafactor_factors_of_tensors(const AdafactorDecay& decay, std::span<const FactoredTensor> tensors);
/// adafactor_squares_of_runs(), then adafactor_factors_of_tensors(): where no other rank has squares to add.
void adafactor_moments(const AdafactorDecay& decay, std::span<const SquaresRun> runs,
                       std::span<const FactoredTensor> tensors);

/// Adds to `norms` the squares of the weights and of the steps, gradient / root of the second moment. `master` begins
/// with the run.
void adafactor_norms(const MatrixRun& run, const AdafactorFactors& factors, const float* master,
                     const TensorNorms& norms);

struct AdafactorArgs {
  float rate = 0;   // of the step
  float decay = 0;  // part of the weight that goes
  float beta1 = 0;  // of the steps' average, where one is kept
};

/// master_out = master - decay * master - rate * step, or with an average of the steps, which is not null then,
/// avg_out = beta1 * avg + (1 - beta1) * rate * step in place of the last term. Outputs may be the inputs.
void adafactor_step(const AdafactorArgs& args, const MatrixRun& run, const AdafactorFactors& factors,
                    const float* master, const float* avg, float* master_out, float* avg_out);

/// A run of a tensor's elements, one of several that a call goes through. All have the same clip.
struct AdafactorRun {
  MatrixRun matrix;
  AdafactorFactors factors;
  StateArrays from, to;        // master, and exp_avg where steps are averaged
  float decay = 0, beta1 = 0;  // AdafactorArgs
  DType dtype = DType::kF32;   // of the weights: kF32, kBf16 or kF16
  DevicePtr<void> weights;     // receive the new master, rounded; null: none
  int64_t tensor = 0;          // whose rate it takes
};
/// Runs, and the elements of all.
inline void add_dims(OpDims& to, std::span<const AdafactorRun> of) {
  int64_t elems = 0;
  for (const AdafactorRun& run : of) elems += run.matrix.count;
  to.add(std::ssize(of));
  to.add(elems);
}

/// adafactor_norms() of each. partials [chunks of the runs, TensorNorms::kWords] receive them, for add_norms_of_runs()
/// (tensor_norms.h), which adds those of several calls.
void adafactor_norms_of_runs(std::span<const AdafactorRun> runs, double* partials);

/// Parts of a tensor's rate.
struct AdafactorRate {
  double elems = 0;  // of the whole tensor
  double lr = 0;     // of the step and the tensor
};
inline void add_dims(OpDims& to, std::span<const AdafactorRate> of) { to.add(std::ssize(of)); }
struct AdafactorLimits {
  double update_clip = 0;        // root of the mean square of a step, at most; 0: any
  double least_scale = 0;        // of the weights, which the rate is times
  bool scale_parameter = false;  // whether it is
};
inline void add_dims(OpDims& /*to*/, const AdafactorLimits& /*of*/) {}
/// rates [tensors], of the squares of whole tensors: words [tensors, TensorNorms::kWords].
void adafactor_rates(const AdafactorLimits& limits, std::span<const AdafactorRate> tensors, const double* words,
                     float* rates);
/// add_norms_of_runs(), then adafactor_rates(): where no other rank has norms to add.
void adafactor_rates_of_runs(const AdafactorLimits& limits, std::span<const AdafactorRate> tensors,
                             std::span<const NormRun> runs, const double* partials, double* words, float* rates);

/// adafactor_step() of each with its tensor's of `rates`, and with the weights; nothing where the clip is not finite.
void adafactor_step_of_runs(std::span<const AdafactorRun> runs, const float* rates);

}  // namespace cairn::kernels
