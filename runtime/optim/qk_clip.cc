#include "runtime/optim/qk_clip.h"

#include <algorithm>
#include <cmath>

#include "runtime/core/check.h"

namespace cairn::optim {

HeadFactors qk_clip_factors(const ModelConfig& model, double tau, std::span<const float> max_scores) {
  const int64_t group = model.heads / model.kv_heads;
  RT_CHECK(std::ssize(max_scores) == model.layers * model.heads, "{} scores", max_scores.size());
  HeadFactors out{.query = std::vector<float>(max_scores.size(), 1.0f),
                  .key = std::vector<float>(static_cast<size_t>(model.layers * model.kv_heads), 1.0f)};
  const auto shrink = [&](int64_t head) { return std::min(1.0, tau / static_cast<double>(max_scores[head])); };
  for (int64_t kv = 0; kv < std::ssize(out.key); ++kv) {  // heads of all layers, one after the other
    double least = 1;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      if (max_scores[h] > tau) least = std::min(least, shrink(h));
    }
    if (least == 1) continue;
    out.key[kv] = static_cast<float>(std::sqrt(least));
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      const bool above = max_scores[h] > tau;
      out.clipped_heads += above ? 1 : 0;
      out.query[h] = static_cast<float>((above ? shrink(h) : 1.0) / std::sqrt(least));
    }
  }
  return out;
}

}  // namespace cairn::optim
