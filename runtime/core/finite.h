#pragma once
// Whether floats are numbers.

#include <bit>
#include <cstdint>
#include <span>

namespace cairn {

/// How many are NaN or infinite. At the speed of memory: integers alone, which compilers take in wide registers.
inline int64_t count_not_finite(std::span<const float> values) {
  int64_t count = 0;
  constexpr size_t kBlock = 4096;  // counted in 32 bits, as wide as what is compared
  for (size_t from = 0; from < values.size(); from += kBlock) {
    const size_t to = from + kBlock < values.size() ? from + kBlock : values.size();
    uint32_t here = 0;
    for (size_t i = from; i < to; ++i)
      here += (std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu) >= 0x7f800000u ? 1u : 0u;
    count += here;
  }
  return count;
}

}  // namespace cairn
