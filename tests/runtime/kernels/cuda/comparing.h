#pragma once
// What a device's kernels give against what the CPU's give.

#include <type_traits>
#include <vector>

#include "tests/runtime/kernels/kernel_testing.h"

namespace cairn::testing {

/// Both are within `tolerance` of the true result.
template <typename T>
void check_alike(const std::vector<T>& got, const std::vector<T>& cpu, Tolerance tolerance) {
  check_close(got, doubles(cpu), tolerance + tolerance);
}

template <typename T>
std::vector<T> filled(int64_t count, float value) {
  std::vector<T> out(static_cast<size_t>(count));
  for (T& x : out) {
    if constexpr (std::is_same_v<T, float>) {
      x = value;
    } else if constexpr (std::is_same_v<T, f16>) {
      x = to_f16(value);
    } else {
      x = to_bf16(value);
    }
  }
  return out;
}

}  // namespace cairn::testing
