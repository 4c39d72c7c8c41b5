#include "runtime/nn/activation.h"

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"

namespace cairn::nn {
namespace {

kernels::Gate gate_of(Activation activation) {
  switch (activation) {
    case Activation::kGeGlu:
      return kernels::Gate::kGeluErf;
    case Activation::kGeGluTanh:
      return kernels::Gate::kGeluTanh;
    case Activation::kReGlu:
      return kernels::Gate::kRelu;
    case Activation::kQuickGeGlu:
      return kernels::Gate::kGeluQuick;
    case Activation::kReGlu2:
      return kernels::Gate::kRelu2;
    default:
      return kernels::Gate::kSilu;
  }
}

}  // namespace

template <typename Real>
void activate(const kernels::Exec<Real>& on, const ModelActivation& activation,
              DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> hidden,
              int64_t rows, int64_t ffn) {
  const int64_t count = rows * ffn;
  switch (activation.kind) {
    case Activation::kGeluTanh:
      return on.gelu_tanh_forward(pre, hidden, count);
    case Activation::kGeluErf:
      return on.gelu_erf_forward(pre, hidden, count);
    case Activation::kRelu:
      return on.relu_forward(pre, hidden, count);
    case Activation::kGeluQuick:
      return on.gelu_quick_forward(pre, hidden, count);
    case Activation::kRelu2:
      return on.relu2_forward(pre, hidden, count);
    case Activation::kSilu:
      return on.silu_forward(pre, hidden, count);
    case Activation::kSwiGlu:
    case Activation::kGeGlu:
    case Activation::kGeGluTanh:
    case Activation::kReGlu:
    case Activation::kQuickGeGlu:
    case Activation::kReGlu2:
      return on.gated_forward(gate_of(activation.kind), pre, hidden, rows, ffn);
    case Activation::kSwiGluClamp:
      return on.clamped_gate_forward(activation.clamped, pre, hidden, rows, ffn);
  }
}

template <typename Real>
void activate_backward(const kernels::Exec<Real>& on, const ModelActivation& activation,
                       DevicePtr<const std::type_identity_t<Real>> dhidden,
                       DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> dpre,
                       int64_t rows, int64_t ffn) {
  const int64_t count = rows * ffn;
  switch (activation.kind) {
    case Activation::kGeluTanh:
      return on.gelu_tanh_backward(dhidden, pre, dpre, count);
    case Activation::kGeluErf:
      return on.gelu_erf_backward(dhidden, pre, dpre, count);
    case Activation::kRelu:
      return on.relu_backward(dhidden, pre, dpre, count);
    case Activation::kGeluQuick:
      return on.gelu_quick_backward(dhidden, pre, dpre, count);
    case Activation::kRelu2:
      return on.relu2_backward(dhidden, pre, dpre, count);
    case Activation::kSilu:
      return on.silu_backward(dhidden, pre, dpre, count);
    case Activation::kSwiGlu:
    case Activation::kGeGlu:
    case Activation::kGeGluTanh:
    case Activation::kReGlu:
    case Activation::kQuickGeGlu:
    case Activation::kReGlu2:
      return on.gated_backward(gate_of(activation.kind), dhidden, pre, dpre, rows, ffn);
    case Activation::kSwiGluClamp:
      return on.clamped_gate_backward(activation.clamped, dhidden, pre, dpre, rows, ffn);
  }
}

template <typename Real>
void activate_both(const kernels::Exec<Real>& on, const ModelActivation& activation,
                   DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> dhidden,
                   DevicePtr<std::type_identity_t<Real>> hidden, int64_t count) {
  switch (activation.kind) {
    case Activation::kGeluTanh:
      return on.gelu_tanh_both(pre, dhidden, hidden, count);
    case Activation::kGeluErf:
      return on.gelu_erf_both(pre, dhidden, hidden, count);
    case Activation::kRelu:
      return on.relu_both(pre, dhidden, hidden, count);
    case Activation::kGeluQuick:
      return on.gelu_quick_both(pre, dhidden, hidden, count);
    case Activation::kRelu2:
      return on.relu2_both(pre, dhidden, hidden, count);
    case Activation::kSilu:
      return on.silu_both(pre, dhidden, hidden, count);
    default:
      RT_CHECK(false, "an activation with a gate");
  }
}

#define RT_INSTANTIATE(T)                                                                                           \
  template void activate<T>(const kernels::Exec<T>&, const ModelActivation&, DevicePtr<const T>, DevicePtr<T>,      \
                            int64_t, int64_t);                                                                      \
  template void activate_backward<T>(const kernels::Exec<T>&, const ModelActivation&, DevicePtr<const T>,           \
                                     DevicePtr<const T>, DevicePtr<T>, int64_t, int64_t);                           \
  template void activate_both<T>(const kernels::Exec<T>&, const ModelActivation&, DevicePtr<const T>, DevicePtr<T>, \
                                 DevicePtr<T>, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::nn
