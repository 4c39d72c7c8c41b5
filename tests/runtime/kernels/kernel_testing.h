#pragma once
// Inputs, comparisons and thread counts for the kernels' tests.

#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/random.h"
#include "runtime/kernels/state_arrays.h"
#include "tests/support/tolerances.h"

namespace cairn::testing {

/// Standard normal values times `sigma`, rounded to T.
template <typename T>
std::vector<T> normals(std::string_view name, int64_t count, double sigma = 1.0) {
  const uint64_t key = stream_key(1, name);
  std::vector<T> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(sigma) * normal_at(key, static_cast<uint64_t>(i));
    if constexpr (std::is_same_v<T, float>) {
      values[static_cast<size_t>(i)] = x;
    } else if constexpr (std::is_same_v<T, f16>) {
      values[static_cast<size_t>(i)] = to_f16(x);
    } else {
      values[static_cast<size_t>(i)] = to_bf16(x);
    }
  }
  return values;
}

inline void store_nan(float& x) { x = NAN; }
inline void store_nan(bf16& x) { x = to_bf16(NAN); }
inline void store_nan(f16& x) { x = to_f16(NAN); }

template <typename T>
std::vector<double> doubles(const std::vector<T>& values) {
  std::vector<double> out;
  out.reserve(values.size());
  for (const T x : values) out.push_back(static_cast<double>(to_f32(x)));
  return out;
}

/// One check for the whole array, which names the worst element.
template <typename T>
void check_close(const std::vector<T>& got, const std::vector<double>& wanted, Tolerance tolerance) {
  REQUIRE(got.size() == wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = static_cast<double>(to_f32(got[i]));
    if (tolerance.accepts(g, wanted[i])) continue;
    CAPTURE(i);
    CHECK(g == doctest::Approx(wanted[i]).epsilon(0));
    return;
  }
  CHECK(true);
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Runs `body` with a team of `threads`.
template <typename Body>
void with_threads(int threads, const Body& body) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  body();
  omp_set_num_threads(before);
}

/// d(f)/d(x[i]) by a central difference, f in double.
inline double slope(const std::function<double()>& f, double& x) {
  const double at = x;
  x = at + kFiniteDifferenceStep;
  const double above = f();
  x = at - kFiniteDifferenceStep;
  const double below = f();
  x = at;
  return (above - below) / (2 * kFiniteDifferenceStep);
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The gradient of dot(weights, forward(x)) with respect to each element of x, by central differences: what a backward
/// kernel must return for dy = weights.
inline std::vector<double> numeric_gradient(std::vector<double>& x, const std::vector<double>& weights,
                                            const std::function<std::vector<double>()>& forward) {
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) gradient[i] = slope([&] { return dot(weights, forward()); }, x[i]);
  return gradient;
}

inline kernels::StateArrays state_at(float* master, float* exp_avg, float* exp_avg_sq) {
  return {DevicePtr(master), DevicePtr(exp_avg), DevicePtr(exp_avg_sq), nullptr};
}

inline Tolerance operator+(Tolerance a, Tolerance b) { return {a.relative + b.relative, a.absolute + b.absolute}; }

}  // namespace cairn::testing
