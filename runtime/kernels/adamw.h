#pragma once
// AdamW with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2; bias correction as in Kingma & Ba 2015),
// in place or from one copy of the state into another, with checksums of what it writes.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/state_arrays.h"

namespace cairn::kernels {

struct AdamwArgs {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  DevicePtr<const Clip> clip;  // of the step's gradients
  int64_t step = 1;            // 1 for the first update
  /// The three output arrays and a float weight go past the caches: saves reading what is only overwritten, and pays
  /// once the state of all updates is larger than the caches. Same bits. Only where the processor has AVX-512 and the
  /// arrays begin at multiples of 64 bytes; ignored elsewhere.
  bool stream = false;
  bool portable = false;  // tests: the code for processors without AVX-512
};

/// One fused pass over `count` elements: `to` becomes `from` updated by grad * clip.grad_scale; nothing is written
/// where the clip is not finite. `to` is `from` (in place) or does not overlap it. Of `weight` and `weight_low` at most
/// one is given; it receives the new master, as it is or rounded to bf16. `sums`: of master, exp_avg and exp_avg_sq.
void adamw(const AdamwArgs& args, const float* grad, const StateArrays& from, const StateArrays& to, float* weight,
           bf16* weight_low, int64_t count, const BlockSums& sums = {});

/// A run of a tensor's elements, one of several that a call updates. All have the same clip.
struct AdamRun {
  AdamwArgs args;
  DevicePtr<const float> grad;
  StateArrays from, to;
  DType dtype = DType::kF32;  // of the weights: kF32, kBf16 or kF16
  DevicePtr<void> weights;    // receive the new master, rounded; null: none
  int64_t count = 0;
  BlockSums sums;      // of AdamW
  bool counts = true;  // in LAMB's norms
  int64_t tensor = 0;  // whose norms LAMB takes: which of its words
};
/// Runs, and the elements of all.
inline void add_dims(OpDims& to, std::span<const AdamRun> of) {
  int64_t elems = 0;
  for (const AdamRun& run : of) elems += run.count;
  to.add(std::ssize(of));
  to.add(elems);
}
/// Of a run, at most: what a device is given.
inline constexpr int64_t kGivenRunBytes = 192;

/// adamw() of each.
void adamw_of_runs(std::span<const AdamRun> runs);

}  // namespace cairn::kernels
