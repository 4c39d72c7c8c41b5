#include "runtime/nn/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/nn/branch.h"

namespace cairn::nn {
namespace {

double score_scale(const ModelConfig& model, int64_t layer) {
  double scale =
      model.attention_scale > 0 ? model.attention_scale : 1.0 / std::sqrt(static_cast<double>(model.head_dim));
  if (model.attention_scale_by_layer) scale /= static_cast<double>(layer + 1);
  return scale;
}

}  // namespace

kernels::AttentionDims attention_dims(const ModelConfig& model, const StageDims& dims, int64_t layer) {
  return {.batch = dims.samples,
          .tokens = dims.held.tokens,
          .heads = dims.heads,
          .kv_heads = dims.kv_heads,
          .head_dim = dims.head_dim,
          .q_stride = dims.qkv,
          .kv_stride = dims.qkv,
          .out_stride = dims.heads * dims.head_dim,
          .scale = static_cast<float>(score_scale(model, layer)),
          .cap = static_cast<float>(model.score_cap),
          .mask = {.causal = model.mask != Mask::kBidirectional,
                   .window = has_window(model, layer) ? model.sliding_window : 0,
                   .chunk = has_chunks(model, layer) ? model.attention_chunk : 0},
          .alibi_rounded = model.alibi == AlibiForm::kRounded,
          .held = dims.held,
          .key_parts = dims.all_token_parts};
}

template <typename Real>
Attention<Real>::Attention(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
                           int64_t layer, const TensorParallel<Real>& tp, const ContextParallel<Real>& cp,
                           const Scratch<Real>& scratch)
    : on_(parameters.on()),
      dims_(dims),
      layer_(layer),
      clip_(static_cast<float>(model.clip_qkv)),
      norm_eps_(static_cast<float>(model.norm_eps)),
      norm_offset_(norm_offset(model)),
      qk_norm_(has_qk_norm(model, layer) ? model.qk_norm : QkNorm::kNone),
      kv_copies_(tp.comm().size() * dims.kv_heads / model.kv_heads),
      turning_(on_, model, dims, layer, scratch),
      residual_(parameters, model, dims, layer_prefix(model, layer), Branch::kAttention, tp, scratch),
      q_norm_(parameters.get_optional(layer_prefix(model, layer) + "attn.q_norm.weight")),
      k_norm_(parameters.get_optional(layer_prefix(model, layer) + "attn.k_norm.weight")),
      q_norm_bias_(parameters.get_optional(layer_prefix(model, layer) + "attn.q_norm.bias")),
      k_norm_bias_(parameters.get_optional(layer_prefix(model, layer) + "attn.k_norm.bias")),
      sinks_(parameters.get_optional(layer_prefix(model, layer) + "attn.sinks")),
      o_(linear(parameters, layer_prefix(model, layer) + "attn.o", dims.heads * dims.value_dim)),
      probabilities_dropout_(on_, model.attention_dropout, layer, DropoutPlace::kAttention),
      output_dropout_(on_, model.residual_dropout, layer, DropoutPlace::kAttentionOutput),
      tp_(tp),
      cp_(cp),
      scratch_(scratch),
      what_in_(fmt::format("layer {} attn.in", layer)),
      what_out_(fmt::format("layer {} attn.out", layer)),
      what_dout_(fmt::format("layer {} attn.dout", layer)),
      what_din_(fmt::format("layer {} attn.din", layer)),
      what_kv_(fmt::format("layer {} attn.kv", layer)),
      what_dkv_(fmt::format("layer {} attn.dkv", layer)),
      what_qk_norm_(fmt::format("layer {} attn.qk_norm", layer)),
      what_dqk_norm_(fmt::format("layer {} attn.dqk_norm", layer)) {
  const bool top_query = model.top_query && layer == model.layers;
  if (top_query) position_queries_.emplace(parameters, model, dims, tp, scratch);
  if (has_mla(model)) {
    latent_.emplace(parameters, model, dims, layer, turning_, residual_, tp, scratch);
  } else {
    const std::string prefix = layer_prefix(model, layer) + "attn.";
    std::vector<Linear<Real>> parts;
    if (!top_query) parts.push_back(linear(parameters, prefix + "q", model.width));
    for (const char* part : {"k", "v"}) parts.push_back(linear(parameters, prefix + part, model.width));
    from_stream_.emplace(parts, top_query ? dims.heads * dims.head_dim : 0, dims.qkv);
  }
  attention_dims_ = nn::attention_dims(model, dims, layer);
  attention_dims_.alibi_slopes = scratch.alibi_slopes;
  attention_dims_.sinks = scratch.sinks;
  RT_CHECK(kernels::attention_backward_scratch_elems(attention_dims_) <= attention_scratch_elems(dims),
           "attention wants {} floats of scratch, the plan gives {}",
           kernels::attention_backward_scratch_elems(attention_dims_), attention_scratch_elems(dims));
}

template <typename Real>
Status Attention<Real>::project(const SavedAttention<Real>& saved, DevicePtr<const Real> input_RH) const {
  if (latent_) return latent_->forward(saved.latents, input_RH, saved.qkv);
  RT_TRY_SET(const DevicePtr<const Real> rows_TH, column_cut_gather<Real>(input_RH, tp_, scratch_, what_in_));
  from_stream_->forward(rows_TH, saved.qkv, dims_.rows);
  if (position_queries_) position_queries_->forward(saved.qkv);
  RT_TRY(prepare_qkv(saved));
  turn(saved.qkv, false);
  return {};
}

template <typename Real>
DevicePtr<const Real> Attention<Real>::core_output(const SavedAttention<Real>& saved, DevicePtr<Real> scratch) const {
  return latent_ ? latent_->narrow(saved.out, scratch) : DevicePtr<const Real>(saved.out);
}

template <typename Real>
Status Attention<Real>::forward(const SavedAttention<Real>& saved, DevicePtr<Real> output_RH) const {
  RT_TRY(project(saved, residual_.input(saved.residual)));
  DevicePtr<const Real> out;
  if (scratch_.cached == nullptr) {
    RT_TRY(recompute_core(saved));
    out = core_output(saved, scratch_.hidden);
  } else {
    out = attend_cached(*scratch_.cached, saved);
  }
  return row_cut_forward<Real>(o_, output_dropout_, residual_, saved.residual, out, saved.residual.input_RH, output_RH,
                               tp_, scratch_, dims_, what_out_);
}

template <typename Real>
Status Attention<Real>::prepare_qkv(const SavedAttention<Real>& saved) const {
  const StageDims& d = dims_;
  if (clip_ > 0) {
    on_.copy(saved.qkv, saved.qk, d.rows * d.qkv);
    on_.clip(saved.qkv, clip_, d.rows * d.qkv);
  }
  if (qk_norm_ == QkNorm::kNone) return {};
  const int64_t q_width = d.heads * d.head_dim, qk_width = q_width + d.kv_heads * d.head_dim;
  on_.copy_rows(saved.qkv, d.qkv, saved.qk, qk_width, d.rows, qk_width);
  if (qk_norm_ == QkNorm::kWhole) return whole_norms(saved);
  on_.head_norm_forward(head_norm(d.heads), {saved.qk, qk_width}, q_norm_.weight, q_norm_bias_.weight,
                        {saved.qkv, d.qkv});
  on_.head_norm_forward(head_norm(d.kv_heads), {saved.qk + q_width, qk_width}, k_norm_.weight, k_norm_bias_.weight,
                        {saved.qkv + q_width, d.qkv});
  return {};
}

template <typename Real>
kernels::HeadNorm Attention<Real>::head_norm(int64_t heads) const {
  const bool own = qk_norm_ == QkNorm::kHeadLayerNorm;
  return {.rows = dims_.rows,
          .heads = heads,
          .head_dim = dims_.head_dim,
          .eps = norm_eps_,
          .offset = norm_offset_,
          .centred = own || qk_norm_ == QkNorm::kSharedLayerNorm,
          .own_weights = own};
}

template <typename Real>
kernels::WholeNorm Attention<Real>::whole_norm(bool k) const {
  const StageDims& d = dims_;
  const int64_t heads = k ? d.kv_heads : d.heads, copies = k ? kv_copies_ : 1;
  return {.rows = d.rows,
          .width = heads * d.head_dim,
          .channels = heads * d.head_dim * tp_.comm().size() / copies,
          .copies = copies,
          .eps = norm_eps_,
          .offset = norm_offset_};
}

template <typename Real>
Status Attention<Real>::sum_channels(DevicePtr<float> sums, int64_t count) const {
  join_sums(on_, sums, dims_.parts, count * dims_.rows);
  if (tp_.comm().size() == 1) return {};
  return tp_.comm().all_reduce(sums, count * dims_.rows, DType::kF32, tp_.sum_op(),
                               count == 2 ? what_qk_norm_ : what_dqk_norm_);
}

template <typename Real>
Status Attention<Real>::whole_norms(const SavedAttention<Real>& saved) const {
  const StageDims& d = dims_;
  const kernels::WholeNorm q = whole_norm(false), k = whole_norm(true);
  const int64_t stride = q.width + k.width;
  const DevicePtr<const Real> q_in = saved.qk, k_in = q_in + q.width;
  const DevicePtr<float> squares = scratch_.attention;  // [parts, q and k, T]
  const auto add_squares = [&](const kernels::WholeNorm& norm, DevicePtr<const Real> x, DevicePtr<float> into) {
    on_.row_dots({d.rows, norm.width, d.parts, 2 * d.rows}, {x, stride}, {x, stride}, nullptr, 0, into);
  };
  add_squares(q, q_in, squares);
  add_squares(k, k_in, squares + d.rows);
  RT_TRY(sum_channels(squares, 2));
  on_.whole_norm_forward(q, {q_in, stride}, q_norm_.weight, squares, {saved.qkv, d.qkv});
  on_.whole_norm_forward(k, {k_in, stride}, k_norm_.weight, squares + d.rows, {saved.qkv + q.width, d.qkv});
  return {};
}

template <typename Real>
Status Attention<Real>::prepare_qk_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const {
  turn(dqkv, true);
  if (clip_ > 0) on_.clip_backward(saved.qk, dqkv, clip_, dims_.rows * dims_.qkv);
  return qk_norm_ == QkNorm::kNone ? Status() : norm_qk_backward(saved, dqkv);
}

template <typename Real>
Status Attention<Real>::norm_qk_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const {
  if (qk_norm_ == QkNorm::kWhole) return whole_norms_backward(saved, dqkv);
  if (qk_norm_ == QkNorm::kHead || qk_norm_ == QkNorm::kSharedLayerNorm) return shared_norms_backward(saved, dqkv);
  const StageDims& d = dims_;
  const int64_t q_width = d.heads * d.head_dim, qk_width = q_width + d.kv_heads * d.head_dim;
  // Each rank has the weights of its heads, where they have any: what is summed is rows alone.
  const auto backward = [&](int64_t heads, int64_t at, const Parameter<Real>& weight) {
    on_.head_norm_backward(head_norm(heads), {dqkv + at, d.qkv}, {saved.qk + at, qk_width}, weight.weight,
                           {dqkv + at, d.qkv}, {weight.grad, nullptr, scratch_.token_parts}, scratch_.attention);
  };
  backward(d.heads, 0, q_norm_);
  backward(d.kv_heads, q_width, k_norm_);
  return {};
}

template <typename Real>
Status Attention<Real>::whole_norms_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const {
  const StageDims& d = dims_;
  const kernels::WholeNorm q = whole_norm(false), k = whole_norm(true);
  const int64_t stride = q.width + k.width;
  const DevicePtr<const Real> q_in = saved.qk, k_in = q_in + q.width;
  const DevicePtr<float> sums = scratch_.attention;  // [parts, squares of q and of k, dots of both, T]
  const auto add = [&](const kernels::WholeNorm& norm, DevicePtr<const Real> x, DevicePtr<const Real> dy,
                       DevicePtr<const Real> weight, DevicePtr<float> into) {
    const kernels::RowDots dots{d.rows, norm.width, d.parts, 4 * d.rows};
    on_.row_dots(dots, {x, stride}, {x, stride}, nullptr, 0, into);
    on_.row_dots(dots, {dy, d.qkv}, {x, stride}, weight, norm_offset_, into + 2 * d.rows);
  };
  add(q, q_in, dqkv, q_norm_.weight, sums);
  add(k, k_in, dqkv + q.width, k_norm_.weight, sums + d.rows);
  RT_TRY(sum_channels(sums, 4));
  const auto backward = [&](const kernels::WholeNorm& norm, DevicePtr<const Real> x, DevicePtr<Real> dy,
                            const Parameter<Real>& weight, DevicePtr<const float> squares) {
    on_.whole_norm_backward(norm, {dy, d.qkv}, {x, stride}, weight.weight, squares, squares + 2 * d.rows, {dy, d.qkv},
                            {weight.grad, nullptr, scratch_.token_parts});
  };
  backward(q, q_in, dqkv, q_norm_, sums);
  backward(k, k_in, dqkv + q.width, k_norm_, sums + d.rows);
  return {};
}

template <typename Real>
Status Attention<Real>::shared_norms_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const {
  const StageDims& d = dims_;
  const int64_t q_width = d.heads * d.head_dim, qk_width = q_width + d.kv_heads * d.head_dim;
  const bool biased = static_cast<bool>(q_norm_bias_);
  const int64_t width = (biased ? 2 : 1) * d.head_dim;  // of the sums for one norm: of the weight, then of the bias
  const DevicePtr<float> stats = scratch_.attention;    // attention's backward is done with it
  // Of `count` heads from channel `at` on, in rows [row, row + rows).
  const auto backward = [&](int64_t at, int64_t count, int64_t row, int64_t rows, const kernels::NormGradients& to) {
    const DevicePtr<Real> dy = dqkv + row * d.qkv + at;
    kernels::HeadNorm norm = head_norm(count);
    norm.rows = rows;
    on_.head_norm_backward(norm, {dy, d.qkv}, {saved.qk + row * qk_width + at, qk_width},
                           at < q_width ? q_norm_.weight : k_norm_.weight, {dy, d.qkv}, to, stats);
  };
  const TreeParts heads_tree{d.parts, scratch_.stats.parts.sums};
  if (!heads_tree.sums) {
    backward(0, d.heads, 0, d.rows, {q_norm_.grad, q_norm_bias_.grad, {}});
    backward(q_width, d.kv_heads, 0, d.rows, {k_norm_.grad, k_norm_bias_.grad, {}});
    return {};
  }
  const auto sum_heads = [&](int64_t at, int64_t heads, int64_t row, int64_t rows) {
    const int64_t each = heads / d.parts;
    return tree_sum(on_, heads_tree, width, [&](int64_t part, DevicePtr<float> sum) {
      backward(at + part * each * d.head_dim, each, row, rows, {sum, biased ? sum + d.head_dim : nullptr, {}});
    });
  };
  const auto add_sums = [&](DevicePtr<const float> sums, const Parameter<Real>& weight, const Parameter<Real>& bias) {
    on_.add_to(weight.grad, sums, d.head_dim);
    if (bias) on_.add_to(bias.grad, sums + d.head_dim, d.head_dim);
  };
  if (d.all_token_parts == 1) {
    add_sums(sum_heads(0, d.heads, 0, d.rows), q_norm_, q_norm_bias_);
    add_sums(sum_heads(q_width, d.kv_heads, 0, d.rows), k_norm_, k_norm_bias_);
    return {};
  }
  // Heads are cut by tp, and tokens by cp: so that a tree of all needs no more than the sums of both, those over heads
  // are whole in each part of the tokens before these are added.
  const DevicePtr<float> sums = heads_tree.sums + tree_sum_elems(d.parts, width);  // [parts, q and k, width]
  const int64_t part_rows = d.rows / d.held.parts;
  for (int64_t part = 0; part < d.held.parts; ++part) {
    const DevicePtr<float> sum = sums + part * 2 * width;
    on_.copy_floats(sum_heads(0, d.heads, part * part_rows, part_rows), sum, width);
    on_.copy_floats(sum_heads(q_width, d.kv_heads, part * part_rows, part_rows), sum + width, width);
  }
  comm::Comm& comm = tp_.comm();
  if (comm.size() > 1) {
    RT_TRY(comm.all_reduce(sums, d.held.parts * 2 * width, DType::kF32, comm::ReduceOp::kTreeSum, what_dqk_norm_));
  }
  join_sums(on_, sums, d.held.parts, 2 * width);
  add_sums(sums, q_norm_, q_norm_bias_);
  add_sums(sums + width, k_norm_, k_norm_bias_);
  return {};
}

template <typename Real>
auto Attention<Real>::keys_values(const SavedAttention<Real>& saved) const -> Result<KeysValues> {
  const int64_t v_at = dims_.kv_heads * dims_.head_dim;
  DevicePtr<const Real> k = saved.qkv + dims_.heads * dims_.head_dim;
  if (!cp_.on()) return KeysValues{k, k + v_at, dims_.qkv};
  RT_TRY(cp_.gather(k, dims_.qkv, &k, what_kv_));
  return KeysValues{k, k + v_at, cp_.kv_width()};
}

template <typename Real>
Status Attention<Real>::recompute_core(const SavedAttention<Real>& saved) const {
  RT_TRY_SET(const KeysValues kv, keys_values(saved));
  kernels::AttentionDims dims = attention_dims();
  dims.kv_stride = kv.stride;
  use_sinks();
  if (scratch_.max_scores) dims.max_scores = scratch_.max_scores + layer_ * scratch_.scored_heads;
  on_.attention_forward(dims, saved.qkv, kv.k, kv.v, saved.out, saved.logsumexp_BNS);
  return {};
}

template <typename Real>
DevicePtr<const Real> Attention<Real>::attend_cached(const CachedRows& rows, const SavedAttention<Real>& saved) const {
  const StageDims& d = dims_;
  const KvCache& cache = *rows.cache;
  const int64_t k_at = d.heads * d.head_dim, v_at = k_at + d.kv_heads * d.head_dim;
  if (latent_) {
    latent_->remember(rows, layer_);
  } else {
    on_.scatter_rows(saved.qkv + k_at, d.qkv, rows.cache_rows, d.rows, cache.row_elems, cache.keys<Real>(layer_, 0));
    on_.scatter_rows(saved.qkv + v_at, d.qkv, rows.cache_rows, d.rows, cache.row_elems, cache.values<Real>(layer_, 0));
  }
  use_sinks();
  if (rows.from_start) {
    kernels::AttentionDims all = attention_dims_;
    all.mask.ends = scratch_.ends;
    on_.attention_forward(all, saved.qkv, saved.qkv + k_at, saved.qkv + v_at, saved.out, saved.logsumexp_BNS);
    return core_output(saved, scratch_.hidden);
  }
  if (latent_) {
    latent_->attend_cached(rows, layer_, attention_dims_, saved.qkv, scratch_.hidden);
    return scratch_.hidden;
  }
  kernels::AttentionDims one = attention_dims_;
  one.batch = 1;
  for (int64_t r = 0; r < d.rows; ++r) {
    DevicePtr<Real> out = saved.out + r * k_at;
    if (rows.place[r] < 0) {
      on_.clear(out, k_at);
      continue;
    }
    on_.attention_decode(one, rows.place[r], cache.capacity, saved.qkv + r * d.qkv,
                         cache.keys<Real>(layer_, rows.sequence[r]), cache.values<Real>(layer_, rows.sequence[r]), out);
  }
  return saved.out;
}

template <typename Real>
Status Attention<Real>::backward(const SavedAttention<Real>& saved, DevicePtr<Real> late_dout_RH) const {
  const StageDims& d = dims_;
  const bool late = static_cast<bool>(late_dout_RH);
  DevicePtr<const Real> dbranch_RH = residual_.branch_gradient(saved.residual);
  DevicePtr<const Real> masked_RH, dy_TH;
  RT_TRY(row_cut_gather<Real>(output_dropout_, dbranch_RH, &masked_RH, &dy_TH, tp_, scratch_, d, what_dout_));
  if (late) {
    on_.copy(dbranch_RH, late_dout_RH, d.local_rows * d.width);
  } else {
    row_cut_weight<Real>(o_, masked_RH, dy_TH, core_output(saved, scratch_.dhidden), scratch_, d);
  }
  DevicePtr<Real> dout = scratch_.hidden;  // [T, N D]
  o_.backward_input(dy_TH, d.width, latent_ ? scratch_.dhidden : dout, false, d.rows);
  if (latent_) latent_->widen(scratch_.dhidden, dout);

  DevicePtr<Real> dqkv = scratch_.dhidden;
  const DevicePtr<Real> dk_rows = dqkv + d.heads * d.head_dim;
  RT_TRY_SET(const KeysValues kv, keys_values(saved));
  kernels::AttentionDims dims = attention_dims();
  dims.kv_stride = kv.stride;
  const auto attention_backward = [&](const auto& kernel, auto dk) {
    kernel(dims, saved.qkv, kv.k, kv.v, saved.out, saved.logsumexp_BNS, dout, dqkv, dk, dk + d.kv_heads * d.head_dim,
           scratch_.attention);
  };
  use_sinks();
  if (!cp_.on()) {
    attention_backward(on_.attention_backward, dk_rows);
  } else {
    cp_.in_parts() ? attention_backward(on_.attention_backward_sums, cp_.gradient_sums())
                   : attention_backward(on_.attention_backward, cp_.gradients());
    RT_TRY(cp_.reduce(dk_rows, d.qkv, what_dkv_));
  }
  if (sinks_) on_.sink_gradients(dims, saved.logsumexp_BNS, scratch_.attention, sinks_.grad);
  if (latent_) {
    RT_TRY(latent_->backward(saved.latents, saved.residual, dqkv, late));
    if (late) on_.copy(dqkv, saved.qkv, d.rows * d.qkv);
    return {};
  }
  RT_TRY(prepare_qk_backward(saved, dqkv));
  RT_CHECK(!late || !position_queries_, "the top query layer's backward is not split");
  if (position_queries_) RT_TRY(position_queries_->backward(dqkv));
  if (late) {
    on_.copy(dqkv, saved.qkv, d.rows * d.qkv);
    residual_.input_again(saved.residual);  // for its statistics
  } else {
    RT_TRY(column_cut_weight<Real>(residual_, saved.residual, *from_stream_, dqkv, tp_, scratch_, d, what_in_));
  }
  return column_cut_input<Real>(residual_, saved.residual, *from_stream_, dqkv, tp_, scratch_, what_din_);
}

template <typename Real>
Status Attention<Real>::backward_weight(const SavedAttention<Real>& saved, DevicePtr<const Real> late_dout_RH) const {
  DevicePtr<const Real> masked_RH, dy_TH;
  RT_TRY(row_cut_gather<Real>(output_dropout_, late_dout_RH, &masked_RH, &dy_TH, tp_, scratch_, dims_, what_dout_));
  row_cut_weight<Real>(o_, masked_RH, dy_TH, core_output(saved, scratch_.dhidden), scratch_, dims_);
  if (latent_) return latent_->backward_weight(saved.latents, saved.residual, saved.qkv);
  return column_cut_weight<Real>(residual_, saved.residual, *from_stream_, saved.qkv, tp_, scratch_, dims_, what_in_);
}

template <typename Real>
kernels::AttentionDims Attention<Real>::attention_dims() const {
  kernels::AttentionDims out = attention_dims_;
  out.mask.starts = scratch_.starts;
  out.mask.ends = scratch_.ends;
  if (probabilities_dropout_.on(scratch_)) {
    out.dropout = {.rate = probabilities_dropout_.rate(),
                   .sample_keys = scratch_.dropout_keys,
                   .site = probabilities_dropout_.site(),
                   .first_head = tp_.comm().rank() * dims_.heads};
  }
  return out;
}

template class Attention<float>;
template class Attention<bf16>;
template class Attention<f16>;

}  // namespace cairn::nn
