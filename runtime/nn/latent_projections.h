#pragma once
// Queries, keys and values of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): from the norm's
// output to the rows that the attention core reads, and back. Norms of latent vectors are RMSNorms.
//
//   aq = x Wqa, cq = norm(aq), q = cq Wqb        (q_rank 0: q = x Wq)      a head of q: channels that stay, that turn
//   [z | kr] = x Wkva, c = norm(z), kv = c Wkvb                            a head of kv: of a key, of a value
//   k = [kv's | turned kr], the same kr in every head; v is widened with zeros to the width of k
//
// Tensor parallelism cuts Wqb, Wkvb and Wq by heads; Wqa, Wkva and the norms are replicated. With sequence parallelism
// each rank makes the latent vectors of its rows, and these are gathered, which are narrower than x. Their gradients
// are sums over the ranks' heads: the all-reduce, or reduce-scatter, before the norms' backward.
//
// Legend in stage_model.h, and L = q_rank + kv_rank + rope_dim: [cq | c | kr] side by side.

#include <optional>
#include <string>

#include "runtime/nn/linear.h"
#include "runtime/nn/residual.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"
#include "runtime/nn/turning.h"

namespace cairn::nn {

/// What one micro-batch leaves of it.
template <typename Real>
struct SavedLatents {
  DevicePtr<Real> before_RL;     // norms and rotary
  DevicePtr<Real> late_dout_RL;  // of a split backward: gradients of the above
};

template <typename Real>
class LatentProjections {
 public:
  LatentProjections(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
                    const Turning<Real>& turning, const Residual<Real>& residual, const TensorParallel<Real>& tp,
                    const Scratch<Real>& scratch);

  /// qkv [T, QKV] from the branch's input [R, H]. scratch.latents keeps the latent vectors of the pass.
  Status forward(const SavedLatents<Real>& saved, DevicePtr<const Real> input_RH, DevicePtr<Real> qkv) const;

  /// The core's output [T, N, D] without the channels that widen values, [T, N, Dv], in `into` where they are not the
  /// same; and the other way, into another buffer, for gradients.
  DevicePtr<const Real> narrow(DevicePtr<const Real> out, DevicePtr<Real> into) const;
  void widen(DevicePtr<const Real> dout, DevicePtr<Real> into) const;

  /// scratch.dresidual: from dqkv [T, QKV] on, which is overwritten, as Attention::backward. With `late` the gradients
  /// of projections are left to backward_weight(), which wants the dqkv that this leaves.
  Status backward(const SavedLatents<Real>& saved, const SavedResidual<Real>& residual, DevicePtr<Real> dqkv,
                  bool late) const;
  Status backward_weight(const SavedLatents<Real>& saved, const SavedResidual<Real>& residual,
                         DevicePtr<Real> dqkv) const;

  /// Generation: the rows' latent vectors go into the cache, [c | turned kr] a token, as forward() has left them.
  void remember(const CachedRows& rows, int64_t layer) const;
  /// out [T, N, Dv] of rows that follow what the cache holds. Keys and values of the past are not expanded: queries are
  /// brought into the space of latent vectors, which are key and value of one head there, and what attention gives out
  /// of it.
  void attend_cached(const CachedRows& rows, int64_t layer, const kernels::AttentionDims& dims, DevicePtr<Real> qkv,
                     DevicePtr<Real> out) const;

 private:
  kernels::LatentHeads heads() const;
  kernels::HeadNorm norm(int64_t width) const;
  /// scratch.latents [T, L] from what was before their norms; kr does not turn.
  Status latents(const SavedLatents<Real>& saved) const;
  /// dkv [T, N, nope + Dv] and, in scratch.dlatents, the gradient of the turned kr.
  DevicePtr<Real> split(DevicePtr<const Real> dqkv) const;
  /// Gradients of the weights that read latent vectors, and of those that read x.
  Status weights(const SavedLatents<Real>& saved, DevicePtr<const Real> dqkv, DevicePtr<const Real> dkv) const;
  Status stream_weights(DevicePtr<const Real> input_RH, DevicePtr<const Real> dbefore_RL,
                        DevicePtr<const Real> dqkv) const;
  DevicePtr<Real> local(DevicePtr<Real> all_TL) const { return latent_tp_.local(all_TL); }
  /// Head `head`'s part of Wkvb: of its key, or of its value.
  DevicePtr<const Real> kv_rows(int64_t head, bool value) const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  int64_t latent_;  // L
  float norm_offset_;
  ColumnGroup<Real> from_stream_;             // Wqa, Wkva
  std::optional<ColumnGroup<Real>> queries_;  // Wq; absent with q_rank
  std::optional<Linear<Real>> q_b_;
  Linear<Real> kv_b_;
  Parameter<Real> q_norm_, kv_norm_;
  Turning<Real> turning_;
  Residual<Real> residual_;
  const TensorParallel<Real>& tp_;
  TensorParallel<Real> latent_tp_;
  const Scratch<Real>& scratch_;
  std::string what_in_, what_latent_, what_dlatent_, what_din_;  // names of the collectives
};

}  // namespace cairn::nn
