#include "runtime/data/order.h"

#include <algorithm>
#include <array>
#include <bit>

#include "runtime/core/check.h"

namespace cairn::data {

int64_t permute(int64_t n, uint64_t key, int64_t i) {
  RT_CHECK(i >= 0 && (i < n || i == 0) && n < (int64_t{1} << 62), "sample {} of {}", i, n);
  if (n < 2) return 0;
  const int half_bits = (std::bit_width(static_cast<uint64_t>(n - 1)) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  std::array<uint64_t, 8> round_keys;  // mixed, not counted: a plain key + j as round key is visibly not uniform
  for (uint64_t j = 0; j < round_keys.size(); ++j) round_keys[j] = mix64(key + j * 0x9E3779B97F4A7C15ull);
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half_bits, right = x & mask;
    for (const uint64_t round_key : round_keys) {
      const uint64_t mixed = left ^ (mix64(round_key ^ right) >> (64 - half_bits));
      left = right;
      right = mixed;
    }
    x = (left << half_bits) | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

int64_t blend_next(std::span<const double> weights, std::span<const int64_t> taken, int64_t draws,
                   std::span<const int64_t> left) {
  const double x = std::max(static_cast<double>(draws), 1.0);
  int64_t best = -1;
  double best_shortfall = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0 || (!left.empty() && left[i] == 0)) continue;
    // The product must be rounded before the difference: fused into one instruction on machines that have it, ties
    // would fall differently from machine to machine. volatile forbids the fusion, whatever the compiler's flags.
    const volatile double share = weights[i] * x;
    const double shortfall = share - static_cast<double>(taken[i]);
    if (best < 0 || shortfall > best_shortfall) {
      best = static_cast<int64_t>(i);
      best_shortfall = shortfall;
    }
  }
  return best;
}

}  // namespace cairn::data
