#include "runtime/kernels/head_clip.h"

#include <algorithm>
#include <cmath>

#include "runtime/kernels/elementwise.h"
#include "runtime/kernels/state_copies.h"

namespace cairn::kernels {

void head_factors(const HeadClip& of, const float* max_scores, float* query, float* key, float* clipped) {
  *clipped = 0;
  const auto shrink = [&](int64_t head) { return std::min(1.0, of.most / static_cast<double>(max_scores[head])); };
  const auto above = [&](int64_t head) { return static_cast<double>(max_scores[head]) > of.most; };
  for (int64_t kv = 0; kv < of.key_heads; ++kv) {
    double least = 1;
    for (int64_t h = kv * of.group; h < (kv + 1) * of.group; ++h) {
      if (above(h)) least = std::min(least, shrink(h));
    }
    key[kv] = static_cast<float>(std::sqrt(least));
    for (int64_t h = kv * of.group; h < (kv + 1) * of.group; ++h) {
      *clipped += above(h) ? 1.0F : 0.0F;
      query[h] = least == 1 ? 1.0F : static_cast<float>((above(h) ? shrink(h) : 1.0) / std::sqrt(least));
    }
  }
}

void scale_heads_of_runs(std::span<const HeadRun> runs, const float* clipped, const Clip* clip) {
  if (*clipped == 0 || clip->finite == 0) return;
  for (const HeadRun& run : runs) {
    for (int64_t at = 0; at < run.count;) {
      const int64_t head = (run.begin + at) / run.head_elems;
      const int64_t end = std::min(run.count, (head + 1) * run.head_elems - run.begin);
      scale_floats(run.master.address() + at, run.factors.address()[head], end - at);
      at = end;
    }
    if (run.weights) put_weights(run.master.address(), run.count, run.dtype, run.weights.address());
  }
}

}  // namespace cairn::kernels
