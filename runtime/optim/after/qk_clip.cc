#include "runtime/optim/after/qk_clip.h"

#include <algorithm>
#include <cmath>

#include "runtime/core/check.h"

namespace cairn::optim {
namespace {

/// A query or key projection that this rank has a part of.
struct HeadRows {
  int64_t tensor = 0, offset = 0;            // of its first element here, into the flat range
  int64_t head_elems = 0, first_factor = 0;  // of the first head here, into HeadFactors::query or ::key
  bool key = false;
};

std::vector<HeadRows> head_rows(const Plan& plan, const RankPlan& rank) {
  const ModelConfig& model = plan.recipe.model;
  std::vector<HeadRows> out;
  for (const LocalTensor& local : rank.tensors) {
    const TensorSpec& spec = plan.tensors[local.tensor];
    const bool key = spec.name.find(".attn.k.") != std::string::npos;
    if (spec.layer < 0 || spec.layer >= model.layers || !(key || spec.name.find(".attn.q.") != std::string::npos)) {
      continue;
    }
    const int64_t row_elems = spec.shape.size() > 1 ? spec.shape[1] : 1;
    out.push_back({local.tensor, local.offset, model.head_dim * row_elems,
                   spec.layer * (key ? model.kv_heads : model.heads) + local.box.lo[0] / model.head_dim, key});
  }
  return out;
}

}  // namespace

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

void scale_heads(StateWalk& walk, const HeadFactors& heads, int64_t bank) {
  const std::vector<HeadRows> projections = head_rows(walk.plan(), walk.rank());
  walk.for_blocks(bank, bank, [&](const StateBlock& block) {
    const auto rows = std::find_if(projections.begin(), projections.end(),
                                   [&](const HeadRows& r) { return r.tensor == block.piece->tensor; });
    if (rows == projections.end()) return;
    const std::vector<float>& factors = rows->key ? heads.key : heads.query;
    const int64_t begin = block.piece->flat_offset + block.begin - rows->offset;
    for (int64_t at = 0; at < block.count;) {
      const int64_t head = (begin + at) / rows->head_elems;
      const int64_t end = std::min(block.count, (head + 1) * rows->head_elems - begin);
      walk.on().scale_floats(block.to.master + at, factors[rows->first_factor + head], end - at);
      at = end;
    }
    walk.put_weights(block);
    walk.on().copy_summed(block.to.master, block.to.master, block.count, walk.sums_of(block, 0, 1));
  });
}

}  // namespace cairn::optim
