#include "runtime/nn/moe.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/nn/branch.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::nn {

template <typename Real>
Moe<Real>::Moe(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
               const TensorParallel<Real>& tp, const ContextParallel<Real>& cp, Dispatch<Real>& dispatch,
               const Scratch<Real>& scratch, const Buffers& buffers)
    : on_(parameters.on()),
      dims_(dims),
      activation_(model),
      router_dims_{.tokens = dims.rows,
                   .experts = dims.experts,
                   .choices = dims.choices,
                   .renormalise = model.moe.renormalise,
                   .sigmoid = model.moe.router == RouterKind::kSigmoid,
                   .groups = model.moe.groups,
                   .groups_per_token = model.moe.groups_per_token,
                   .scale = static_cast<float>(model.moe.scale)},
      aux_loss_(static_cast<float>(model.moe.aux_loss)),
      z_loss_(static_cast<float>(model.moe.z_loss)),
      balanced_layers_(balances_over_layers(model) ? expert_layers(model) : 1),
      residual_(parameters, model, dims, layer_prefix(model, layer), Branch::kMlp, tp, scratch),
      router_(linear(parameters, layer_prefix(model, layer) + "moe.router", model.width)),
      bias_(parameters.get_optional(layer_prefix(model, layer) + "moe.router.bias")),
      logit_bias_(parameters.get_optional(layer_prefix(model, layer) + "moe.router.logit_bias")),
      scale_input_(model.moe.scale_input),
      dropout_(on_, model.residual_dropout, layer, DropoutPlace::kMlpOutput),
      tp_(tp),
      cp_(cp),
      dispatch_(dispatch),
      scratch_(scratch),
      rows_PH_(buffers.get<Real>(buffer::kMoeRows)),
      drows_PH_(buffers.get<Real>(buffer::kMoeDrows)),
      dhidden_PF_(buffers.get<Real>(buffer::kMoeDhidden)),
      dlogits_TX_(buffers.get<Real>(buffer::kMoeDlogits)),
      dweights_Tk_(buffers.get<float>(buffer::kMoeDweights)),
      balance_X_(buffers.get<float>(buffer::kMoeBalance)),
      bias_X_(bias_ ? buffers.get<float>(buffer::kMoeBias) : nullptr),
      bias_dots_Tk_(has_bias(model, BiasOf::kMlp) ? buffers.get<float>(buffer::kMoeBiasDots) : nullptr),
      host_balance_X_(dims.experts),
      what_in_(fmt::format("layer {} mlp.in", layer)),
      what_out_(fmt::format("layer {} mlp.out", layer)),
      what_dout_(fmt::format("layer {} mlp.dout", layer)),
      what_din_(fmt::format("layer {} mlp.din", layer)),
      what_dweights_(fmt::format("layer {} moe.dweights", layer)),
      what_counts_(fmt::format("layer {} moe.counts", layer)),
      what_balance_(fmt::format("layer {} moe.balance", layer)),
      what_rows_(fmt::format("layer {} moe.rows", layer)),
      what_drows_(fmt::format("layer {} moe.drows", layer)),
      what_bias_(fmt::format("layer {} moe.down_bias", layer)) {
  router_dims_.bias = bias_X_;
  if (dims.shared_ffn > 0) shared_.emplace(parameters, model, dims, layer, tp, scratch, buffers);
  for (int64_t e = 0; e < dims.local_experts; ++e) {
    const std::string name = fmt::format("{}moe.experts.{}.", layer_prefix(model, layer), dims.first_expert + e);
    for (int64_t source = 0; source < dims.expert_sources; ++source) {
      const Parameters<Real> of = parameters.of_source(source);
      Linear<Real> down = linear(of, name + "down", dims.expert_ffn);
      const Parameter<Real> down_bias = down.bias;
      if (tp.comm().rank() != 0) down.bias = {};
      experts_.push_back(
          {ColumnGroup<Real>({linear(of, name + "gate", model.width), linear(of, name + "up", model.width)}), down,
           down_bias});
    }
  }
}

template <typename Real>
template <typename Body>
void Moe<Real>::for_experts(const Body& body) const {
  products_.products.clear();
  products_.ends.clear();
  products_.most_rows = 0;
  products_.all_rows = dispatch_.used_rows();
  products_.places = dispatch_.places();
  if (products_.places) {  // the rows of each are the device's to say
    for (const Expert& expert : experts_) {
      body(expert, int64_t{0}, int64_t{0}, &products_.products);
      products_.ends.push_back(products_.products.size());
    }
  }
  for (const auto& group : dispatch_.groups()) {
    if (group.rows == 0) continue;
    products_.most_rows = std::max(products_.most_rows, group.rows);
    body(experts_[group.expert * dims_.expert_sources + group.source], group.first, group.rows, &products_.products);
    products_.ends.push_back(products_.products.size());
  }
  on_.matmul_groups(products_);
}

