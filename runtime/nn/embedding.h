#pragma once
// Token embedding, its vocabulary cut over tp, and learned positions.

#include "runtime/nn/dropout.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

template <typename Real>
class Embedding {
 public:
  /// `gradient_part`: OptimizerConfig::embedding_gradient.
  Embedding(const Parameters<Real>& parameters, const ModelConfig& model, double gradient_part, const StageDims& dims, const TensorParallel<Real>& tp,
            const Scratch<Real>& scratch);

  Status forward(const int32_t* tokens_T, Real* output_RH) const;
  /// Adds to the gradients from scratch.dresidual, which is of no use afterwards.
  Status backward(const int32_t* tokens_T) const;

 private:
  StageDims dims_;
  Parameter<Real> tokens_;     // [V, H]
  Parameter<Real> positions_;  // [S, H], or absent
  Dropout<Real> dropout_;
  float gradient_part_;
  const TensorParallel<Real>& tp_;
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
