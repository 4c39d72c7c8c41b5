#include "runtime/nn/norm.h"

namespace cairn::nn {

template <typename Real>
Norm<Real>::Norm(const Parameters<Real>& parameters, const std::string& name, const ModelConfig& model)
    : on_(&parameters.on()),
      weight_(parameters.get(name + ".weight")),
      bias_(parameters.get_optional(name + ".bias")),
      kind_(model.norm),
      width_(model.width),
      eps_(static_cast<float>(model.norm_eps)) {}

template <typename Real>
void Norm<Real>::forward(DevicePtr<const Real> x_RH, DevicePtr<Real> y_RH, const NormStats& stats, int64_t rows) const {
  if (kind_ == NormKind::kLayerNorm) {
    on_->layer_norm_forward(x_RH, weight_.weight, bias_.weight, y_RH, stats.mean, stats.rstd, rows, width_, eps_);
  } else {
    on_->rms_norm_forward(x_RH, weight_.weight, y_RH, stats.rstd, rows, width_, eps_);
  }
}

template <typename Real>
void Norm<Real>::backward(DevicePtr<const Real> dy_RH, DevicePtr<const Real> x_RH, const NormStats& stats,
                          DevicePtr<Real> dx_RH, int64_t rows) const {
  if (kind_ == NormKind::kLayerNorm) {
    on_->layer_norm_backward(dy_RH, x_RH, weight_.weight, stats.mean, stats.rstd, dx_RH, weight_.grad, bias_.grad, rows,
                             width_, stats.parts);
  } else {
    on_->rms_norm_backward(dy_RH, x_RH, weight_.weight, stats.rstd, dx_RH, weight_.grad, rows, width_, stats.parts);
  }
}

template class Norm<float>;
template class Norm<bf16>;
template class Norm<f16>;

}  // namespace cairn::nn
