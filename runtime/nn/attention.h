#pragma once
// The attention half of a block: norm, q k v, rotary, causal attention, output projection.

#include <string>

#include "runtime/kernels/attention.h"
#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedAttention {
  Real* input_RH = nullptr;  // the residual stream
  Real* qkv = nullptr;       // [T, (N + 2 K) D] after rotary; between the halves of a backward, their gradients
  Real* out = nullptr;       // [T, N D]
  float* logsumexp_BNS = nullptr;
};

template <typename Real>
class Attention {
 public:
  Attention(const Parameters<Real>& parameters, const ModelConfig& model, const StageDims& dims, int64_t layer,
            const TensorParallel<Real>& tp, const Scratch<Real>& scratch);

  /// output [R, H] = input + attention(norm(input)).
  Status forward(const SavedAttention<Real>& saved, Real* output_RH) const;
  /// `out` and `logsumexp` again, from q, k and v.
  void recompute_core(const SavedAttention<Real>& saved) const;

  /// scratch.dresidual: from the gradient of the output to that of the input. Gradients are added to, those of the
  /// projections only when `late_dout_RH` is null: else it and `saved.qkv` keep for backward_weight() what it needs.
  Status backward(const SavedAttention<Real>& saved, Real* late_dout_RH) const;
  Status backward_weight(const SavedAttention<Real>& saved, const Real* late_dout_RH) const;

 private:
  /// With the masks of the micro-batch at work.
  kernels::AttentionDims attention_dims() const;

  StageDims dims_;
  kernels::AttentionDims attention_dims_;
  Norm<Real> norm_;
  ColumnGroup<Real> qkv_;
  Linear<Real> o_;
  Dropout<Real> probabilities_dropout_, output_dropout_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  std::string what_in_, what_out_, what_dout_, what_din_;  // names of the collectives
};

}  // namespace cairn::nn