template <typename Real>
Status Moe<Real>::route(const SavedMoe<Real>& saved, DevicePtr<const Real> rows_TH) const {
  const StageDims& d = dims_;
  on_.matmul({.m = d.rows,
              .n = d.experts,
              .k = d.width,
              .a = rows_TH,
              .lda = d.width,
              .b = router_.weight.weight,
              .ldb = d.width,
              .trans_b = true,
              .c = saved.probabilities,
              .ldc = d.experts,
              .ab_dtype = DTypeOf<Real>::value,
              .c_dtype = DType::kF32,
              .bias = logit_bias_.weight});
  if (bias_) on_.to_floats(bias_.weight, bias_X_, d.experts);
  on_.route_forward(router_dims_, saved.probabilities, saved.chosen, saved.weights, saved.log_sums);
  return {};
}

template <typename Real>
Status Moe<Real>::forward(const SavedMoe<Real>& saved, DevicePtr<const Real> base_RH, DevicePtr<Real> output_RH) const {
  const StageDims& d = dims_;
  RT_TRY_SET(const DevicePtr<const Real> rows_TH,
             column_cut_gather<Real>(residual_.input(saved.residual), tp_, scratch_, what_in_));
  RT_TRY(route(saved, rows_TH));

  RT_TRY(dispatch_.begin(saved.chosen, saved.counts, saved.host_counts, what_counts_));
  RT_TRY(dispatch_.to_experts(rows_TH, scale_input_ ? saved.weights : nullptr, rows_PH_, what_rows_));
  for_experts([&](const Expert& expert, int64_t first, int64_t rows, auto* out) {
    expert.up.forward_products(rows_PH_ + first * d.width, saved.pre + first * d.expert_ffn_in, rows, out);
  });
  activate(on_, activation_, saved.pre, scratch_.hidden, dispatch_.used_rows(), d.expert_ffn);
  for_experts([&](const Expert& expert, int64_t first, int64_t rows, auto* out) {
    out->push_back(
        expert.down.forward_product(scratch_.hidden + first * d.expert_ffn, rows_PH_ + first * d.width, d.width, rows));
  });
  RT_TRY(dispatch_.to_tokens(rows_PH_, scale_input_ ? nullptr : saved.weights, scratch_.partial_TH, what_rows_));
  if (shared_) shared_->forward(rows_TH, saved.shared_pre, saved.shared_gate, scratch_.partial_TH);

  RT_TRY(tp_.reduce(scratch_.partial_TH, what_out_));
  DevicePtr<Real> sum_RH = tp_.local(scratch_.partial_TH);
  if (dropout_.on(scratch_)) dropout_.apply(sum_RH, sum_RH, tp_, scratch_, d);
  residual_.add(saved.residual, sum_RH, base_RH, output_RH);
  return {};
}

