#pragma once
// How a branch (attention, MLP) hangs on the residual stream: the norm before it, the norm after it, what is added.
//
//   pre_norm, parallel   y = x + f(N x)              parallel: the MLP reads attention's x and adds to attention's y
//   post_norm            y = N(x + f(x))
//   deep_norm            y = a N(x) + f(N x)
//   sandwich             y = x + N'(f(N x))
//   out_norm             y = x + N'(f(x))
//
// With branch_scale what f gives, or N' of it, is multiplied before it is added.

#include <optional>
#include <string>

#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// Of a branch, what its place on the stream leaves for the backward pass.
template <typename Real>
struct SavedResidual {
  DevicePtr<Real> input_RH;  // x; with parallel blocks the same for both branches
  DevicePtr<Real> post_RH;   // what the norm after the branch reads; null without one
  // Where norms are kept, else null (Plan::keeps_norms): N x, floats for its statistics, those of the norm after.
  DevicePtr<Real> normed_RH;
  DevicePtr<float> stats, post_stats;
};

enum class Branch { kAttention, kMlp };

template <typename Real>
class Residual {
 public:
  /// `prefix` as in "layers.3.".
  Residual(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
           const std::string& prefix, Branch branch, const TensorParallel<Real>& tp, const Scratch<Real>& scratch)
      : on_(parameters.on()),
        kind_(model.block),
        defers_(branch == Branch::kMlp && is_parallel(kind_)),
        takes_deferred_(branch == Branch::kAttention && is_parallel(kind_)),
        scale_(static_cast<float>(model.residual_scale)),
        shares_(branch == Branch::kMlp && kind_ == BlockKind::kParallelShared),
        branch_scale_(static_cast<float>(model.branch_scale)),
        count_(dims.local_rows * dims.width),
        rows_(dims.local_rows),
        tp_(tp),
        scratch_(scratch) {
    const bool attention = branch == Branch::kAttention || kind_ == BlockKind::kParallelShared;
    if (kind_ != BlockKind::kOutNorm) {
      const Norm<Real> norm(parameters, prefix + (attention ? "attn_norm" : "mlp_norm"), model);
      (kind_ == BlockKind::kPostNorm ? after_ : before_) = norm;
    }
    if (has_out_norms(kind_)) {
      after_ = Norm<Real>(parameters, prefix + (attention ? "attn_out_norm" : "mlp_out_norm"), model);
    }
  }

  /// The branch's input [R, H] in a forward pass: x, or N x where it is kept, else in scratch.rows.
  DevicePtr<const Real> input(const SavedResidual<Real>& saved) const {
    if (!before_) return saved.input_RH;
    const DevicePtr<Real> rows_RH = normed(saved);
    const bool has_it = shares_ && saved.normed_RH;  // attention has computed it
    if (!has_it) before_->forward(saved.input_RH, rows_RH, stats(saved.stats), rows_);
    return rows_RH;
  }

  /// The same in the backward pass, where nothing is computed that the forward pass has kept. From here on
  /// input_gradient() has its statistics.
  DevicePtr<const Real> input_again(const SavedResidual<Real>& saved) const {
    return before_ && saved.normed_RH ? DevicePtr<const Real>(saved.normed_RH) : input(saved);
  }

  /// Whether add() is base + branch and no more.
  bool adds_alone() const { return !after_ && branch_scale_ == 1.0f && kind_ != BlockKind::kDeepNorm; }

