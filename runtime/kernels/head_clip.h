#pragma once
// QK clip's passes (runtime/optim/after/qk_clip.h says what they compute): factors of heads from the largest attention
// scores, and the rows of the query and key projections times them.

#include <cstdint>
#include <span>

#include "runtime/core/dtype.h"
#include "runtime/device/op_dims.h"
#include "runtime/device/pointer.h"
#include "runtime/kernels/clip.h"

namespace cairn::kernels {

struct HeadClip {
  double most = 0;        // of a score
  int64_t group = 1;      // query heads of a key head
  int64_t key_heads = 0;  // of all layers
};
inline void add_dims(OpDims& /*to*/, const HeadClip& /*of*/) {}

/// max_scores and query [key_heads * group], key [key_heads]; clipped [1]: query heads whose scores are to shrink.
void head_factors(const HeadClip& of, const float* max_scores, float* query, float* key, float* clipped);

/// A run of a projection's elements, whose rows are heads.
struct HeadRun {
  DevicePtr<float> master;
  DevicePtr<const float> factors;  // of the projection's first head here
  int64_t begin = 0, count = 0;    // elements behind that head's first
  int64_t head_elems = 1;          // of a head
  DType dtype = DType::kF32;       // of the weights: kF32, kBf16 or kF16
  DevicePtr<void> weights;         // receive the new master, rounded; null: none
};
/// Runs, and the elements of all.
inline void add_dims(OpDims& to, std::span<const HeadRun> of) {
  int64_t elems = 0;
  for (const HeadRun& run : of) elems += run.count;
  to.add(std::ssize(of));
  to.add(elems);
}
/// Masters times their heads' factors; nothing where `clipped` [1] is 0 or the clip is not finite.
void scale_heads_of_runs(std::span<const HeadRun> runs, const float* clipped, const Clip* clip);

}  // namespace cairn::kernels
