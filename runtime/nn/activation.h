#pragma once
// The activation between the projections of an MLP or an expert.

#include <cstdint>
#include <type_traits>

#include "runtime/config/model.h"
#include "runtime/kernels/ops.h"

namespace cairn::nn {

/// The model's activation and its numbers.
struct ModelActivation {
  explicit ModelActivation(const ModelConfig& model)
      : kind(model.activation),
        clamped{static_cast<float>(model.swiglu_alpha), static_cast<float>(model.swiglu_limit)} {}
  Activation kind;
  kernels::ClampedGate clamped;  // of kSwiGluClamp
};

/// hidden [rows, F] from pre [rows, F_in]: gate, then up, where the activation has a gate.
template <typename Real>
void activate(const kernels::Exec<Real>& on, const ModelActivation& activation,
              DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> hidden,
              int64_t rows, int64_t ffn);
/// dpre [rows, F_in].
template <typename Real>
void activate_backward(const kernels::Exec<Real>& on, const ModelActivation& activation,
                       DevicePtr<const std::type_identity_t<Real>> dhidden,
                       DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> dpre,
                       int64_t rows, int64_t ffn);
/// Both, of an activation without a gate: dhidden becomes dpre.
template <typename Real>
void activate_both(const kernels::Exec<Real>& on, const ModelActivation& activation,
                   DevicePtr<const std::type_identity_t<Real>> pre, DevicePtr<std::type_identity_t<Real>> dhidden,
                   DevicePtr<std::type_identity_t<Real>> hidden, int64_t count);

}  // namespace cairn::nn
