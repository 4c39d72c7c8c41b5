#pragma once
// An exponential moving average of weights (Polyak & Juditsky 1992, with geometric weights).

#include <cstdint>

namespace cairn::kernels {

/// to[i] = decay * from[i] + (1 - decay) * weight[i], in one pass. `to` is `from` (in place) or overlaps nothing.
/// Returns word_sums() of `to` as written.
uint64_t ema(double decay, const float* weight, const float* from, float* to, int64_t count);

}  // namespace cairn::kernels
