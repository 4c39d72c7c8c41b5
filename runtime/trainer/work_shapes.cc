#include "runtime/trainer/work_shapes.h"

#include <algorithm>

#include "runtime/core/exact_sum.h"
#include "runtime/data/loss_weights.h"
#include "runtime/data/objective.h"
#include "runtime/device/copy_gate.h"
#include "runtime/kernels/adafactor.h"
#include "runtime/kernels/adamw.h"
#include "runtime/kernels/clip.h"
#include "runtime/kernels/state_copies.h"
#include "runtime/nn/attention.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/model_tensors.h"
#include "runtime/plan/schedule.h"
#include "runtime/trainer/state.h"

namespace cairn::trainer {
namespace {

constexpr int64_t kMostBatches = kMostGateCalls + 1;  // of a pass over state; one of what is not copied

/// What a pass of a micro-batch gives of its ids, rows and keys.
void add_given(const Plan& plan, const RankPlan& rank, const StageDims& dims, WorkShapes* out) {
  const ModelConfig& model = plan.recipe.model;
  const auto give = [out](int64_t count, int64_t bytes) {
    out->gives += count;
    out->given_bytes += count * bytes;
  };
  const int64_t times = plan.micro_batches, chunks = std::ssize(rank.chunks);
  // Forward, backward, and where a schedule cuts it the rest of backward.
  const int64_t passes = times * chunks * (splits_backward(plan.recipe.schedule) ? 3 : 2);
  if (model.embedding_dropout > 0 || model.attention_dropout > 0 || model.residual_dropout > 0) {
    give(passes, dims.samples * static_cast<int64_t>(sizeof(uint64_t)));
  }
  const int64_t ids = dims.rows * static_cast<int64_t>(sizeof(int32_t));
  if (has_own_rows(plan.recipe)) {  // positions and ends; starts, of all tokens
    give(2 * passes, ids);
    give(passes, dims.samples * dims.held.tokens * static_cast<int64_t>(sizeof(int32_t)));
  }
  if (dims.experts > 0) {  // counts of their rows, and what balances them: in each layer
    give(3 * passes * (model.layers + plan.mtp_depth()), dims.experts * static_cast<int64_t>(sizeof(float)));
  }
  if (rank.embedding()) give(2 * times, ids);
  if (rank.head()) give(2 * times * (1 + 2 * plan.mtp_depth()), ids);
  if (rank.head() && !data::sources_by_sample(plan.recipe.data).empty()) {  // weights of the losses
    give(2 * times, dims.rows * static_cast<int64_t>(sizeof(float)));
  }
}

/// Attention of its layers that is nothing beyond an AttentionShape.
void add_attention(const Plan& plan, const StageDims& dims, WorkShapes* out) {
  const ModelConfig& model = plan.recipe.model;
  const bool slopes = model.positions == Positions::kAlibi;
  // Masks of documents, masks of dropout, the largest scores, sinks; slopes that are not of all heads.
  if (has_own_rows(plan.recipe) || model.attention_dropout > 0 || plan.recipe.optimizer.qk_clip > 0 ||
      model.attention_sinks || (slopes && dims.heads != model.heads)) {
    return;
  }
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    auto shape = kernels::plain_shape(nn::attention_dims(model, dims, layer), plan.compute_dtype());
    if (!shape) continue;
    shape->alibi = slopes;
    std::vector<AttentionShape>& shapes = out->attention;  // few: layers are alike
    if (std::ranges::find(shapes, *shape) == shapes.end()) shapes.push_back(*shape);
  }
}

WorkShapes of_stage(const Plan& plan, const RankPlan& rank) {
  const StageDims dims = stage_dims(plan, rank);
  const ModelConfig& model = plan.recipe.model;
  WorkShapes out{.rows = dims.rows, .norm_width = std::max(dims.width, dims.embed)};
  const bool biased = has_bias(model, BiasOf::kQkv) || has_bias(model, BiasOf::kOut) || has_bias(model, BiasOf::kMlp);
  if (biased || model.bias) {
    out.bias_width = std::max({dims.qkv, dims.ffn_in, dims.expert_ffn_in, 2 * dims.shared_ffn, dims.width, dims.embed});
  }
  if (dims.experts > 0 && has_bias(model, BiasOf::kMlp)) {
    out.rows = std::max(out.rows, dims.expert_rows);
    out.expert_tiles = dims.expert_rows / kernels::kGroupTile + dims.experts;
  }
  if (model.moe.router_bias) out.bias_width = std::max(out.bias_width, dims.experts);
  if (model.head_bias) out.bias_width = std::max(out.bias_width, dims.vocab);
  out.row_parts = dims.row_parts;
  const int64_t heads = std::max(dims.heads, dims.kv_heads);
  if (model.qk_norm == QkNorm::kHeadLayerNorm) {  // sums for each head
    out.head_rows = dims.rows;
    out.head_width = heads * dims.head_dim;
  } else if (model.qk_norm != QkNorm::kNone) {
    out.head_rows = dims.rows * heads;
    out.head_width = std::max<int64_t>(1, shared_norm_sums(model)) * dims.head_dim;
  }
  if (plan.recipe.optimizer.qk_clip > 0) {
    out.score_heads = dims.samples * dims.heads;
    out.score_queries = dims.tokens;
    out.score_width = dims.head_dim;
  }
  add_given(plan, rank, dims, &out);
  add_attention(plan, dims, &out);
  return out;
}

}  // namespace

