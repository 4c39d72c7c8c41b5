#include "runtime/nn/latent_projections.h"

#include <fmt/format.h>

#include "runtime/nn/branch.h"

namespace cairn::nn {
namespace {

// Of the norms of latent vectors, whatever the model's other norms have (transformers, models/deepseek_v3).
constexpr float kLatentNormEps = 1e-6f;

/// Products of a projection whose input lies in rows of another stride.
template <typename Real>
void forward_from(const Linear<Real>& linear, DevicePtr<const Real> x, int64_t x_stride, DevicePtr<Real> y,
                  int64_t y_stride, int64_t rows) {
  kernels::MatmulArgs product = linear.forward_product(x, y, y_stride, rows);
  product.lda = x_stride;
  product.few_rows = product.few_rows && x_stride == linear.in;  // that kernel takes dense rows alone
  linear.on->matmul(product);
}
template <typename Real>
void backward_into(const Linear<Real>& linear, DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<Real> dx,
                   int64_t dx_stride, int64_t rows) {
  kernels::MatmulArgs product = linear.backward_input_product(dy, dy_stride, dx, false, rows);
  product.ldc = dx_stride;
  linear.on->matmul(product);
}
template <typename Real>
void weight_from(const Linear<Real>& linear, DevicePtr<const Real> dy, int64_t dy_stride, DevicePtr<const Real> x,
                 int64_t x_stride, int64_t rows) {
  kernels::MatmulArgs product = linear.backward_weight_product(dy, dy_stride, x, rows);
  product.ldb = x_stride;
  linear.on->matmul(product);
}

}  // namespace

template <typename Real>
LatentProjections<Real>::LatentProjections(const Parameters<Real>& parameters, const ModelConfig& model,
                                           const StageDims& dims, int64_t layer, const Turning<Real>& turning,
                                           const Residual<Real>& residual, const TensorParallel<Real>& tp,
                                           const Scratch<Real>& scratch)
    : on_(parameters.on()),
      dims_(dims),
      latent_(dims.latent()),
      norm_offset_(norm_offset(model)),
      from_stream_([&] {
        const std::string prefix = layer_prefix(model, layer) + "attn.";
        std::vector<Linear<Real>> parts;
        if (dims.q_rank > 0) parts.push_back(linear(parameters, prefix + "q_a", model.width));
        parts.push_back(linear(parameters, prefix + "kv_a", model.width));
        return ColumnGroup<Real>(parts);
      }()),
      kv_b_(linear(parameters, layer_prefix(model, layer) + "attn.kv_b", dims.kv_rank)),
      q_norm_(parameters.get_optional(layer_prefix(model, layer) + "attn.q_a_norm.weight")),
      kv_norm_(parameters.get(layer_prefix(model, layer) + "attn.kv_a_norm.weight")),
      turning_(turning),
      residual_(residual),
      tp_(tp),
      latent_tp_(tp.with_width(latent_)),
      scratch_(scratch),
      what_in_(fmt::format("layer {} attn.in", layer)),
      what_latent_(fmt::format("layer {} attn.latents", layer)),
      what_dlatent_(fmt::format("layer {} attn.dlatents", layer)),
      what_din_(fmt::format("layer {} attn.din", layer)) {
  const std::string prefix = layer_prefix(model, layer) + "attn.";
  if (dims.q_rank > 0) {
    q_b_ = linear(parameters, prefix + "q_b", dims.q_rank);
  } else {
    queries_.emplace(std::vector<Linear<Real>>{linear(parameters, prefix + "q", model.width)}, 0, dims.qkv);
  }
}

template <typename Real>
kernels::LatentHeads LatentProjections<Real>::heads() const {
  return {.rows = dims_.rows,
          .heads = dims_.heads,
          .nope = dims_.nope_dim,
          .rope = dims_.rope_dim,
          .value = dims_.value_dim};
}

template <typename Real>
kernels::HeadNorm LatentProjections<Real>::norm(int64_t width) const {
  return {.rows = dims_.local_rows, .heads = 1, .head_dim = width, .eps = kLatentNormEps, .offset = norm_offset_};
}

template <typename Real>
Status LatentProjections<Real>::latents(const SavedLatents<Real>& saved) const {
  const StageDims& d = dims_;
  const DevicePtr<const Real> before_RL = saved.before_RL;
  const DevicePtr<Real> latents_RL = local(scratch_.latents);
  const int64_t kv_at = d.q_rank, rope_at = kv_at + d.kv_rank;
  if (q_norm_)
    on_.head_norm_forward(norm(d.q_rank), {before_RL, latent_}, q_norm_.weight, nullptr, {latents_RL, latent_});
  on_.head_norm_forward(norm(d.kv_rank), {before_RL + kv_at, latent_}, kv_norm_.weight, nullptr,
                        {latents_RL + kv_at, latent_});
  on_.copy_rows(before_RL + rope_at, latent_, latents_RL + rope_at, latent_, d.local_rows, d.rope_dim);
  return latent_tp_.gather(scratch_.latents, what_latent_);
}

template <typename Real>
Status LatentProjections<Real>::forward(const SavedLatents<Real>& saved, DevicePtr<const Real> input_RH,
                                        DevicePtr<Real> qkv) const {
  const StageDims& d = dims_;
  from_stream_.forward(input_RH, saved.before_RL, d.local_rows);
  RT_TRY(latents(saved));
  const DevicePtr<Real> latents_TL = scratch_.latents, shared_key = latents_TL + d.q_rank + d.kv_rank;
  turning_.turn(shared_key, 1, d.rope_dim, latent_, false);
  if (q_b_) {
    forward_from<Real>(*q_b_, latents_TL, latent_, qkv, d.qkv, d.rows);
  } else {
    RT_TRY_SET(const DevicePtr<const Real> rows_TH, column_cut_gather<Real>(input_RH, tp_, scratch_, what_in_));
    queries_->forward(rows_TH, qkv, d.rows);
  }
  turning_.turn(qkv + d.nope_dim, d.heads, d.head_dim, d.qkv, false);
  const DevicePtr<Real> kv = scratch_.hidden, k = qkv + d.heads * d.head_dim, v = k + d.heads * d.head_dim;
  forward_from<Real>(kv_b_, latents_TL + d.q_rank, latent_, kv, d.heads * (d.nope_dim + d.value_dim), d.rows);
  on_.join_latent_heads(heads(), kv, {shared_key, latent_}, {k, d.qkv}, {v, d.qkv});
  return {};
}

template <typename Real>
DevicePtr<const Real> LatentProjections<Real>::narrow(DevicePtr<const Real> out, DevicePtr<Real> into) const {
  const StageDims& d = dims_;
  if (d.value_dim == d.head_dim) return out;
  on_.copy_rows(out, d.head_dim, into, d.value_dim, d.rows * d.heads, d.value_dim);
  return into;
}

template <typename Real>
void LatentProjections<Real>::widen(DevicePtr<const Real> dout, DevicePtr<Real> into) const {
  const StageDims& d = dims_;
  on_.clear(into, d.rows * d.heads * d.head_dim);
  on_.copy_rows(dout, d.value_dim, into, d.head_dim, d.rows * d.heads, d.value_dim);
}

template <typename Real>
DevicePtr<Real> LatentProjections<Real>::split(DevicePtr<const Real> dqkv) const {
  const StageDims& d = dims_;
  const DevicePtr<const Real> dk = dqkv + d.heads * d.head_dim, dv = dk + d.heads * d.head_dim;
  const DevicePtr<Real> dkv = scratch_.hidden;
  on_.split_latent_heads(heads(), {dk, d.qkv}, {dv, d.qkv}, dkv, {scratch_.dlatents + d.q_rank + d.kv_rank, latent_});
  return dkv;
}

template <typename Real>
Status LatentProjections<Real>::weights(const SavedLatents<Real>& saved, DevicePtr<const Real> dqkv,
                                        DevicePtr<const Real> dkv) const {
  const StageDims& d = dims_;
  RT_TRY(latents(saved));
  const DevicePtr<const Real> latents_TL = scratch_.latents;
  if (q_b_) weight_from<Real>(*q_b_, dqkv, d.qkv, latents_TL, latent_, d.rows);
  weight_from<Real>(kv_b_, dkv, d.heads * (d.nope_dim + d.value_dim), latents_TL + d.q_rank, latent_, d.rows);
  return {};
}

template <typename Real>
Status LatentProjections<Real>::stream_weights(DevicePtr<const Real> input_RH, DevicePtr<const Real> dbefore_RL,
                                               DevicePtr<const Real> dqkv) const {
  from_stream_.backward_weight(dbefore_RL, input_RH, scratch_.dbias, dims_.local_rows);
  if (!queries_) return {};
  RT_TRY_SET(const DevicePtr<const Real> rows_TH, column_cut_gather<Real>(input_RH, tp_, scratch_, what_in_));
  queries_->backward_weight(dqkv, rows_TH, nullptr, dims_.rows);
  return {};
}

template <typename Real>
Status LatentProjections<Real>::backward(const SavedLatents<Real>& saved, const SavedResidual<Real>& residual,
                                         DevicePtr<Real> dqkv, bool late) const {
  const StageDims& d = dims_;
  const DevicePtr<Real> dlatents_TL = scratch_.dlatents, dlatents_RL = local(dlatents_TL);
  turning_.turn(dqkv + d.nope_dim, d.heads, d.head_dim, d.qkv, true);
  const DevicePtr<const Real> dkv = split(dqkv);
  turning_.turn(dlatents_TL + d.q_rank + d.kv_rank, 1, d.rope_dim, latent_, true);
  if (q_b_) backward_into<Real>(*q_b_, dqkv, d.qkv, dlatents_TL, latent_, d.rows);
  backward_into<Real>(kv_b_, dkv, d.heads * (d.nope_dim + d.value_dim), dlatents_TL + d.q_rank, latent_, d.rows);
  if (!late) RT_TRY(weights(saved, dqkv, dkv));

  RT_TRY(latent_tp_.reduce(dlatents_TL, what_dlatent_));
  const auto norm_backward = [&](int64_t at, int64_t width, const Parameter<Real>& weight) {
    const kernels::Rows<Real> dx{dlatents_RL + at, latent_};
    on_.head_norm_backward(norm(width), {dx.data, latent_}, {saved.before_RL + at, latent_}, weight.weight, dx,
                           {weight.grad, nullptr, {}}, scratch_.attention);
  };
  if (q_norm_) norm_backward(0, d.q_rank, q_norm_);
  norm_backward(d.q_rank, d.kv_rank, kv_norm_);

  const DevicePtr<const Real> input_RH = residual_.input_again(residual);  // for its statistics too
  if (late) {
    on_.copy(dlatents_RL, saved.late_dout_RL, d.local_rows * latent_);
  } else {
    RT_TRY(stream_weights(input_RH, dlatents_RL, dqkv));
  }
  if (queries_) {
    queries_->backward_input_partial(dqkv, tp_.partial(scratch_.partial_TH), d.rows);
    RT_TRY(tp_.reduce_sum(scratch_.partial_TH, what_din_));
  }
  const DevicePtr<Real> dinput_RH = tp_.local(scratch_.partial_TH);
  from_stream_.backward_input(dlatents_RL, dinput_RH, d.local_rows, queries_.has_value());
  residual_.input_gradient(residual, dinput_RH);
  return {};
}

template <typename Real>
Status LatentProjections<Real>::backward_weight(const SavedLatents<Real>& saved, const SavedResidual<Real>& residual,
                                                DevicePtr<Real> dqkv) const {
  RT_TRY(weights(saved, dqkv, split(dqkv)));
  return stream_weights(residual_.input_again(residual), saved.late_dout_RL, dqkv);
}

template <typename Real>
void LatentProjections<Real>::remember(const CachedRows& rows, int64_t layer) const {
  const StageDims& d = dims_;
  const KvCache& cache = *rows.cache;
  RT_CHECK(cache.row_elems == d.kv_rank + d.rope_dim, "a cache of {} elements a token for latent vectors of {} + {}",
           cache.row_elems, d.kv_rank, d.rope_dim);
  const DevicePtr<const Real> latents = scratch_.latents + d.q_rank;
  on_.scatter_rows(latents, latent_, rows.cache_rows, d.rows, cache.row_elems, cache.keys<Real>(layer, 0));
}

template <typename Real>
DevicePtr<const Real> LatentProjections<Real>::kv_rows(int64_t head, bool value) const {
  return kv_b_.weight.weight +
         (head * (dims_.nope_dim + dims_.value_dim) + (value ? dims_.nope_dim : 0)) * dims_.kv_rank;
}

template <typename Real>
void LatentProjections<Real>::attend_cached(const CachedRows& rows, int64_t layer, const kernels::AttentionDims& dims,
                                            DevicePtr<Real> qkv, DevicePtr<Real> out) const {
  const StageDims& d = dims_;
  const KvCache& cache = *rows.cache;
  const int64_t width = d.kv_rank + d.rope_dim, stride = d.heads * width;
  const DevicePtr<Real> queries = scratch_.hidden, answers = scratch_.dhidden;  // [T, N, width]
  kernels::MatmulArgs product{.m = d.rows,
                              .n = d.kv_rank,
                              .k = d.nope_dim,
                              .lda = d.qkv,
                              .ldb = d.kv_rank,
                              .ldc = stride,
                              .ab_dtype = DTypeOf<Real>::value,
                              .c_dtype = DTypeOf<Real>::value};
  for (int64_t h = 0; h < d.heads; ++h) {
    product.a = qkv + h * d.head_dim;
    product.b = kv_rows(h, false);
    product.c = queries + h * width;
    on_.matmul(product);
    on_.copy_rows(qkv + h * d.head_dim + d.nope_dim, d.qkv, queries + h * width + d.kv_rank, stride, d.rows,
                  d.rope_dim);
  }
  kernels::AttentionDims one = dims;
  one.batch = 1;
  one.kv_heads = 1;
  one.head_dim = width;
  for (int64_t r = 0; r < d.rows; ++r) {
    if (rows.place[r] < 0) {
      on_.clear(answers + r * stride, stride);
      continue;
    }
    const DevicePtr<const Real> past = cache.keys<Real>(layer, rows.sequence[r]);
    on_.attention_decode(one, rows.place[r], cache.capacity, queries + r * stride, past, past, answers + r * stride);
  }
  product.n = d.value_dim;
  product.k = d.kv_rank;
  product.lda = stride;
  product.trans_b = true;
  product.ldc = d.heads * d.value_dim;
  for (int64_t h = 0; h < d.heads; ++h) {
    product.a = answers + h * width;
    product.b = kv_rows(h, true);
    product.c = out + h * d.value_dim;
    on_.matmul(product);
  }
}

template class LatentProjections<float>;
template class LatentProjections<bf16>;
template class LatentProjections<f16>;

}  // namespace cairn::nn
