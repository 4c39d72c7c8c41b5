#pragma once
// QK clip (MuonClip, Kimi K2 2025): when an attention score of a head grows beyond a threshold, the head's query and
// key projections are scaled down after the update, so that the next scores stay below it.
//
// With S the largest score of query head h over all queries, keys and samples of a step (before the softmax, with its
// factor and with ALiBi's term) and tau the threshold, the head's scores are to shrink by g_h = min(1, tau / S). Each
// of q and k takes the root of it. Query heads that share a key head cannot scale it each by their own: the key head
// takes sqrt(min over its query heads of g), and a query head takes what is left, g_h / sqrt(that minimum). So the
// scores of every head are scaled by exactly its g_h, and with one query head a key head both take sqrt(g_h).

#include <span>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// Of the rows of the projections, by layer and head; 1 where nothing is scaled.
struct HeadFactors {
  std::vector<float> query;   // [layers, heads]
  std::vector<float> key;     // [layers, kv_heads]
  int64_t clipped_heads = 0;  // query heads with g < 1
};

/// `max_scores` [layers, heads]; the same on all ranks, and so is the answer.
HeadFactors qk_clip_factors(const ModelConfig& model, double tau, std::span<const float> max_scores);

/// After an update: scales the rows of the query and key projections, weights and biases, in bank `bank`.
void scale_heads(StateWalk& walk, const HeadFactors& heads, int64_t bank);

}  // namespace cairn::optim