WorkShapes work_shapes(const Plan& plan, int64_t rank) {
  WorkShapes out;
  RankPlan of;
  for (size_t stage = 0; stage < plan.step_stages.size(); ++stage) {
    const Plan at = plan.at(stage);
    of = at.rank(rank);
    out.raise(of_stage(at, of));
  }
  const OptimizerConfig& optimizer = plan.recipe.optimizer;
  const int64_t most_runs = std::ssize(of.pieces) + kMostBatches;  // of a pass over state
  for (const StatePiece& piece : of.pieces) {
    out.gradient_runs += piece.primary ? 1 : 0;
    if (optimizer.kind != OptimizerKind::kAdafactor) continue;
    out.squared_elems += piece.count_elems();
    out.squared_cols += plan.tensors[piece.tensor].shape.back();
  }
  // Runs of the update's passes over state: of Adafactor also squares, and their columns.
  const int64_t of_rule = optimizer.kind == OptimizerKind::kAdamW ? 1 : optimizer.kind == OptimizerKind::kLamb ? 3 : 5;
  const int64_t passes = of_rule + (optimizer.ema > 0 ? 2 : 0) + (optimizer.qk_clip > 0 ? 1 : 0);
  out.gives += passes * kMostBatches;
  out.given_bytes += passes * most_runs * kernels::kGivenRunBytes;
  if (optimizer.kind == OptimizerKind::kAdafactor) {
    out.gives += 2;  // rates; moments of whole tensors
    out.given_bytes += std::ssize(plan.tensors) * static_cast<int64_t>(sizeof(kernels::AdafactorRate)) +
                       std::ssize(of.tensors) * kernels::kGivenRunBytes;
  }
  // Runs of gradients that begin at zero: between matrices, and around them.
  out.gives += 1;
  out.given_bytes += (std::ssize(of.tensors) + 1) * static_cast<int64_t>(sizeof(kernels::ElemRun));
  for (const StateTensor& saved : kept_tensors(plan, of, true)) {
    ++out.copied_arrays;
    out.copied_bytes += saved.bytes;
  }
  // The update's: the runs, the squared norm or the tokens that count, what the clip is made of.
  out.gives += 3;
  out.given_bytes += out.gradient_runs * static_cast<int64_t>(sizeof(kernels::ElemRun)) +
                     ExactSum::kWords * static_cast<int64_t>(sizeof(double)) +
                     static_cast<int64_t>(sizeof(kernels::ClipNumbers));
  return out;
}

WorkShapes forward_shapes(const Plan& plan, const RankPlan& rank) {
  WorkShapes out = of_stage(plan, rank);
  const StageDims dims = stage_dims(plan, rank);
  out.told_width = plan.recipe.model.vocab;
  // Where each row stands, what it sees, and where it lies in a cache.
  constexpr int64_t kArrays = 6;
  out.gives += kArrays;
  out.given_bytes += kArrays * dims.rows * static_cast<int64_t>(sizeof(int64_t));
  return out;
}

}  // namespace cairn::trainer
