#include "runtime/nn/mlp.h"

#include <fmt/format.h>

#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
Mlp<Real>::Mlp(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
    : on_(parameters.on()),
      dims_(dims),
      activation_(model),
      residual_(parameters, model, dims, layer_prefix(model, layer), Branch::kMlp, tp, scratch),
      up_([&] {
        const std::string prefix = layer_prefix(model, layer) + "mlp.";
        std::vector<Linear<Real>> parts;
        if (is_gated(model.activation)) parts.push_back(linear(parameters, prefix + "gate", model.width));
        parts.push_back(linear(parameters, prefix + "up", model.width));
        return ColumnGroup<Real>(parts);
      }()),
      down_(linear(parameters, layer_prefix(model, layer) + "mlp.down", dims.ffn)),
      dropout_(on_, model.residual_dropout, layer, DropoutPlace::kMlpOutput),
      tp_(tp),
      scratch_(scratch),
      what_in_(fmt::format("layer {} mlp.in", layer)),
      what_out_(fmt::format("layer {} mlp.out", layer)),
      what_dout_(fmt::format("layer {} mlp.dout", layer)),
      what_din_(fmt::format("layer {} mlp.din", layer)) {}

template <typename Real>
Result<DevicePtr<const Real>> Mlp<Real>::read_input(const SavedMlp<Real>& saved) const {
  return column_cut_gather<Real>(residual_.input(saved.residual), tp_, scratch_, what_in_);
}

template <typename Real>
Status Mlp<Real>::recompute(const SavedMlp<Real>& saved) const {
  RT_TRY_SET(const DevicePtr<const Real> rows_TH, read_input(saved));
  up_.forward(rows_TH, saved.pre, dims_.rows);
  return {};
}

template <typename Real>
Status Mlp<Real>::forward(const SavedMlp<Real>& saved, DevicePtr<const Real> base_RH, DevicePtr<Real> output_RH) const {
  const StageDims& d = dims_;
  if (fuses_activation()) {
    RT_TRY_SET(const DevicePtr<const Real> rows_TH, read_input(saved));
    up_.forward_gelu(rows_TH, saved.pre, scratch_.hidden, d.rows);
  } else {
    RT_TRY(recompute(saved));
    activate(on_, activation_, saved.pre, scratch_.hidden, d.rows, d.ffn);
  }
  return row_cut_forward<Real>(down_, dropout_, residual_, saved.residual, scratch_.hidden, base_RH, output_RH, tp_,
                               scratch_, d, what_out_);
}

template <typename Real>
Status Mlp<Real>::backward(const SavedMlp<Real>& saved, const LateMlp<Real>* late) const {
  const StageDims& d = dims_;
  DevicePtr<const Real> dbranch_RH = residual_.branch_gradient(saved.residual);
  DevicePtr<const Real> masked_RH, dy_TH;
  RT_TRY(row_cut_gather<Real>(dropout_, dbranch_RH, &masked_RH, &dy_TH, tp_, scratch_, d, what_dout_));
  DevicePtr<Real> dpre = late != nullptr ? late->dpre : scratch_.dhidden;
  if (fuses_activation()) {
    down_.backward_input_gelu(dy_TH, d.width, saved.pre, dpre, d.rows);
    if (late != nullptr) {
      on_.copy(dbranch_RH, late->dout_RH, d.local_rows * d.width);
    } else {
      activate(on_, activation_, saved.pre, scratch_.hidden, d.rows, d.ffn);
      row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, scratch_, d);
    }
  } else if (late == nullptr && !is_gated(activation_.kind)) {
    down_.backward_input(dy_TH, d.width, dpre, false, d.rows);
    activate_both(on_, activation_, saved.pre, dpre, scratch_.hidden, d.rows * d.ffn);
    row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, scratch_, d);
  } else {
    if (late != nullptr) {
      on_.copy(dbranch_RH, late->dout_RH, d.local_rows * d.width);
    } else {
      activate(on_, activation_, saved.pre, scratch_.hidden, d.rows, d.ffn);
      row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, scratch_, d);
    }
    down_.backward_input(dy_TH, d.width, scratch_.hidden, false, d.rows);
    activate_backward(on_, activation_, scratch_.hidden, saved.pre, dpre, d.rows, d.ffn);
  }
  if (late != nullptr) {
    residual_.input_again(saved.residual);  // for its statistics
  } else {
    RT_TRY(column_cut_weight<Real>(residual_, saved.residual, up_, dpre, tp_, scratch_, d, what_in_));
  }
  return column_cut_input<Real>(residual_, saved.residual, up_, dpre, tp_, scratch_, what_din_);
}

template <typename Real>
Status Mlp<Real>::backward_weight(const SavedMlp<Real>& saved, const LateMlp<Real>& late) const {
  const StageDims& d = dims_;
  DevicePtr<const Real> masked_RH, dy_TH;
  RT_TRY(row_cut_gather<Real>(dropout_, late.dout_RH, &masked_RH, &dy_TH, tp_, scratch_, d, what_dout_));
  activate(on_, activation_, saved.pre, scratch_.hidden, d.rows, d.ffn);
  row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, scratch_, d);
  return column_cut_weight<Real>(residual_, saved.residual, up_, late.dpre, tp_, scratch_, d, what_in_);
}

template class Mlp<float>;
template class Mlp<bf16>;
template class Mlp<f16>;

}  // namespace cairn::nn
