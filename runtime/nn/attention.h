#pragma once
// The attention half of a block: norm, q k v, rotary, causal attention, output projection.

#include <string>

#include "runtime/kernels/attention.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedAttention {
  Real* input_RH = nullptr;  // the residual stream
  Real* qkv = nullptr;       // [T, (N + 2 K) D] after rotary
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
  /// scratch.dresidual: from the gradient of the output to that of the input. Gradients are added to.
  Status backward(const SavedAttention<Real>& saved) const;

 private:
  /// The same for rows that follow what a cache holds.
  void attend_cached(const CachedRows& rows, const SavedAttention<Real>& saved) const;

  StageDims dims_;
  int64_t layer_ = 0;
  kernels::AttentionDims attention_dims_;
  Norm<Real> norm_;
  ColumnGroup<Real> qkv_;
  Linear<Real> o_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
  std::string what_in_, what_out_, what_dout_, what_din_;  // names of the collectives
};

}  // namespace cairn::nn
