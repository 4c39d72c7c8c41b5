#include "runtime/nn/activation.h"

#include "runtime/core/check.h"
#include "runtime/core/dtype.h"
#include "runtime/kernels/elementwise.h"

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
void activate(Activation activation, const Real* pre, Real* hidden, int64_t rows, int64_t ffn) {
  const int64_t count = rows * ffn;
  switch (activation) {
    case Activation::kGeluTanh:
      return kernels::gelu_tanh_forward(pre, hidden, count);
    case Activation::kGeluErf:
      return kernels::gelu_erf_forward(pre, hidden, count);
    case Activation::kRelu:
      return kernels::relu_forward(pre, hidden, count);
    case Activation::kGeluQuick:
      return kernels::gelu_quick_forward(pre, hidden, count);
    case Activation::kRelu2:
      return kernels::relu2_forward(pre, hidden, count);
    case Activation::kSilu:
      return kernels::silu_forward(pre, hidden, count);
    case Activation::kSwiGlu:
    case Activation::kGeGlu:
    case Activation::kGeGluTanh:
    case Activation::kReGlu:
    case Activation::kQuickGeGlu:
    case Activation::kReGlu2:
      return kernels::gated_forward(gate_of(activation), pre, hidden, rows, ffn);
  }
}

template <typename Real>
void activate_backward(Activation activation, const Real* dhidden, const Real* pre, Real* dpre, int64_t rows,
                       int64_t ffn) {
  const int64_t count = rows * ffn;
  switch (activation) {
    case Activation::kGeluTanh:
      return kernels::gelu_tanh_backward(dhidden, pre, dpre, count);
    case Activation::kGeluErf:
      return kernels::gelu_erf_backward(dhidden, pre, dpre, count);
    case Activation::kRelu:
      return kernels::relu_backward(dhidden, pre, dpre, count);
    case Activation::kGeluQuick:
      return kernels::gelu_quick_backward(dhidden, pre, dpre, count);
    case Activation::kRelu2:
      return kernels::relu2_backward(dhidden, pre, dpre, count);
    case Activation::kSilu:
      return kernels::silu_backward(dhidden, pre, dpre, count);
    case Activation::kSwiGlu:
    case Activation::kGeGlu:
    case Activation::kGeGluTanh:
    case Activation::kReGlu:
    case Activation::kQuickGeGlu:
    case Activation::kReGlu2:
      return kernels::gated_backward(gate_of(activation), dhidden, pre, dpre, rows, ffn);
  }
}

template <typename Real>
void activate_both(Activation activation, const Real* pre, Real* dhidden, Real* hidden, int64_t count) {
  switch (activation) {
    case Activation::kGeluTanh:
      return kernels::gelu_tanh_both(pre, dhidden, hidden, count);
    case Activation::kGeluErf:
      return kernels::gelu_erf_both(pre, dhidden, hidden, count);
    case Activation::kRelu:
      return kernels::relu_both(pre, dhidden, hidden, count);
    case Activation::kGeluQuick:
      return kernels::gelu_quick_both(pre, dhidden, hidden, count);
    case Activation::kRelu2:
      return kernels::relu2_both(pre, dhidden, hidden, count);
    case Activation::kSilu:
      return kernels::silu_both(pre, dhidden, hidden, count);
    default:
      RT_CHECK(false, "an activation with a gate");
  }
}

#define RT_INSTANTIATE(T)                                                                   \
  template void activate<T>(Activation, const T*, T*, int64_t, int64_t);                    \
  template void activate_backward<T>(Activation, const T*, const T*, T*, int64_t, int64_t); \
  template void activate_both<T>(Activation, const T*, T*, T*, int64_t)
RT_INSTANTIATE(float);
RT_INSTANTIATE(bf16);
RT_INSTANTIATE(f16);
#undef RT_INSTANTIATE

}  // namespace cairn::nn
