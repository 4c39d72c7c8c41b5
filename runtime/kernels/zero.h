#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/kernels/parallel.h"

namespace cairn::kernels {

/// x[i] = 0, on the team: one thread alone does not fill the memory's bandwidth.
inline void zero(float* x, int64_t count) {
  parallel_elements(count, [=](int64_t i, int64_t end) { std::fill(x + i, x + end, 0.0f); });
}

}  // namespace cairn::kernels
