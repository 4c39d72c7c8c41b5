#pragma once
// Counter-based random numbers: a value is a pure function of (key, index), so it does not depend on rank, layout or
// order of evaluation. Used for initialisation (key = seed and tensor name, index = global element) and for the data
// order. The mixing function is SplitMix64's finaliser; test vectors in tests/runtime/core/random_test.cc.

#include <cstdint>
#include <string_view>

namespace cairn {

constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// Key of a named stream under a seed (FNV-1a of the name, mixed).
uint64_t stream_key(uint64_t seed, std::string_view name);

/// Uniform in [0, 1), 53 bits.
double uniform_at(uint64_t key, uint64_t index);

/// Standard normal by Box-Muller from two uniforms of the same index.
float normal_at(uint64_t key, uint64_t index);

}  // namespace cairn
