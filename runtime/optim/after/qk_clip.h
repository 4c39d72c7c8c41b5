#pragma once
// QK clip (MuonClip, Kimi K2 2025): when an attention score of a head grows beyond a threshold, the head's query and
// key projections are scaled down after the update, so that the next scores stay below it.
//
// With S the largest score of query head h over all queries, keys and samples of a step (before the softmax, with its
// factor and with ALiBi's term) and tau the threshold, the head's scores are to shrink by g_h = min(1, tau / S). Each
// of q and k takes the root of it. Query heads that share a key head cannot scale it each by their own: the key head
// takes sqrt(min over its query heads of g), and a query head takes what is left, g_h / sqrt(that minimum). So the
// scores of every head are scaled by exactly its g_h, and with one query head a key head both take sqrt(g_h).
//
// Scores and factors stay on the device, in Arrays::work (RankPlan::head_numbers).

#include <span>
#include <vector>

#include "runtime/config/model.h"
#include "runtime/kernels/head_clip.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

struct HeadNumbers {
  DevicePtr<float> max_scores;  // [layers, heads]
  DevicePtr<float> query;       // [layers, heads]: factors of the projections' rows; 1 where nothing is scaled
  DevicePtr<float> key;         // [layers, kv_heads]
  DevicePtr<float> clipped;     // [1]: query heads with g < 1
};
HeadNumbers head_numbers(const StateWalk& walk);

/// After an update, with the largest scores of all ranks: scales the rows of the query and key projections, weights and
/// biases, in bank `bank`. Where the clip is not finite nothing is written.
void scale_heads(StateWalk& walk, DevicePtr<const kernels::Clip> clip, int64_t bank);

/// `max_scores` [layers, heads]: query heads that are scaled.
int64_t clipped_heads(const ModelConfig& model, double tau, std::span<const float> max_scores);

}  // namespace cairn::optim
