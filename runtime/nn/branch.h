#pragma once
// What the two branches of a block (attention, MLP) have in common: each goes norm -> column cut -> something on this
// rank's part -> row cut -> sum over tp -> residual (residual.h), and back.

#include <algorithm>
#include <string>
#include <string_view>

#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// The projection called `name` whose inputs on this rank are `in` wide.
template <typename Real>
Linear<Real> linear(const Parameters<Real>& parameters, const std::string& name, int64_t in) {
  const Parameter<Real> weight = parameters.get(name + ".weight");
  return {weight, parameters.get_optional(name + ".bias"), weight.rows, in, &parameters.on()};
}

/// output [R, H] = base [R, H] and dropout(sum over tp of hidden [T, in] W^T + bias), as `residual` joins them: the
/// bias once, after the sum. Where nothing else stands between, the product adds both on a device that fuses.
template <typename Real>
Status row_cut_forward(const Linear<Real>& projection, const Dropout<Real>& dropout, const Residual<Real>& residual,
                       const SavedResidual<Real>& saved, DevicePtr<const Real> hidden, DevicePtr<const Real> base_RH,
                       DevicePtr<Real> output_RH, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                       const StageDims& d, std::string_view what) {
  const bool alone = tp.comm().size() == 1 && !tp.tree() && !dropout.on(scratch) && residual.adds_alone();
  if (alone && projection.on->fuses_products) {
    projection.forward_added(hidden, base_RH, output_RH, d.rows);
    return {};
  }
  Linear<Real> product = projection;
  product.bias = {};
  RT_TRY(tp.sum_of_rows(scratch.partial_TH, what, [&](int64_t row, int64_t rows) {
    product.forward_partial(hidden + row * product.in, tp.partial(scratch.partial_TH, row), rows);
  }));
  DevicePtr<Real> sum_RH = tp.local(scratch.partial_TH);
  if (projection.bias) projection.on->add_bias(sum_RH, projection.bias.weight, d.local_rows, d.width);
  if (dropout.on(scratch)) dropout.apply(sum_RH, sum_RH, tp, scratch, d);
  residual.add(saved, sum_RH, base_RH, output_RH);
  return {};
}

/// The first step back: the gradient of the branch's output behind its dropout, this rank's rows and all of them.
template <typename Real>
Status row_cut_gather(const Dropout<Real>& dropout, DevicePtr<const Real> dbranch_RH, DevicePtr<const Real>* masked_RH,
                      DevicePtr<const Real>* dy_TH, const TensorParallel<Real>& tp, const Scratch<Real>& scratch,
                      const StageDims& d, std::string_view what) {
  if (dropout.on(scratch)) {  // the residual stream itself goes on unmasked
    dropout.apply(dbranch_RH, tp.local(scratch.partial_TH), tp, scratch, d);
    *masked_RH = tp.local(scratch.partial_TH);
    *dy_TH = scratch.partial_TH;
    return tp.gather(scratch.partial_TH, what);
  }
  *masked_RH = dbranch_RH;
  return tp.gather_from(dbranch_RH, scratch.partial_TH, dy_TH, what);
}

/// Gradients of the row cut's weight, and of its bias from this rank's rows. `hidden` [T, in] was its input.
template <typename Real>
void row_cut_weight(const Linear<Real>& projection, DevicePtr<const Real> masked_RH, DevicePtr<const Real> dy_TH,
                    DevicePtr<const Real> hidden, const Scratch<Real>& scratch, const StageDims& d) {
  const bool plain = !scratch.stats.parts.sums && d.held.parts == 1;
  if (projection.on->fuses_products && projection.bias && plain && masked_RH == dy_TH && d.local_rows == d.rows) {
    const bool fits = d.width <= std::max(d.ffn_in, d.qkv);
    return projection.backward_both(dy_TH, hidden, d.rows, fits ? scratch.dbias : nullptr);
  }
  if (projection.bias) {
    projection.on->bias_backward(masked_RH, projection.bias.grad, d.local_rows, d.width, scratch.stats.parts);
  }
  projection.backward_weight(dy_TH, d.width, hidden, d.rows, d.held.parts);
}

/// Gathers the column cut's input, all rows [T, H], from what residual.input() or input_again() gave.
template <typename Real>
Result<DevicePtr<const Real>> column_cut_gather(DevicePtr<const Real> input_RH, const TensorParallel<Real>& tp,
                                                const Scratch<Real>& scratch, std::string_view what) {
  DevicePtr<const Real> out_TH;
  RT_TRY(tp.gather_from(input_RH, scratch.rows_TH, &out_TH, what));
  return out_TH;
}

/// Gradients of the column cut's weights and biases from dy [T, out]. Leaves the statistics of the norm before it.
template <typename Real>
Status column_cut_weight(const Residual<Real>& residual, const SavedResidual<Real>& saved,
                         const ColumnGroup<Real>& projections, DevicePtr<const Real> dy, const TensorParallel<Real>& tp,
                         const Scratch<Real>& scratch, const StageDims& d, std::string_view what) {
  RT_TRY_SET(const DevicePtr<const Real> rows_TH,
             column_cut_gather<Real>(residual.input_again(saved), tp, scratch, what));
  projections.backward_weight(dy, rows_TH, scratch.dbias, d.rows, scratch.token_parts);
  return {};
}

/// The last steps back: through the column cut, the sum over tp and the norm before the branch, behind
/// residual.input_again(), into scratch.dresidual.
template <typename Real>
Status column_cut_input(const Residual<Real>& residual, const SavedResidual<Real>& saved,
                        const ColumnGroup<Real>& projections, DevicePtr<const Real> dy, const TensorParallel<Real>& tp,
                        const Scratch<Real>& scratch, std::string_view what) {
  RT_TRY(tp.sum_of_rows(scratch.partial_TH, what, [&](int64_t row, int64_t rows) {
    projections.backward_input_partial(dy + row * projections.stride(), tp.partial(scratch.partial_TH, row), rows);
  }));
  residual.input_gradient(saved, tp.local(scratch.partial_TH));
  return {};
}

}  // namespace cairn::nn
