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

/// The first step back: the bias's gradient from this rank's rows of scratch.dresidual, and all rows of it.
template <typename Real>
Status row_cut_gather(const Linear<Real>& projection, const Dropout<Real>& dropout, const Real** dy_TH,
                      const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const StageDims& d,
                      std::string_view what) {
  if (dropout.on(scratch)) {  // the residual stream itself goes on unmasked
    Real* masked_RH = tp.local(scratch.partial_TH);
    dropout.apply(scratch.dresidual_RH, masked_RH, tp, scratch, d);
    if (projection.bias) kernels::bias_backward(masked_RH, projection.bias.grad, d.local_rows, d.width);
    *dy_TH = scratch.partial_TH;
    return tp.gather(scratch.partial_TH, what);
  }
  if (projection.bias) kernels::bias_backward(scratch.dresidual_RH, projection.bias.grad, d.local_rows, d.width);
  return tp.gather_from(scratch.dresidual_RH, scratch.partial_TH, dy_TH, what);
}

/// The last steps back: through the column cut, the sum over tp and the norm of `input`, into scratch.dresidual.
template <typename Real>
Status column_cut_backward(const Norm<Real>& norm, const ColumnGroup<Real>& projections, const Real* input_RH,
                           const Real* dy, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                           const StageDims& d, std::string_view what_in, std::string_view what_din) {
  norm.forward(input_RH, tp.local(scratch.rows_TH), scratch.stats, d.local_rows);
  RT_TRY(tp.gather(scratch.rows_TH, what_in));
  RT_TRY(projections.backward(dy, scratch.rows_TH, scratch.partial_TH, scratch.dbias, d.rows));
  RT_TRY(tp.reduce(scratch.partial_TH, what_din));
  Real* dinput_RH = scratch.rows_TH;  // the norm's output is not needed any more
  norm.backward(tp.local(scratch.partial_TH), input_RH, scratch.stats, dinput_RH, d.local_rows);
  kernels::add(scratch.dresidual_RH, dinput_RH, scratch.dresidual_RH, d.local_rows * d.width);
  return {};
}

}  // namespace cairn::nn
