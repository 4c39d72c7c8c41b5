#include "runtime/nn/norm.h"

namespace cairn::nn {

template <typename Real>
Norm<Real>::Norm(const Parameters<Real>& parameters, const std::string& name, const ModelConfig& model)
    : on_(&parameters.on()),
      weight_(model.norm_weight ? parameters.get(name + ".weight") : Parameter<Real>()),
      bias_(parameters.get_optional(name + ".bias")),
      kind_(model.norm),
      width_(model.width),
      eps_(static_cast<float>(model.norm_eps)),
      offset_(norm_offset(model)) {}

template <typename Real>
void Norm<Real>::forward(DevicePtr<const Real> x_RH, DevicePtr<Real> y_RH, const NormStats& stats, int64_t rows) const {
  const kernels::NormRows of{rows, width_, eps_, offset_};
  if (kind_ == NormKind::kLayerNorm) {
    on_->layer_norm_forward(of, x_RH, weight_.weight, bias_.weight, y_RH, stats.mean, stats.rstd);
  } else {
    on_->rms_norm_forward(of, x_RH, weight_.weight, y_RH, stats.rstd);
  }
}

template <typename Real>
void Norm<Real>::backward(DevicePtr<const Real> dy_RH, DevicePtr<const Real> x_RH, const NormStats& stats,
                          DevicePtr<Real> dx_RH, int64_t rows, bool adds) const {
  const kernels::NormRows of{rows, width_, eps_, offset_, adds};
  const kernels::NormGradients to{weight_.grad, bias_.grad, stats.parts};
  if (kind_ == NormKind::kLayerNorm) {
    on_->layer_norm_backward(of, dy_RH, x_RH, weight_.weight, stats.mean, stats.rstd, dx_RH, to);
  } else {
    on_->rms_norm_backward(of, dy_RH, x_RH, weight_.weight, stats.rstd, dx_RH, to);
  }
}

template class Norm<float>;
template class Norm<bf16>;
template class Norm<f16>;

}  // namespace cairn::nn
