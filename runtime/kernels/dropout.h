#pragma once
// Dropout from counter-based random numbers: whether an element is dropped is a pure function of a key and its place,
// so no mask is stored, backward and recomputation draw the same one, and no layout changes it.
//
// Keys. A sample's key stands for (seed, sample of the run); mixed with a site (layer and place within it) and a row
// (token; or query head and query) it is the key of a row, whose elements are numbered from 0. An element is dropped
// when a 32-bit hash of row key and number is below rate * 2^32; the others are multiplied by 1 / (1 - rate).

#include <cstdint>

#include "runtime/core/random.h"
#include "runtime/core/token_runs.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"

namespace cairn::kernels {

struct DropoutRate {
  uint32_t threshold = 0;  // 0: nothing is dropped
  float keep_scale = 1;

  /// `rate` in [0, 1).
  static DropoutRate of(double rate);
  explicit operator bool() const { return threshold != 0; }
};

/// Where masks are drawn: a layer of the model and a place in it.
constexpr uint64_t dropout_site(int64_t layer, uint64_t place) { return static_cast<uint64_t>(layer + 1) << 8 | place; }

constexpr uint64_t dropout_row_key(uint64_t sample_key, uint64_t site, uint64_t row) {
  return mix64(mix64(sample_key ^ mix64(site)) + row);
}

/// A 32-bit finaliser (multiply, xor-shift) with a half of the key before each half of its rounds.
[[gnu::always_inline]] constexpr uint32_t dropout_hash(uint32_t low, uint32_t high, uint32_t element) {
  uint32_t x = element * 0x9E3779B9u + low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  x = (x ^ (x >> 16)) + high;
  x = (x ^ (x >> 17)) * 0xED5AD4BBu;
  x = (x ^ (x >> 11)) * 0xAC4C1B51u;
  return x ^ (x >> 15);
}

/// factors[i] = 0 or keep_scale for elements [first, first + n) of the row.
void dropout_factors(uint64_t row_key, int64_t first, int64_t n, DropoutRate rate, float* factors);

/// Rows [first_row, first_row + rows) of a micro-batch, which stand where `tokens` says.
struct DropoutRows {
  int64_t rows = 0, width = 0, first_row = 0;
  TokenRuns tokens;
  int64_t samples = 1;
  DevicePtr<const uint64_t> sample_keys;  // [samples]
  uint64_t site = 0;
  DropoutRate rate;
};
inline void add_dims(OpDims& to, const DropoutRows& of) {
  to.add(of.rows);
  to.add(of.width);
}
/// out[r, c] = x[r, c] * factor. out may be x. The backward pass is the same map.
template <typename T>
void dropout(const DropoutRows& of, const T* x, T* out);

}  // namespace cairn::kernels