  /// output [R, H] from the branch's output, which is overwritten. input() must have been called, and what it gave must
  /// be there still. `base_RH`: what is added to; output_RH may be base_RH.
  void add(const SavedResidual<Real>& saved, DevicePtr<Real> branch_RH, DevicePtr<const Real> base_RH,
           DevicePtr<Real> output_RH) const {
    if (has_out_norms(kind_)) {
      on_.copy(branch_RH, saved.post_RH, count_);
      after_->forward(saved.post_RH, branch_RH, stats(saved.post_stats), rows_);
    }
    if (branch_scale_ != 1.0f) on_.scale(branch_RH, branch_scale_, count_);
    switch (kind_) {
      case BlockKind::kDeepNorm:
        return on_.add_scaled(branch_RH, scale_, normed(saved), output_RH, count_);
      case BlockKind::kPostNorm:
        on_.add(base_RH, branch_RH, saved.post_RH, count_);
        return after_->forward(saved.post_RH, output_RH, stats(saved.post_stats), rows_);
      default:
        break;
    }
    on_.add(base_RH, branch_RH, output_RH, count_);
  }

  /// The gradient of the branch's output, from scratch.dresidual, that of y: either it or another scratch buffer.
  DevicePtr<Real> branch_gradient(const SavedResidual<Real>& saved) const {
    const DevicePtr<Real> dstream_RH = scratch_.dresidual_RH, dbranch_RH = scratch_.dbranch_RH;
    if (kind_ == BlockKind::kPostNorm) norm_backward(saved, dstream_RH, dstream_RH);
    if (branch_scale_ != 1.0f) {  // the stream itself is not scaled
      on_.copy(dstream_RH, dbranch_RH, count_);
      on_.scale(dbranch_RH, branch_scale_, count_);
    }
    const DevicePtr<Real> dy_RH = branch_scale_ != 1.0f ? dbranch_RH : dstream_RH;
    if (!has_out_norms(kind_)) return dy_RH;
    norm_backward(saved, dy_RH, dbranch_RH);
    return dbranch_RH;
  }

  /// scratch.dresidual becomes the gradient of x, from that of what the branch read, which is overwritten. Behind
  /// input_again(), whose statistics must be there still.
  void input_gradient(const SavedResidual<Real>& saved, DevicePtr<Real> dbranch_input_RH) const {
    if (kind_ == BlockKind::kDeepNorm) {
      on_.add_scaled(dbranch_input_RH, scale_, scratch_.dresidual_RH, dbranch_input_RH, count_);
      before_->backward(dbranch_input_RH, saved.input_RH, stats(saved.stats), scratch_.dresidual_RH, rows_);
      return;
    }
    // Deferred, attention's gradient comes from the same y: the stream takes both after it.
    if (before_) {
      before_->backward(dbranch_input_RH, saved.input_RH, stats(saved.stats),
                        defers_ ? scratch_.dbranch_RH : scratch_.dresidual_RH, rows_, !defers_);
    } else {
      on_.add(scratch_.dresidual_RH, dbranch_input_RH, scratch_.dresidual_RH, count_);
    }
    if (takes_deferred_) on_.add(scratch_.dresidual_RH, scratch_.dbranch_RH, scratch_.dresidual_RH, count_);
  }

 private:
  /// Where N x lies.
  DevicePtr<Real> normed(const SavedResidual<Real>& saved) const {
    return saved.normed_RH ? saved.normed_RH : tp_.local(scratch_.rows_TH);
  }
  /// Kept ones [1 or 2, R], or those in scratch.
  NormStats stats(DevicePtr<float> kept) const {
    NormStats out = scratch_.stats;
    if (!kept) return out;
    out.rstd = kept;
    if (out.mean) out.mean = kept + rows_;
    return out;
  }
  /// Through the norm after the branch.
  void norm_backward(const SavedResidual<Real>& saved, DevicePtr<const Real> dy_RH, DevicePtr<Real> dx_RH) const {
    const NormStats of = stats(saved.post_stats);
    if (!saved.post_stats) after_->forward(saved.post_RH, tp_.local(scratch_.rows_TH), of, rows_);  // for these
    after_->backward(dy_RH, saved.post_RH, of, dx_RH, rows_);
  }

  const kernels::Exec<Real>& on_;
  BlockKind kind_;
  bool defers_, takes_deferred_;
  float scale_;
  bool shares_;  // reads what attention's norm gives
  float branch_scale_;
  int64_t count_, rows_;
  std::optional<Norm<Real>> before_, after_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
