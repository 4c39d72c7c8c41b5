#include "runtime/nn/moe.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/kernels/matmul.h"
#include "runtime/nn/activation.h"
#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
Moe<Real>::Moe(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers)
    : dims_(dims),
      activation_(model.activation),
      router_dims_{
          .tokens = dims.rows, .experts = dims.experts, .choices = dims.choices, .renormalise = model.moe.renormalise},
      aux_loss_(static_cast<float>(model.moe.aux_loss)),
      residual_(parameters, model, dims, fmt::format("layers.{}.", layer), Branch::kMlp, tp, scratch),
      router_(linear(parameters, fmt::format("layers.{}.moe.router", layer), model.width)),
      dropout_(model.residual_dropout, layer, DropoutPlace::kMlpOutput),
      tp_(tp),
      scratch_(scratch),
      rows_PH_(buffers.get<Real>("moe.rows")),
      drows_PH_(buffers.get<Real>("moe.drows")),
      dhidden_PF_(buffers.get<Real>("moe.dhidden")),
      dlogits_TX_(buffers.get<Real>("moe.dlogits")),
      rows_of_Tk_(buffers.get<int32_t>("moe.rows_of")),
      offsets_(buffers.get<int32_t>("moe.offsets")),
      dweights_Tk_(buffers.get<float>("moe.dweights")),
      balance_X_(buffers.get<float>("moe.balance")),
      what_in_(fmt::format("layer {} mlp.in", layer)),
      what_out_(fmt::format("layer {} mlp.out", layer)),
      what_dout_(fmt::format("layer {} mlp.dout", layer)),
      what_din_(fmt::format("layer {} mlp.din", layer)),
      what_dweights_(fmt::format("layer {} moe.dweights", layer)) {
  for (int64_t e = 0; e < dims.experts; ++e) {
    const std::string name = fmt::format("layers.{}.moe.experts.{}.", layer, e);
    experts_.push_back({ColumnGroup<Real>({linear(parameters, name + "gate", model.width),
                                           linear(parameters, name + "up", model.width)}),
                        linear(parameters, name + "down", dims.ffn)});
  }
}

template <typename Real>
void Moe<Real>::place(const int32_t* chosen, Real* rows_PH) const {
  const int64_t choices = dims_.rows * dims_.choices;
  std::fill_n(offsets_, dims_.experts + 1, 0);
  for (int64_t i = 0; i < choices; ++i) ++offsets_[chosen[i] + 1];
  for (int64_t e = 0; e < dims_.experts; ++e) balance_X_[e] = static_cast<float>(offsets_[e + 1]);
  for (int64_t e = 0; e < dims_.experts; ++e) {
    const int64_t count = offsets_[e + 1];
    const int64_t padded = (count + kExpertRowsAlign - 1) / kExpertRowsAlign * kExpertRowsAlign;
    std::fill_n(rows_PH + (offsets_[e] + count) * dims_.width, (padded - count) * dims_.width, Real{});
    offsets_[e + 1] = static_cast<int32_t>(offsets_[e] + padded);
  }
  // Each expert's rows in the order of tokens. offsets_[e] serves as the next free row, and is set back afterwards.
  for (int64_t i = 0; i < choices; ++i) rows_of_Tk_[i] = offsets_[chosen[i]]++;
  for (int64_t e = 0; e < dims_.experts; ++e) offsets_[e] -= static_cast<int32_t>(balance_X_[e]);
}

template <typename Real>
template <typename Body>
Status Moe<Real>::for_experts(const Body& body) const {
  for (int64_t e = 0; e < dims_.experts; ++e) {
    const int64_t first = offsets_[e], rows = offsets_[e + 1] - first;
    if (rows > 0) RT_TRY(body(experts_[e], first, rows));
  }
  return {};
}

template <typename Real>
Status Moe<Real>::forward(const SavedMoe<Real>& saved, const Real* base_RH, Real* output_RH) const {
  const StageDims& d = dims_;
  residual_.input(saved.residual);
  RT_TRY(tp_.gather(scratch_.rows_TH, what_in_));
  RT_TRY(kernels::matmul({.m = d.rows,
                          .n = d.experts,
                          .k = d.width,
                          .a = scratch_.rows_TH,
                          .lda = d.width,
                          .b = router_.weight.weight,
                          .ldb = d.width,
                          .trans_b = true,
                          .c = saved.probabilities,
                          .ldc = d.experts,
                          .ab_dtype = DTypeOf<Real>::value,
                          .c_dtype = DType::kF32}));
  kernels::route_forward(router_dims_, saved.probabilities, saved.chosen, saved.weights);

  place(saved.chosen, rows_PH_);
  kernels::rows_to_experts(scratch_.rows_TH, rows_of_Tk_, d.rows, d.choices, d.width, rows_PH_);
  RT_TRY(for_experts([&](const Expert& expert, int64_t first, int64_t rows) {
    return expert.up.forward(rows_PH_ + first * d.width, saved.pre + first * d.ffn_in, rows);
  }));
  activate(activation_, saved.pre, scratch_.hidden, used_rows(), d.ffn);
  RT_TRY(for_experts([&](const Expert& expert, int64_t first, int64_t rows) {
    return expert.down.forward(scratch_.hidden + first * d.ffn, rows_PH_ + first * d.width, d.width, rows);
  }));
  kernels::rows_to_tokens(rows_PH_, rows_of_Tk_, saved.weights, d.rows, d.choices, d.width, scratch_.partial_TH);

  RT_TRY(tp_.reduce(scratch_.partial_TH, what_out_));
  Real* sum_RH = tp_.local(scratch_.partial_TH);
  if (dropout_.on(scratch_)) dropout_.apply(sum_RH, sum_RH, tp_, scratch_, d);
  residual_.add(saved.residual, sum_RH, base_RH, output_RH);
  return {};
}

