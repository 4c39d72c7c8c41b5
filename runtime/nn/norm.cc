#include "runtime/nn/norm.h"

#include "runtime/kernels/norm.h"

namespace cairn::nn {

template <typename Real>
Norm<Real>::Norm(const Parameters<Real>& parameters, const std::string& name, const ModelConfig& model)
    : weight_(parameters.get(name + ".weight")),
      bias_(parameters.get_optional(name + ".bias")),
      kind_(model.norm),
      width_(model.width),
      eps_(static_cast<float>(model.norm_eps)) {}

template <typename Real>
void Norm<Real>::forward(const Real* x_RH, Real* y_RH, const NormStats& stats, int64_t rows) const {
  if (kind_ == NormKind::kLayerNorm) {
    kernels::layer_norm_forward(x_RH, weight_.weight, bias_.weight, y_RH, stats.mean, stats.rstd, rows, width_, eps_);
  } else {
    kernels::rms_norm_forward(x_RH, weight_.weight, y_RH, stats.rstd, rows, width_, eps_);
  }
}

template <typename Real>
void Norm<Real>::backward(const Real* dy_RH, const Real* x_RH, const NormStats& stats, Real* dx_RH,
                          int64_t rows) const {
  if (kind_ == NormKind::kLayerNorm) {
    kernels::layer_norm_backward(dy_RH, x_RH, weight_.weight, stats.mean, stats.rstd, dx_RH, weight_.grad, bias_.grad,
                                 rows, width_, stats.parts);
  } else {
    kernels::rms_norm_backward(dy_RH, x_RH, weight_.weight, stats.rstd, dx_RH, weight_.grad, rows, width_, stats.parts);
  }
}

template class Norm<float>;
template class Norm<bf16>;
template class Norm<f16>;

}  // namespace cairn::nn