template <typename Real>
Status Moe<Real>::backward(const SavedMoe<Real>& saved, float loss_scale) const {
  const StageDims& d = dims_;
  DevicePtr<const Real> masked_RH, dy_TH;
  RT_TRY(row_cut_gather<Real>(dropout_, residual_.branch_gradient(saved.residual), &masked_RH, &dy_TH, tp_, scratch_, d,
                              what_dout_));
  if (shared_) shared_->backward_hidden(dy_TH, saved.shared_pre, saved.shared_gate, dgate_T());
  dispatch_.begin_again(saved.chosen, saved.host_counts);
  RT_TRY(dispatch_.to_experts(dy_TH, nullptr, rows_PH_, what_drows_));

  // With h an expert's hidden row and w its weight, y = w W h: dw = dy . W h = (W^T dy) . h, so no product is done
  // again.
  const int64_t used_rows = dispatch_.used_rows();
  activate(on_, activation_, saved.pre, scratch_.hidden, used_rows, d.expert_ffn);
  for_experts([&](const Expert& expert, int64_t first, int64_t rows, auto* out) {
    out->push_back(expert.down.backward_input_product(rows_PH_ + first * d.width, d.width,
                                                      dhidden_PF_ + first * d.expert_ffn, false, rows));
  });
  if (!scale_input_) {
    RT_TRY(dispatch_.dot_and_scale(dhidden_PF_, scratch_.hidden, saved.weights, d.expert_ffn, dweights_Tk_,
                                   what_dweights_));
  }
  for_experts([&](const Expert& expert, int64_t first, int64_t rows, auto* out) {
    out->push_back(expert.down.backward_weight_product(rows_PH_ + first * d.width, d.width,
                                                       scratch_.hidden + first * d.expert_ffn, rows));
  });
  activate_backward(on_, activation_, dhidden_PF_, saved.pre, scratch_.dhidden, used_rows, d.expert_ffn);
  if (bias_dots_Tk_) RT_TRY(bias_backward(saved));

  const DevicePtr<const Real> input_RH = residual_.input_again(saved.residual);
  RT_TRY_SET(const DevicePtr<const Real> rows_TH, column_cut_gather<Real>(input_RH, tp_, scratch_, what_in_));
  RT_TRY(dispatch_.to_experts(rows_TH, nullptr, rows_PH_, what_rows_));
  const auto backward_up = [&](bool input, bool weight) {
    for_experts([&](const Expert& expert, int64_t first, int64_t rows, auto* out) {
      DevicePtr<const Real> dpre = scratch_.dhidden + first * d.expert_ffn_in;
      if (weight) expert.up.backward_weight_products(dpre, rows_PH_ + first * d.width, rows, 1, out);
      if (input) expert.up.backward_input_products(dpre, drows_PH_ + first * d.width, rows, false, out);
    });
  };
  if (scale_input_) {  // an expert reads w x: with dz its gradient dw = dz . x and dx = w dz
    backward_up(true, false);
    RT_TRY(dispatch_.dot_and_scale(drows_PH_, rows_PH_, saved.weights, d.width, dweights_Tk_, what_dweights_));
    backward_up(false, true);
  } else {
    backward_up(true, true);
  }
  if (tp_.comm().size() > 1) {  // each rank has a part of every hidden row
    const int64_t weights = d.choices + (shared_ && shared_->gated() ? 1 : 0);
    RT_TRY(tp_.comm().all_reduce(dweights_Tk_, d.rows * weights, DType::kF32, comm::ReduceOp::kSum, what_dweights_));
  }
  RT_TRY(dispatch_.to_tokens(drows_PH_, nullptr, scratch_.partial_TH, what_drows_));
  if (shared_) shared_->backward_input(rows_TH, scratch_.partial_TH);
  RT_TRY(tp_.reduce(scratch_.partial_TH, what_din_));

  RT_TRY(route_backward(saved, input_RH, loss_scale));
  residual_.input_gradient(saved.residual, tp_.local(scratch_.partial_TH));
  return {};
}

// y = w (W h + b): dw has dy . b, db is the sum of w dy. The bias is laid beside every row, so that one pass gives
// both. Each tp rank has all rows of dy; with sequence parallelism gradients of what is replicated are added over tp.
template <typename Real>
Status Moe<Real>::bias_backward(const SavedMoe<Real>& saved) const {
  const StageDims& d = dims_;
  const bool placed = static_cast<bool>(dispatch_.places());
  placed ? lay_placed_biases() : lay_biases();
  RT_TRY(dispatch_.dot_and_scale(rows_PH_, drows_PH_, saved.weights, d.width, bias_dots_Tk_, what_bias_));
  placed ? add_placed_gradients() : add_gradients();
  // Behind it dweights are added over tp.
  if (tp_.comm().rank() == 0) on_.add_to(dweights_Tk_, bias_dots_Tk_, d.rows * d.choices);
  return {};
}

template <typename Real>
void Moe<Real>::lay_placed_biases() const {
  std::vector<DevicePtr<const Real>> biases;
  for (const Expert& expert : experts_) biases.push_back(expert.down_bias.weight);
  on_.fill_groups(dispatch_.places(), dispatch_.used_rows(), biases, dims_.width, drows_PH_);
}

template <typename Real>
void Moe<Real>::add_placed_gradients() const {
  const auto add = [&](DevicePtr<const Real> rows, int64_t stride, int64_t width, const auto& grad_of) {
    std::vector<DevicePtr<float>> grads;
    for (const Expert& expert : experts_) grads.push_back(grad_of(expert));
    on_.add_rows_of_groups(dispatch_.places(), dispatch_.used_rows(), rows, stride, width, grads);
  };
  const auto parts = experts_.front().up.bias_gradients();
  for (size_t part = 0; part < parts.size(); ++part) {
    add(scratch_.dhidden + parts[part].first, dims_.expert_ffn_in, parts[part].count,
        [&](const Expert& expert) { return expert.up.bias_gradients()[part].grad; });
  }
  if (tp_.first_row() != 0) return;
  add(rows_PH_, dims_.width, dims_.width, [](const Expert& expert) { return expert.down_bias.grad; });
}

