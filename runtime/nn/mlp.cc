#include "runtime/nn/mlp.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/kernels/elementwise.h"
#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
Mlp<Real>::Mlp(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
    : dims_(dims),
      activation_(model.activation),
      norm_(parameters, fmt::format("layers.{}.mlp_norm", layer), model),
      up_([&] {
        std::vector<Linear<Real>> parts;
        if (model.activation == Activation::kSwiGlu) {
          parts.push_back(linear(parameters, fmt::format("layers.{}.mlp.gate", layer), model.width));
        }
        parts.push_back(linear(parameters, fmt::format("layers.{}.mlp.up", layer), model.width));
        return ColumnGroup<Real>(parts);
      }()),
      down_(linear(parameters, fmt::format("layers.{}.mlp.down", layer), dims.ffn)),
      dropout_(model.residual_dropout, layer, DropoutPlace::kMlpOutput),
      tp_(tp),
      scratch_(scratch),
      what_in_(fmt::format("layer {} mlp.in", layer)),
      what_out_(fmt::format("layer {} mlp.out", layer)),
      what_dout_(fmt::format("layer {} mlp.dout", layer)),
      what_din_(fmt::format("layer {} mlp.din", layer)) {}

template <typename Real>
Status Mlp<Real>::recompute(const SavedMlp<Real>& saved) const {
  norm_.forward(saved.input_RH, tp_.local(scratch_.rows_TH), scratch_.stats, dims_.local_rows);
  RT_TRY(tp_.gather(scratch_.rows_TH, what_in_));
  return up_.forward(scratch_.rows_TH, saved.pre, dims_.rows);
}

template <typename Real>
Status Mlp<Real>::forward(const SavedMlp<Real>& saved, Real* output_RH) const {
  RT_TRY(recompute(saved));
  activate(saved.pre, scratch_.hidden);
  return row_cut_forward(down_, dropout_, scratch_.hidden, saved.input_RH, output_RH, tp_, scratch_, dims_, what_out_);
}

template <typename Real>
Status Mlp<Real>::backward(const SavedMlp<Real>& saved, const LateMlp<Real>* late) const {
  const StageDims& d = dims_;
  const Real *masked_RH = nullptr, *dy_TH = nullptr;
  RT_TRY(row_cut_gather<Real>(dropout_, scratch_.dresidual_RH, &masked_RH, &dy_TH, tp_, scratch_, d, what_dout_));
  if (late != nullptr) {
    std::copy_n(scratch_.dresidual_RH, d.local_rows * d.width, late->dout_RH);
  } else {
    activate(saved.pre, scratch_.hidden);
    RT_TRY(row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, d));
  }
  RT_TRY(down_.backward_input(dy_TH, d.width, scratch_.hidden, false, d.rows));
  Real* dpre = late != nullptr ? late->dpre : scratch_.dhidden;
  activate_backward(scratch_.hidden, saved.pre, dpre);
  if (late != nullptr) {
    norm_.forward(saved.input_RH, tp_.local(scratch_.rows_TH), scratch_.stats, d.local_rows);  // for its statistics
  } else {
    RT_TRY(column_cut_weight<Real>(norm_, up_, saved.input_RH, dpre, tp_, scratch_, d, what_in_));
  }
  return column_cut_input<Real>(norm_, up_, saved.input_RH, dpre, tp_, scratch_, d, what_din_);
}

template <typename Real>
Status Mlp<Real>::backward_weight(const SavedMlp<Real>& saved, const LateMlp<Real>& late) const {
  const Real *masked_RH = nullptr, *dy_TH = nullptr;
  RT_TRY(row_cut_gather<Real>(dropout_, late.dout_RH, &masked_RH, &dy_TH, tp_, scratch_, dims_, what_dout_));
  activate(saved.pre, scratch_.hidden);
  RT_TRY(row_cut_weight<Real>(down_, masked_RH, dy_TH, scratch_.hidden, dims_));
  return column_cut_weight<Real>(norm_, up_, saved.input_RH, late.dpre, tp_, scratch_, dims_, what_in_);
}

template <typename Real>
void Mlp<Real>::activate(const Real* pre, Real* hidden_TF) const {
  const int64_t count = dims_.rows * dims_.ffn;
  switch (activation_) {
    case Activation::kGeluTanh:
      return kernels::gelu_tanh_forward(pre, hidden_TF, count);
    case Activation::kGeluErf:
      return kernels::gelu_erf_forward(pre, hidden_TF, count);
    case Activation::kRelu:
      return kernels::relu_forward(pre, hidden_TF, count);
    case Activation::kSwiGlu:
      return kernels::swiglu_forward(pre, hidden_TF, dims_.rows, dims_.ffn);
  }
}

template <typename Real>
void Mlp<Real>::activate_backward(const Real* dhidden_TF, const Real* pre, Real* dpre) const {
  const int64_t count = dims_.rows * dims_.ffn;
  switch (activation_) {
    case Activation::kGeluTanh:
      return kernels::gelu_tanh_backward(dhidden_TF, pre, dpre, count);
    case Activation::kGeluErf:
      return kernels::gelu_erf_backward(dhidden_TF, pre, dpre, count);
    case Activation::kRelu:
      return kernels::relu_backward(dhidden_TF, pre, dpre, count);
    case Activation::kSwiGlu:
      return kernels::swiglu_backward(dhidden_TF, pre, dpre, dims_.rows, dims_.ffn);
  }
}

template class Mlp<float>;
template class Mlp<bf16>;
template class Mlp<f16>;

}  // namespace cairn::nn
