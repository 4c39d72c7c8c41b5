#pragma once
// Token embedding, its vocabulary cut over tp; then, as the model has them: a projection from its width E to H, learned
// positions, a norm.

#include <optional>

#include "runtime/nn/dropout.h"
#include "runtime/nn/linear.h"
#include "runtime/nn/norm.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/scratch.h"
#include "runtime/nn/tensor_parallel.h"

namespace cairn::nn {

/// What one micro-batch leaves for its backward pass.
template <typename Real>
struct SavedEmbedding {
  DevicePtr<Real> rows_RE;        // null without the projection
  DevicePtr<Real> norm_input_RH;  // null without the norm
};

template <typename Real>
class Embedding {
 public:
  /// `gradient_part`: OptimizerConfig::embedding_gradient.
  Embedding(const Parameters<Real>& parameters, const ModelConfig& model, double gradient_part, const StageDims& dims,
            const TensorParallel<Real>& tp, const Scratch<Real>& scratch);

  Status forward(const SavedEmbedding<Real>& saved, DevicePtr<const int32_t> tokens_T, DevicePtr<Real> output_RH) const;
  /// Adds to the gradients from scratch.dresidual, which is of no use afterwards.
  Status backward(const SavedEmbedding<Real>& saved, DevicePtr<const int32_t> tokens_T) const;

 private:
  /// Of the rows from `first` on.
  kernels::RowPositions positions(int64_t first) const;
  void add_position_gradients(DevicePtr<const Real> dstream, int64_t first, int64_t count) const;

  const kernels::Exec<Real>& on_;
  StageDims dims_;
  int64_t position_offset_;
  Parameter<Real> tokens_;          // [V, E]
  Parameter<Real> positions_;       // [offset + S, H], or absent
  Linear<Real> project_;            // [H, E], or absent
  std::optional<Norm<Real>> norm_;  // or none
  Dropout<Real> dropout_;
  float scale_;          // a number of the compute dtype
  float gradient_part_;  // times the scale
  const TensorParallel<Real>& tp_;
  TensorParallel<Real> rows_tp_;  // of rows E wide
  const Scratch<Real>& scratch_;
};

}  // namespace cairn::nn
