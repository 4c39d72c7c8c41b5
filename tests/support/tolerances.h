#pragma once
// The one table of tolerances, by dtype and by what is compared. |got - wanted| <= relative * |wanted| + absolute, with
// `wanted` from a naive reference in double on the same (already rounded) inputs of magnitude about 1.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "runtime/core/dtype.h"

namespace cairn::testing {

struct Tolerance {
  double relative = 0;
  double absolute = 0;
  bool accepts(double got, double wanted) const {
    return std::abs(got - wanted) <= relative * std::abs(wanted) + absolute;
  }
};

constexpr double kF32Unit = 0x1p-24;  // half the distance between 1 and the next float: one rounding to nearest
constexpr double kBf16Unit = 0x1p-8;  // the same for bf16
constexpr double kF16Unit = 0x1p-11;  // and for f16

template <typename T>
constexpr double rounding_unit() {
  return sizeof(T) == 4 ? kF32Unit : std::is_same_v<T, f16> ? kF16Unit : kBf16Unit;
}

/// f16 has few exponents: below 2^-14 its numbers are this far apart at most, halved by rounding to the nearest.
template <typename T>
constexpr double smallest_step() {
  return std::is_same_v<T, f16> ? 0x1p-25 : 0;
}

/// An element-wise map: a few float operations, then one rounding to T. The absolute part covers results near zero that
/// are differences of numbers near 1 (1 - tail of GELU, sigmoid's slope).
template <typename T>
constexpr Tolerance pointwise() {
  return {.relative = 16 * kF32Unit + rounding_unit<T>() * 1.01, .absolute = 8 * kF32Unit + smallest_step<T>()};
}

/// A float sum of `terms` products of magnitude 1, then one rounding to T. After j terms the partial sum is about
/// sqrt(j), so its rounding is about unit * sqrt(j), and those of a chain of n add up (at random) to about
/// unit * n / 2; six times that never fails by chance.
template <typename T>
constexpr Tolerance sum_of(int64_t terms) {
  return {.relative = 8 * kF32Unit + rounding_unit<T>() * 1.01,
          .absolute = 3 * kF32Unit * static_cast<double>(terms + 8) + smallest_step<T>()};
}

/// Chains of sums (attention, norm backward): each link feeds its error to the next; 8 links at most.
template <typename T>
constexpr Tolerance chain_of_sums(int64_t terms) {
  const Tolerance one = sum_of<T>(terms);
  return {.relative = 4 * one.relative, .absolute = 8 * one.absolute};
}

/// Attention, whose products in bf16 round the probabilities, which sum to 1, before they meet values of magnitude 1:
/// twice that for the largest values. Its gradients come from rounded probabilities, rounded gradients of scores, and
/// delta, which comes from the rounded output.
template <typename T>
constexpr Tolerance attention_sums(int64_t terms) {
  const Tolerance chain = chain_of_sums<T>(terms);
  return {.relative = chain.relative, .absolute = chain.absolute + 2 * rounding_unit<T>()};
}
template <typename T>
constexpr Tolerance attention_gradients(int64_t terms) {
  const Tolerance chain = chain_of_sums<T>(terms);
  return {.relative = chain.relative, .absolute = chain.absolute + 6 * rounding_unit<T>()};
}

/// A central difference with step h of a function in double with third derivative about 10: h^2 * 10 / 6, and
/// the rounding of double divided by h. With h = 1e-4: 2e-8 and 1e-11; the rest is margin for larger derivatives.
constexpr Tolerance kFiniteDifference{.relative = 1e-5, .absolute = 1e-6};
constexpr double kFiniteDifferenceStep = 1e-4;

}  // namespace cairn::testing
