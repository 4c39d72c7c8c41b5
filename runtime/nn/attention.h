#pragma once
// The attention half of a block: norm, q k v, their clip and norms, positions, attention, output projection. In the top
// query layer q comes from positions (position_queries.h), k and v from the norm's output. With model.mla all three
// come from latent vectors (latent_projections.h).

#include <optional>
#include <string>

#include "runtime/nn/context_parallel.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/latent_projections.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/position_queries.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"
#include "runtime/nn/turning.h"

namespace cairn::nn {

/// Of this layer in training; without what lies in memory (masks, slopes, sinks) and dropout.
kernels::AttentionDims attention_dims(const ModelConfig& model, const StageDims& dims, int64_t layer);

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedAttention {
  SavedResidual<Real> residual;
  DevicePtr<Real> qk;   // [T, (N + K) D] before their norms, or [T, (N + 2 K) D] before the clip; null without both
  DevicePtr<Real> qkv;  // [T, (N + 2 K) D] after rotary
  SavedLatents<Real> latents;  // null without model.mla
  DevicePtr<Real> out;         // [T, N D]
  DevicePtr<float> logsumexp_BNS;
};

template <typename Real>
class Attention {
 public:
  /// `layer` model.layers: the top query layer.
  Attention(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
            const TensorParallel<Real>& tp, const ContextParallel<Real>& cp, const Scratch<Real>& scratch);

  /// output [R, H] from the input (residual.h).
  Status forward(const SavedAttention<Real>& saved, DevicePtr<Real> output_RH) const;
  /// `out` and `logsumexp` again, from q, k and v.
  Status recompute_core(const SavedAttention<Real>& saved) const;

  /// scratch.dresidual: from the gradient of the output to that of the input. Gradients are added to, those of the
  /// projections only when `late_dout_RH` is null: else it and `saved.qkv` keep for backward_weight() what it needs.
  Status backward(const SavedAttention<Real>& saved, DevicePtr<Real> late_dout_RH) const;
  Status backward_weight(const SavedAttention<Real>& saved, DevicePtr<const Real> late_dout_RH) const;

 private:
  /// Attention for rows that follow what a cache holds; their keys and values, or latent vectors, go into it. Gives
  /// what the output projection reads.
  DevicePtr<const Real> attend_cached(const CachedRows& rows, const SavedAttention<Real>& saved) const;
  /// q, k and v from the branch's input.
  Status project(const SavedAttention<Real>& saved, DevicePtr<const Real> input_RH) const;
  /// What the output projection reads, [T, N Dv]; `scratch` is where values that were widened become narrow.
  DevicePtr<const Real> core_output(const SavedAttention<Real>& saved, DevicePtr<Real> scratch) const;
  /// q and k lie side by side.
  void turn(DevicePtr<Real> qkv, bool inverse) const {
    turning_.turn(qkv, dims_.heads + dims_.kv_heads, dims_.head_dim, dims_.qkv, inverse);
    turning_.warm(qkv, dims_.heads, dims_.head_dim, dims_.qkv);
  }
  /// This layer's sinks become those at work.
  void use_sinks() const {
    if (sinks_) on_.to_floats(sinks_.weight, scratch_.sinks, dims_.heads);
  }
  /// The clip of `saved.qkv`, or the norms of q and k in it.
  Status prepare_qkv(const SavedAttention<Real>& saved) const;
  kernels::HeadNorm head_norm(int64_t heads) const;
  kernels::WholeNorm whole_norm(bool k) const;
  Status whole_norms(const SavedAttention<Real>& saved) const;
  /// Gradients of q and k, from those after norms and positions to those before.
  Status prepare_qk_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const;
  /// The second half of it: through the norms.
  Status norm_qk_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const;
  Status shared_norms_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const;
  Status whole_norms_backward(const SavedAttention<Real>& saved, DevicePtr<Real> dqkv) const;
  /// Sums [parts, count, T] of this rank become [count, T], those of all tp ranks.
  Status sum_channels(DevicePtr<float> sums, int64_t count) const;
  /// Keys and values that the queries see, of all tokens, and the row stride of both.
  struct KeysValues {
    DevicePtr<const Real> k, v;
    int64_t stride;
  };
  Result<KeysValues> keys_values(const SavedAttention<Real>& saved) const;
  /// With the masks of the micro-batch at work, and the layer's sinks.
  kernels::AttentionDims attention_dims() const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  int64_t layer_ = 0;
  kernels::AttentionDims attention_dims_;
  float clip_, norm_eps_, norm_offset_;
  QkNorm qk_norm_;         // kNone where this layer has none
  int64_t kv_copies_ = 1;  // ranks that hold the same key/value head
  Turning<Real> turning_;
  Residual<Real> residual_;
  std::optional<PositionQueries<Real>> position_queries_;
  std::optional<LatentProjections<Real>> latent_;
  std::optional<ColumnGroup<Real>> from_stream_;  // q, k, v, or k and v where q comes from positions; no latent_
  Parameter<Real> q_norm_, k_norm_;               // absent without qk_norm, and without weights
  Parameter<Real> q_norm_bias_, k_norm_bias_;     // absent without biases
  Parameter<Real> sinks_;                         // [N]; may be absent
  Linear<Real> o_;
  Dropout<Real> probabilities_dropout_, output_dropout_;
  const TensorParallel<Real>& tp_;
  const ContextParallel<Real>& cp_;
  const Scratch<Real>& scratch_;
  std::string what_in_, what_out_, what_dout_, what_din_, what_kv_, what_dkv_, what_qk_norm_,
      what_dqk_norm_;  // names of the collectives
};

}  // namespace cairn::nn
