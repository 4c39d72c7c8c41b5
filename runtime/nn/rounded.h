#pragma once
// A factor as transformers multiplies with it.

#include <type_traits>

#include "runtime/core/dtype.h"

namespace cairn::nn {

/// `x` in the run's precision.
template <typename Real>
float rounded(double x) {
  const auto out = static_cast<float>(x);
  if constexpr (std::is_same_v<Real, bf16>) return to_f32(to_bf16(out));
  if constexpr (std::is_same_v<Real, f16>) return to_f32(to_f16(out));
  return out;
}

}  // namespace cairn::nn