template <typename Real>
Status Moe<Real>::backward(const SavedMoe<Real>& saved, float loss_scale) const {
  const StageDims& d = dims_;
  const Real *masked_RH = nullptr, *dy_TH = nullptr;
  RT_TRY(row_cut_gather<Real>(dropout_, residual_.branch_gradient(saved.residual), &masked_RH, &dy_TH, tp_, scratch_, d,
                              what_dout_));
  place(saved.chosen, rows_PH_);
  kernels::rows_to_experts(dy_TH, rows_of_Tk_, d.rows, d.choices, d.width, rows_PH_);

  // With h an expert's hidden row and w its weight, y = w W h: dw = dy . W h = (W^T dy) . h, so no product is done
  // again.
  activate(activation_, saved.pre, scratch_.hidden, used_rows(), d.ffn);
  RT_TRY(for_experts([&](const Expert& expert, int64_t first, int64_t rows) {
    return expert.down.backward_input(rows_PH_ + first * d.width, d.width, dhidden_PF_ + first * d.ffn, false, rows);
  }));
  kernels::dot_and_scale_rows(dhidden_PF_, scratch_.hidden, rows_of_Tk_, saved.weights, d.rows, d.choices, d.ffn,
                              dweights_Tk_);
  RT_TRY(for_experts([&](const Expert& expert, int64_t first, int64_t rows) {
    return expert.down.backward_weight(rows_PH_ + first * d.width, d.width, scratch_.hidden + first * d.ffn, rows);
  }));
  activate_backward(activation_, dhidden_PF_, saved.pre, scratch_.dhidden, used_rows(), d.ffn);
  if (tp_.comm().size() > 1) {  // each rank has a part of every hidden row
    RT_TRY(tp_.comm().all_reduce(dweights_Tk_, d.rows * d.choices, DType::kF32, comm::ReduceOp::kSum, what_dweights_));
  }

  residual_.input(saved.residual);
  RT_TRY(tp_.gather(scratch_.rows_TH, what_in_));
  kernels::rows_to_experts(scratch_.rows_TH, rows_of_Tk_, d.rows, d.choices, d.width, rows_PH_);
  RT_TRY(for_experts([&](const Expert& expert, int64_t first, int64_t rows) -> Status {
    const Real* dpre = scratch_.dhidden + first * d.ffn_in;
    RT_TRY(expert.up.backward_weight(dpre, rows_PH_ + first * d.width, nullptr, rows));
    return expert.up.backward_input(dpre, drows_PH_ + first * d.width, rows);
  }));
  kernels::rows_to_tokens(drows_PH_, rows_of_Tk_, nullptr, d.rows, d.choices, d.width, scratch_.partial_TH);
  RT_TRY(tp_.reduce(scratch_.partial_TH, what_din_));

  // The router saw all rows on every rank: its part is added behind the sum, and each rank takes its own rows.
  const float each = aux_loss_ * static_cast<float>(d.experts) / static_cast<float>(d.rows) * loss_scale;
  for (int64_t e = 0; e < d.experts; ++e) balance_X_[e] *= each;
  kernels::route_backward(router_dims_, saved.probabilities, saved.chosen, dweights_Tk_, balance_X_, dlogits_TX_);
  const Real* dlogits_RX = dlogits_TX_ + tp_.first_row() * d.experts;
  Real* dinput_RH = tp_.local(scratch_.partial_TH);
  RT_TRY(router_.backward_weight(dlogits_RX, d.experts, tp_.local(scratch_.rows_TH), d.local_rows));
  RT_TRY(router_.backward_input(dlogits_RX, d.experts, dinput_RH, true, d.local_rows));
  residual_.input_gradient(saved.residual, dinput_RH);
  return {};
}

template class Moe<float>;
template class Moe<bf16>;
template class Moe<f16>;

}  // namespace cairn::nn
