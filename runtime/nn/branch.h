#pragma once
// What the two branches of a block (attention, MLP) have in common: each goes norm -> column cut -> something on this
// rank's part -> row cut -> sum over tp -> residual, and back.

#include <string>
#include <string_view>

#include "runtime/kernels/elementwise.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// The projection called `name` whose inputs on this rank are `in` wide.
template <typename Real>
Linear<Real> linear(const Parameters<Real>& parameters, const std::string& name, int64_t in) {
  const Parameter<Real> weight = parameters.get(name + ".weight");
  return {weight, parameters.get_optional(name + ".bias"), weight.rows, in};
}

/// output [R, H] = input [R, H] + dropout(sum over tp of hidden [T, in] W^T + bias): the bias once, after the sum.
template <typename Real>
Status row_cut_forward(const Linear<Real>& projection, const Dropout<Real>& dropout, const Real* hidden,
                       const Real* input_RH, Real* output_RH, const TensorParallel<Real>& tp,
                       const Scratch<Real>& scratch, const StageDims& d, std::string_view what) {
  Linear<Real> product = projection;
  product.bias = {};
  RT_TRY(product.forward(hidden, scratch.partial_TH, d.width, d.rows));
  RT_TRY(tp.reduce(scratch.partial_TH, what));
  Real* sum_RH = tp.local(scratch.partial_TH);
  if (projection.bias) kernels::add_bias(sum_RH, projection.bias.weight, d.local_rows, d.width);
  if (dropout.on(scratch)) dropout.apply(sum_RH, sum_RH, tp, scratch, d);
  kernels::add(input_RH, sum_RH, output_RH, d.local_rows * d.width);
  return {};
}

/// The first step back: the gradient of the branch's output behind its dropout, this rank's rows and all of them.
template <typename Real>
Status row_cut_gather(const Dropout<Real>& dropout, const Real* dy_RH, const Real** masked_RH, const Real** dy_TH,
                      const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const StageDims& d,
                      std::string_view what) {
  if (dropout.on(scratch)) {  // the residual stream itself goes on unmasked
    dropout.apply(dy_RH, tp.local(scratch.partial_TH), tp, scratch, d);
    *masked_RH = tp.local(scratch.partial_TH);
    *dy_TH = scratch.partial_TH;
    return tp.gather(scratch.partial_TH, what);
  }
  *masked_RH = dy_RH;
  return tp.gather_from(dy_RH, scratch.partial_TH, dy_TH, what);
}

/// Gradients of the row cut's weight, and of its bias from this rank's rows. `hidden` [T, in] was its input.
template <typename Real>
Status row_cut_weight(const Linear<Real>& projection, const Real* masked_RH, const Real* dy_TH, const Real* hidden,
                      const StageDims& d) {
  if (projection.bias) kernels::bias_backward(masked_RH, projection.bias.grad, d.local_rows, d.width);
  return projection.backward_weight(dy_TH, d.width, hidden, d.rows);
}

/// Gradients of the column cut's weights and biases from dy [T, out]. Leaves the statistics of the norm of `input`.
template <typename Real>
Status column_cut_weight(const Norm<Real>& norm, const ColumnGroup<Real>& projections, const Real* input_RH,
                         const Real* dy, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                         const StageDims& d, std::string_view what) {
  norm.forward(input_RH, tp.local(scratch.rows_TH), scratch.stats, d.local_rows);
  RT_TRY(tp.gather(scratch.rows_TH, what));
  return projections.backward_weight(dy, scratch.rows_TH, scratch.dbias, d.rows);
}

/// The last steps back: through the column cut, the sum over tp and the norm of `input`, whose statistics must be in
/// scratch.stats, into scratch.dresidual.
template <typename Real>
Status column_cut_input(const Norm<Real>& norm, const ColumnGroup<Real>& projections, const Real* input_RH,
                        const Real* dy, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                        const StageDims& d, std::string_view what) {
  RT_TRY(projections.backward_input(dy, scratch.partial_TH, d.rows));
  RT_TRY(tp.reduce(scratch.partial_TH, what));
  Real* dinput_RH = scratch.rows_TH;  // the norm's output is not needed any more
  norm.backward(tp.local(scratch.partial_TH), input_RH, scratch.stats, dinput_RH, d.local_rows);
  kernels::add(scratch.dresidual_RH, dinput_RH, scratch.dresidual_RH, d.local_rows * d.width);
  return {};
}

}  // namespace cairn::nn
