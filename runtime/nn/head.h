#pragma once
// The end of the model: final norm, projection onto this rank's part of the vocabulary, cross-entropy. Logits are never
// gathered: the ranks exchange the maximum, the sum of exponentials and the target's logit of each row, [T] floats.
//
// The logits buffer holds all rows when it may (kLogitsBytes): then backward finds the logits of the latest forward
// there. Else, and for an earlier micro-batch, it computes them again, part by part.

#include <span>

#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedHead {
  Real* input_RH = nullptr;
  float* max_T = nullptr;
  float* sum_exp_T = nullptr;
  float* loss_T = nullptr;  // lies right behind sum_exp: one all-reduce for both, while it holds the target's logit
};

template <typename Real>
class Head {
 public:
  Head(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims,
       const TensorParallel<Real>& tp, const Scratch<Real>& scratch, const Buffers& buffers);

  Status forward(const SavedHead<Real>& saved, const int32_t* targets_T);
  /// Sets scratch.dresidual to the gradient of the input; the loss of each row has weight `loss_scale`.
  Status backward(const SavedHead<Real>& saved, const int32_t* targets_T, float loss_scale);
  /// tp 1: of rows [first, first + count): out [count, vocab], without padding.
  Status logits(const SavedHead<Real>& saved, int64_t first, int64_t count, std::span<float> out);
  /// What logits() could reuse is of an earlier pass.
  void forget() { held_ = nullptr; }

 private:
  /// scratch.rows: the norm's output, all rows.
  Status normed_rows(const SavedHead<Real>& saved) const;
  /// Logits of rows [begin, begin + count) into the buffer; scratch.rows must hold normed_rows().
  Status compute_logits(int64_t begin, int64_t count) const;

  StageDims dims_;
  Norm<Real> norm_;
  Linear<Real> projection_;  // [V, H]
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  Real* logits_ = nullptr;      // [logit_rows, V]
  float* local_max_ = nullptr;  // [T]; null with tp 1
  float* scale_ = nullptr;      // [T]
  const Real* held_ = nullptr;  // the input whose logits, all rows, are in the buffer
};

}  // namespace cairn::nn