template <typename Real>
void Moe<Real>::lay_biases() const {
  on_.clear(drows_PH_, dispatch_.used_rows() * dims_.width);
  for (const auto& group : dispatch_.groups()) {
    if (group.rows == 0) continue;
    const Expert& expert = experts_[group.expert * dims_.expert_sources + group.source];
    on_.add_bias(drows_PH_ + group.first * dims_.width, expert.down_bias.weight, group.rows, dims_.width);
  }
}

template <typename Real>
void Moe<Real>::add_gradients() const {
  for (const auto& group : dispatch_.groups()) {
    if (group.rows == 0) continue;
    const Expert& expert = experts_[group.expert * dims_.expert_sources + group.source];
    expert.up.backward_bias(scratch_.dhidden + group.first * dims_.expert_ffn_in, scratch_.dbias, group.rows);
    if (tp_.first_row() != 0) continue;
    on_.bias_backward(rows_PH_ + group.first * dims_.width, expert.down_bias.grad, group.rows, dims_.width,
                      TreeParts{});
  }
}

template <typename Real>
void Moe<Real>::add_choices(std::span<float> choices_X) const {
  for (size_t e = 0; e < choices_X.size(); ++e) {
    choices_X[e] += static_cast<float>(dispatch_.choices_of(static_cast<int64_t>(e)));
  }
}

// The router saw all rows on every rank: its part is added behind the sum over tp, and each rank takes its own rows.
template <typename Real>
Status Moe<Real>::route_backward(const SavedMoe<Real>& saved, DevicePtr<const Real> input_RH, float loss_scale) const {
  const StageDims& d = dims_;
  const bool counts_here = bias_ && tp_.first_row() == 0;  // with sequence parallelism gradients are added over tp
  std::vector<float>& balance = host_balance_X_;
  if (dispatch_.places()) {  // the counts are where they are wanted
    RT_CHECK(saved.choices.empty() && dispatch_.counts() == balance_X_, "counts of a layer that are not on the device");
    if (counts_here) on_.add_to(bias_.grad, balance_X_, d.experts);
    if (saved.placed_choices) on_.copy_floats(saved.placed_choices, balance_X_, d.experts);
  } else if (!saved.choices.empty()) {
    std::ranges::copy(saved.choices, balance.begin());
  } else {
    std::ranges::fill(balance, 0.0f);
    add_choices(balance);
  }
  if (!dispatch_.places()) on_.copy_floats(on_.stream.give(std::span<const float>(balance)), balance_X_, d.experts);
  // A micro-batch's rows lie on all of them.
  if (saved.choices.empty() && !saved.placed_choices && cp_.on() && aux_loss_ > 0) {
    RT_TRY(cp_.comm().all_reduce(balance_X_, d.experts, DType::kF32, comm::ReduceOp::kSum, what_balance_));
  }
  const auto layers = static_cast<float>(balanced_layers_);  // in the mean of choices and in that of probabilities
  const float each =
      aux_loss_ * static_cast<float>(d.experts) / static_cast<float>(d.cp * d.rows) * loss_scale / (layers * layers);
  on_.scale_floats(balance_X_, each, d.experts);
  on_.route_backward(router_dims_, saved.probabilities, saved.chosen, dweights_Tk_,
                     {.balance = balance_X_, .log_sums = saved.log_sums, .z = z_loss_ * loss_scale}, dlogits_TX_);
  if (counts_here && !dispatch_.places()) {
    std::ranges::fill(balance, 0.0f);
    add_choices(balance);
    on_.add_to(bias_.grad, on_.stream.give(std::span<const float>(balance)), d.experts);
  }
  DevicePtr<const Real> dlogits_RX = dlogits_TX_ + tp_.first_row() * d.experts;
  router_.backward_weight(dlogits_RX, d.experts, input_RH, d.local_rows);
  if (logit_bias_) on_.bias_backward(dlogits_RX, logit_bias_.grad, d.local_rows, d.experts, TreeParts{});
  router_.backward_input(dlogits_RX, d.experts, tp_.local(scratch_.partial_TH), true, d.local_rows);
  if (shared_) {
    shared_->backward_gate(saved.shared_gate, dgate_T(), tp_.first_row(), d.local_rows, input_RH,
                           tp_.local(scratch_.partial_TH));
  }
  return {};
}

template class Moe<float>;
template class Moe<bf16>;
template class Moe<f16>;

}  // namespace cairn::nn
