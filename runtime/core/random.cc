#include "runtime/core/random.h"

#include <cmath>
#include <numbers>

namespace cairn {

uint64_t stream_key(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return mix64(mix64(seed) ^ hash);
}

double uniform_at(uint64_t key, uint64_t index) {
  return static_cast<double>(mix64(mix64(key ^ 0x5851F42D4C957F2Dull) + index * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
}

float normal_at(uint64_t key, uint64_t index) {
  const double u1 = 1.0 - uniform_at(key, 2 * index);  // (0, 1]: the logarithm stays finite
  const double u2 = uniform_at(key, 2 * index + 1);
  return static_cast<float>(std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2));
}

}  // namespace cairn
