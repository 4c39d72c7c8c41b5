#include "runtime/nn/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/kernels/elementwise.h"
#include "runtime/nn/branch.h"

namespace cairn::nn {

template <typename Real>
Attention<Real>::Attention(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
                           int64_t layer, const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
    : dims_(dims),
      layer_(layer),
      norm_(parameters, fmt::format("layers.{}.attn_norm", layer), model),
      qkv_([&] {
        std::vector<Linear<Real>> parts;
        for (const char* part : {"q", "k", "v"}) {
          parts.push_back(linear(parameters, fmt::format("layers.{}.attn.{}", layer, part), model.width));
        }
        return ColumnGroup<Real>(parts);
      }()),
      o_(linear(parameters, fmt::format("layers.{}.attn.o", layer), dims.heads * dims.head_dim)),
      tp_(tp),
      scratch_(scratch),
      what_in_(fmt::format("layer {} attn.in", layer)),
      what_out_(fmt::format("layer {} attn.out", layer)),
      what_dout_(fmt::format("layer {} attn.dout", layer)),
      what_din_(fmt::format("layer {} attn.din", layer)) {
  attention_dims_ = {.batch = dims.samples,
                     .tokens = dims.tokens,
                     .heads = dims.heads,
                     .kv_heads = dims.kv_heads,
                     .head_dim = dims.head_dim,
                     .q_stride = dims.qkv,
                     .kv_stride = dims.qkv,
                     .out_stride = dims.heads * dims.head_dim,
                     .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dims.head_dim)))};
  RT_CHECK(kernels::attention_backward_scratch_elems(attention_dims_) <= attention_scratch_elems(dims),
           "attention wants {} floats of scratch, the plan gives {}",
           kernels::attention_backward_scratch_elems(attention_dims_), attention_scratch_elems(dims));
}

template <typename Real>
Status Attention<Real>::forward(const SavedAttention<Real>& saved, Real* output_RH) const {
  const StageDims& d = dims_;
  norm_.forward(saved.input_RH, tp_.local(scratch_.rows_TH), scratch_.stats, d.local_rows);
  RT_TRY(tp_.gather(scratch_.rows_TH, what_in_));
  RT_TRY(qkv_.forward(scratch_.rows_TH, saved.qkv, d.rows));

  if (scratch_.cached != nullptr) {
    attend_cached(*scratch_.cached, saved);
    return row_cut_forward(o_, saved.out, saved.input_RH, output_RH, tp_, scratch_, d, what_out_);
  }
  Real* q = saved.qkv;
  Real* k = q + d.heads * d.head_dim;
  Real* v = k + d.kv_heads * d.head_dim;
  if (scratch_.rotary_table != nullptr) {  // q and k lie side by side: N + K heads in one call
    kernels::rotary(q, scratch_.rotary_table, d.rows, d.tokens, d.heads + d.kv_heads, d.head_dim, d.qkv, false);
  }
  kernels::attention_forward(attention_dims_, q, k, v, saved.out, saved.logsumexp_BNS);

  return row_cut_forward(o_, saved.out, saved.input_RH, output_RH, tp_, scratch_, d, what_out_);
}

template <typename Real>
void Attention<Real>::attend_cached(const CachedRows& rows, const SavedAttention<Real>& saved) const {
  const StageDims& d = dims_;
  const KvCache& cache = *rows.cache;
  const int64_t k_at = d.heads * d.head_dim, v_at = k_at + cache.row_elems;
  for (int64_t r = 0; r < d.rows; ++r) {
    const int64_t position = rows.position[r];
    if (position < 0) continue;
    Real* qkv = saved.qkv + r * d.qkv;
    if (scratch_.rotary_table != nullptr) {
      kernels::rotary(qkv, scratch_.rotary_table + position * d.head_dim, 1, 1, d.heads + d.kv_heads, d.head_dim, d.qkv,
                      false);
    }
    const int64_t at = position * cache.row_elems;
    std::copy_n(qkv + k_at, cache.row_elems, cache.keys<Real>(layer_, rows.sequence[r]) + at);
    std::copy_n(qkv + v_at, cache.row_elems, cache.values<Real>(layer_, rows.sequence[r]) + at);
  }
  if (rows.from_start) {
    kernels::attention_forward(attention_dims_, saved.qkv, saved.qkv + k_at, saved.qkv + v_at, saved.out,
                               saved.logsumexp_BNS);
    return;
  }
  kernels::AttentionDims one = attention_dims_;
  one.batch = 1;
  for (int64_t r = 0; r < d.rows; ++r) {
    Real* out = saved.out + r * k_at;
    if (rows.position[r] < 0) {
      std::fill_n(out, k_at, Real{});
      continue;
    }
    kernels::attention_decode(one, rows.position[r], cache.capacity, saved.qkv + r * d.qkv,
                              cache.keys<Real>(layer_, rows.sequence[r]), cache.values<Real>(layer_, rows.sequence[r]),
                              out);
  }
}

template <typename Real>
Status Attention<Real>::backward(const SavedAttention<Real>& saved) const {
  const StageDims& d = dims_;
  Real* dout = scratch_.hidden;  // [T, N D]
  const Real* dy_TH = nullptr;
  RT_TRY(row_cut_gather(o_, &dy_TH, tp_, scratch_, d, what_dout_));
  RT_TRY(o_.backward_weight(dy_TH, d.width, saved.out, d.rows));
  RT_TRY(o_.backward_input(dy_TH, d.width, dout, false, d.rows));

  const int64_t k_at = d.heads * d.head_dim, v_at = k_at + d.kv_heads * d.head_dim;
  Real* dqkv = scratch_.dhidden;
  kernels::attention_backward(attention_dims_, saved.qkv, saved.qkv + k_at, saved.qkv + v_at, saved.out,
                              saved.logsumexp_BNS, dout, dqkv, dqkv + k_at, dqkv + v_at, scratch_.attention);
  if (scratch_.rotary_table != nullptr) {
    kernels::rotary(dqkv, scratch_.rotary_table, d.rows, d.tokens, d.heads + d.kv_heads, d.head_dim, d.qkv, true);
  }
  return column_cut_backward(norm_, qkv_, saved.input_RH, dqkv, tp_, scratch_, d, what_in_, what_din_);
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace cairn::nn
