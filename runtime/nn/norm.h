#pragma once
// LayerNorm or RMSNorm, as the model says.

#include <string>

#include "runtime/config/recipe.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/tree_sum.h"

namespace cairn::nn {

/// Row statistics [R]: scratch, since backward computes the output again and gets them with it. `mean` is null with
/// RMSNorm. `parts`: of the rows, for the gradients of weight and bias.
struct NormStats {
  float* mean = nullptr;
  float* rstd = nullptr;
  TreeParts parts;
};

template <typename Real>
class Norm {
 public:
  /// `name` as in "layers.3.attn_norm".
  Norm(const Parameters<Real>& parameters, const std::string& name, const ModelConfig& model);

  void forward(const Real* x_RH, Real* y_RH, const NormStats& stats, int64_t rows) const;
  /// With the statistics of forward(x). dx is overwritten, gradients are added to.
  void backward(const Real* dy_RH, const Real* x_RH, const NormStats& stats, Real* dx_RH, int64_t rows) const;

 private:
  Parameter<Real> weight_, bias_;
  NormKind kind_;
  int64_t width_;
  float eps_;
};

}  // namespace cairn::nn
