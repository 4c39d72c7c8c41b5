#pragma once
// The arrays that an optimizer keeps of weights, whatever its rule.

namespace cairn::kernels {

/// One run of them. Adafactor has no exp_avg_sq, and exp_avg if the recipe averages steps.
struct StateArrays {
  float* master = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  float* ema = nullptr;  // of the masters; null where none is kept. No rule reads it
};

}  // namespace cairn::kernels
