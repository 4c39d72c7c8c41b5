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
  const auto backward_rows = [&](int64_t row, int64_t count, float* dweight, float* dbias) {
    const Real *dy = dy_RH + row * width_, *x = x_RH + row * width_;
    Real* dx = dx_RH + row * width_;
    if (kind_ == NormKind::kLayerNorm) {
      kernels::layer_norm_backward(dy, x, weight_.weight, stats.mean + row, stats.rstd + row, dx, dweight, dbias, count,
                                   width_);
    } else {
      kernels::rms_norm_backward(dy, x, weight_.weight, stats.rstd + row, dx, dweight, count, width_);
    }
  };
  if (stats.parts.sums == nullptr) return backward_rows(0, rows, weight_.grad, bias_.grad);
  const float* const sums = tree_rows(stats.parts, 2 * width_, rows, [&](int64_t row, int64_t count, float* sum) {
    backward_rows(row, count, sum, bias_ ? sum + width_ : nullptr);
  });
  kernels::add_to(weight_.grad, sums, width_);
  if (bias_) kernels::add_to(bias_.grad, sums + width_, width_);
}

template class Norm<float>;
template class Norm<bf16>;
template class Norm<f16>;

}  // namespace cairn::nn
