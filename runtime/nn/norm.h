#pragma once
// LayerNorm or RMSNorm, as the model says.

#include <string>

#include "runtime/config/model.h"
#include "runtime/nn/parameters.h"
#include "runtime/nn/tree_sum.h"

namespace cairn::nn {

/// Row statistics [R]: kept with the output, or scratch where backward computes both again. `mean` is null with
/// RMSNorm. `parts`: of the rows, for the gradients of weight and bias.
struct NormStats {
  DevicePtr<float> mean;
  DevicePtr<float> rstd;
  TreeParts parts;
};

/// What the model's norm weights count from.
inline float norm_offset(const ModelConfig& model) { return model.norm_plus_one ? 1.0f : 0.0f; }

template <typename Real>
class Norm {
 public:
  /// `name` as in "layers.3.attn_norm".
  Norm(const Parameters<Real>& parameters, const std::string& name, const ModelConfig& model);

  void forward(DevicePtr<const Real> x_RH, DevicePtr<Real> y_RH, const NormStats& stats, int64_t rows) const;
  /// With the statistics of forward(x). dx is overwritten, or with `adds` added to, as gradients are.
  void backward(DevicePtr<const Real> dy_RH, DevicePtr<const Real> x_RH, const NormStats& stats, DevicePtr<Real> dx_RH,
                int64_t rows, bool adds = false) const;

 private:
  const kernels::Exec<Real>* on_;
  Parameter<Real> weight_, bias_;
  NormKind kind_;
  int64_t width_;
  float eps_, offset_;  // offset: what weights count from
};

}  // namespace cairn::nn
