#pragma once
// The end of the model: final norm (before the top query layer where the model has one: stage_model.cc), projection to
// the embedding's width E where the model has it, projection onto this rank's part of the vocabulary, and
// cross-entropy. Logits are never gathered: the ranks exchange the maximum, the sum of exponentials and the target's
// logit of each row, [T] floats.
//
// The logits buffer holds all rows when it may (kLogitsBytes): then backward finds the logits of the latest forward
// there. Else, and for an earlier micro-batch, it computes them again, part by part. The heads of modules that predict
// further tokens (mtp.h) have a norm of their own; matrix and buffers are the same.

#include <optional>
#include <span>
#include <string>

#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedHead {
  DevicePtr<Real> input_RH;
  DevicePtr<float> max_T;
  DevicePtr<float> sum_exp_T;
  DevicePtr<float> loss_T;  // lies right behind sum_exp: one all-reduce for both, while it holds the target's logit
};

/// The targets of a micro-batch's rows, and the weight of each row's loss in the gradient; null: 1. [T] each.
struct LossRows {
  DevicePtr<const int32_t> targets_T;
  DevicePtr<const float> weights_T;
};

template <typename Real>
class Head {
 public:
  /// `norm`: as in "final_norm"; `z_loss`: OptimizerConfig::z_loss.
  Head(const Parameters<Real>& parameters, const ModelConfig& model, const std::string& norm, double z_loss,
       const StageDims& dims, const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers);

  Status forward(const SavedHead<Real>& saved, const LossRows& of);
  /// Sets scratch.dresidual to the gradient of the input; the loss of each row has weight `loss_scale` times its own.
  /// `dnormed_RH`: what else the norm's output has for a gradient; null: nothing.
  Status backward(const SavedHead<Real>& saved, const LossRows& of, float loss_scale,
                  DevicePtr<const Real> dnormed_RH = nullptr);
  /// The norm's output, or the input without a norm, into `out_RH`. Leaves the norm's statistics in scratch.stats.
  void norm_rows(const SavedHead<Real>& saved, DevicePtr<Real> out_RH) const;
  /// tp 1: of rows [first, first + count): out [count, vocab], without padding.
  Status logits(const SavedHead<Real>& saved, int64_t first, int64_t count, std::span<float> out);
  /// With `by_backward` each forward() from now on is followed by a backward() of the same rows, which may leave the
  /// losses in place of forward().
  void leave_losses(bool by_backward) { by_backward_ = by_backward; }
  /// What logits() and backward() could reuse is of an earlier pass, or another head's.
  void forget() { held_ = nullptr; }

 private:
  /// scratch.rows [T, E]: what the logits are computed from, all rows. The norm's statistics are left in scratch.stats.
  Status input_rows(const SavedHead<Real>& saved) const;
  /// From the gradient of input_rows(), summed, this rank's rows, to scratch.dresidual.
  void input_gradient(const SavedHead<Real>& saved, DevicePtr<Real> dinput_RE, DevicePtr<const Real> dnormed_also_RH);
  /// From each part's maximum and sum of exponentials those of the whole vocabulary, and the target's logit.
  Status join_parts(const SavedHead<Real>& saved, DevicePtr<float> max_PT, DevicePtr<float> sums_PT) const;
  /// Adds the gradients of the head's matrix and bias from logits' of rows [begin, begin + count); in trees of parts
  /// those of the bias lie apart, and those of a part of all rows go into `sum` [V, E].
  void weight_gradient(DevicePtr<const Real> dlogits, int64_t begin, int64_t count, DevicePtr<float> sum) const;
  /// The loss and its gradient come of one visit of the logits, in backward().
  bool in_one_visit(const LossRows& of) const;
  /// Logits of rows [begin, begin + count) into the buffer; scratch.rows must hold input_rows().
  void compute_logits(int64_t begin, int64_t count) const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  std::optional<Norm<Real>> norm_;
  Linear<Real> project_;     // [E, H], or absent
  Linear<Real> projection_;  // [V, E]
  float logit_scale_, logit_cap_;
  TensorParallel<Real> tp_;  // of rows E wide
  const Scratch<Real>& scratch_;
  DevicePtr<Real> logits_;  // [logit_rows, V]
  // By parts of the vocabulary, P = StageDims::parts. Maxima: null where the rank has all of it in one part; sums: null
  // where no sum is taken in parts.
  DevicePtr<float> local_max_, part_sums_;  // [P, T]
  DevicePtr<float> scale_;                  // [T]
  DevicePtr<float> weight_sums_;  // of parts of the rows (tree_sum.h); null where all logits are there at once
  float z_loss_ = 0;
  bool by_backward_ = false;
  DevicePtr<const Real> held_;  // the input whose logits, all rows, are in the buffer
};

}  // namespace cairn::nn
