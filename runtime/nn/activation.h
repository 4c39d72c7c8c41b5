#pragma once
// The activation between the projections of an MLP or an expert.

#include <cstdint>

#include "runtime/config/recipe.h"

namespace cairn::nn {

/// hidden [rows, F] from pre [rows, F_in]: gate, then up, where the activation has a gate.
template <typename Real>
void activate(Activation activation, const Real* pre, Real* hidden, int64_t rows, int64_t ffn);
/// dpre [rows, F_in].
template <typename Real>
void activate_backward(Activation activation, const Real* dhidden, const Real* pre, Real* dpre, int64_t rows,
                       int64_t ffn);
/// Both, of an activation without a gate: dhidden becomes dpre.
template <typename Real>
void activate_both(Activation activation, const Real* pre, Real* dhidden, Real* hidden, int64_t count);

}  // namespace cairn::nn
