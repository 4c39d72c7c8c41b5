#include "runtime/optim/after/qk_clip.h"

#include <algorithm>

#include "runtime/core/check.h"

namespace cairn::optim {
namespace {

/// A query or key projection that this rank has a part of.
struct HeadRows {
  int64_t tensor = 0, offset = 0;            // of its first element here, into the flat range
  int64_t head_elems = 0, first_factor = 0;  // of the first head here, into HeadNumbers::query or ::key
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

kernels::HeadClip head_clip(const ModelConfig& model, double tau) {
  return {.most = tau, .group = model.heads / model.kv_heads, .key_heads = model.layers * model.kv_heads};
}

}  // namespace

HeadNumbers head_numbers(const StateWalk& walk) {
  const ModelConfig& model = walk.plan().recipe.model;
  const DevicePtr<float> first = (walk.arrays().work + walk.rank().head_numbers_offset()).as<float>();
  const int64_t heads = model.layers * model.heads;
  return {first, first + heads, first + 2 * heads, first + 2 * heads + model.layers * model.kv_heads};
}

void scale_heads(StateWalk& walk, DevicePtr<const kernels::Clip> clip, int64_t bank) {
  const Plan& plan = walk.plan();
  const HeadNumbers of = head_numbers(walk);
  walk.on().head_factors(head_clip(plan.recipe.model, plan.recipe.optimizer.qk_clip), of.max_scores, of.query, of.key,
                         of.clipped);
  const std::vector<HeadRows> projections = head_rows(plan, walk.rank());
  const auto scale = [&](std::span<const StateBlock> batch) {
    std::vector<kernels::HeadRun> runs;
    std::vector<const StateBlock*> scaled;
    for (const StateBlock& block : batch) {
      const auto rows = std::find_if(projections.begin(), projections.end(),
                                     [&](const HeadRows& r) { return r.tensor == block.piece->tensor; });
      if (rows == projections.end()) continue;
      scaled.push_back(&block);
      runs.push_back({.master = block.to.master,
                      .factors = (rows->key ? of.key : of.query) + rows->first_factor,
                      .begin = block.piece->flat_offset + block.begin - rows->offset,
                      .count = block.count,
                      .head_elems = rows->head_elems,
                      .dtype = plan.compute_dtype(),
                      .weights = walk.weights_of(block)});
    }
    if (runs.empty()) return;
    walk.on().scale_heads_of_runs(runs, of.clipped, clip);
    for (const StateBlock* const block : scaled) {
      walk.on().copy_summed(block->to.master, block->to.master, block->count, walk.sums_of(*block, 0, 1));
    }
  };
  walk.for_batches(bank, bank, scale, StateWalk::Pieces::kTrainedAgain);
}

int64_t clipped_heads(const ModelConfig& model, double tau, std::span<const float> max_scores) {
  RT_CHECK(std::ssize(max_scores) == model.layers * model.heads, "{} scores", max_scores.size());
  return std::ranges::count_if(max_scores, [tau](float score) { return static_cast<double>(score) > tau; });
}

}  // namespace cairn::optim
