#pragma once
// An exponential moving average of weights (Polyak & Juditsky 1992, with geometric weights).

#include <cstdint>
#include <span>

#include "runtime/kernels/clip.h"
#include "runtime/kernels/state_arrays.h"

namespace cairn::kernels {

/// to[i] = decay * from[i] + (1 - decay) * weight[i], in one pass. `to` is `from` (in place) or overlaps nothing.
/// `sums`: of `to`.
void ema(double decay, const float* weight, const float* from, float* to, int64_t count, const BlockSums& sums);

/// One of several runs that a call averages.
struct EmaRun {
  DevicePtr<const float> weight, from;
  DevicePtr<float> to;
  int64_t count = 0;
  BlockSums sums;
  DevicePtr<const Clip> clip;  // of the step, the same for all: where it is not finite nothing is written; may be null
};
/// Runs, and the elements of all.
inline void add_dims(OpDims& to, std::span<const EmaRun> of) {
  int64_t elems = 0;
  for (const EmaRun& run : of) elems += run.count;
  to.add(std::ssize(of));
  to.add(elems);
}
/// ema() of each.
void ema_of_runs(double decay, std::span<const EmaRun> runs);

}  // namespace cairn::kernels
