#include "runtime/plan/communication.h"

#include <algorithm>
#include <string>

#include "runtime/core/exact_sum.h"
#include "runtime/plan/activations.h"

namespace cairn {
namespace {

Traffic tp_traffic(const Plan& plan, const RankPlan& rank) {
  const StageDims d = stage_dims(plan, rank);
  const int64_t elem = dtype_size_bytes(plan.compute_dtype());
  const bool scattered = plan.recipe.mesh.sequence_parallel;
  Traffic out;
  const auto reduce_rows = [&](int64_t width) {
    (scattered ? out.reduce_scatter : out.all_reduce).add(d.rows * width * elem);
  };
  const auto gather_rows = [&](int64_t width) {
    if (scattered) out.all_gather.add(d.local_rows * width * elem);
  };
  const auto reduce = [&] { reduce_rows(d.width); };
  const auto gather = [&] { gather_rows(d.width); };
  const auto branch = [&](bool split) {  // attention or MLP, forward and backward
    gather(), reduce();                  // norm -> column cut; row cut -> sum
    gather(), gather(), reduce();        // gradient of the output; norm again; gradient of the input
    if (split) gather();                 // the second half of a backward wants the gradient of the output too
  };
  const bool dense = d.experts == 0;
  const auto recompute = [&](bool split) {  // a whole layer, but for an MLP's last projection
    gather(), reduce();                     // attention
    gather();                               // MLP or experts
    if (!dense) reduce();
    if (!distributes_inputs(plan)) return;
    const int64_t part = d.local_rows * d.width / plan.mesh.tp() * elem;
    for (int pass = 0; pass < (split ? 2 : 1); ++pass) out.all_gather.add(part);
  };
  for (int64_t k = 0; k < plan.micro_batches; ++k) {
    for (const Chunk& chunk : rank.chunks) {
      const bool split = chunk.late > 0;
      if (chunk.stage.embedding) reduce_rows(d.embed), gather_rows(d.embed);
      for (int64_t l = chunk.stage.first_layer; l < chunk.stage.end_layer; ++l) {
        branch(split), branch(split && dense);
        if (!dense) out.all_reduce.add(d.rows * d.choices * 4);  // gradients of the experts' weights
        if (layer_recompute(plan, chunk.stage, l) == RecomputeMode::kFull) recompute(split);
      }
      if (!chunk.stage.head) continue;
      gather_rows(d.embed), gather_rows(d.embed), reduce_rows(d.embed);  // forward; backward, which norms again
      out.all_reduce.add(d.rows * 4);                                    // maximum of each row
      out.all_reduce.add(2 * d.rows * 4);                                // sum of exponentials, target's logit
    }
  }
  int64_t partial = 0;  // of replicated tensors, summed once the shards are
  for (const LocalTensor& local : rank.tensors) {
    if (!local.sum_over_tp) continue;
    for (const Bucket& bucket : rank.buckets) {
      partial += std::max<int64_t>(0, std::min(bucket.shard.end, local.offset + count_elems(local.shape)) -
                                          std::max(bucket.shard.begin, local.offset));
    }
  }
  if (partial > 0) out.all_reduce.add(partial * 4);
  return out;
}

/// Inside the shard group.
Traffic shard_traffic(const Plan& plan, const RankPlan& rank) {
  const int64_t elem = dtype_size_bytes(plan.compute_dtype());
  Traffic out;
  for (const Bucket& bucket : rank.buckets) {
    const int64_t times = rank.scattered_grads ? plan.micro_batches : 1;
    for (int64_t k = 0; k < times; ++k) out.reduce_scatter.add(bucket.range.size() * 4);
    if (!rank.scattered_weights) out.all_gather.add(bucket.shard.size() * elem);
  }
  if (!rank.scattered_weights) return out;
  for (const UnitUse& use : unit_uses(rank, schedule_actions(plan.schedule(), rank.at.pp))) {
    const Unit& unit = rank.units[use.unit];
    if (!use.gather) continue;
    for (int64_t b = unit.first_bucket; b < unit.end_bucket; ++b) {
      out.all_gather.add(rank.buckets[b].shard.size() * elem);
    }
  }
  return out;
}

Traffic embedding_traffic(const Plan& plan, const RankPlan& rank) {
  Traffic out;
  const LocalTensor* tied = rank.find(plan.tensors, "embed.tokens");
  for (const Bucket& bucket : rank.buckets) {
    if (bucket.range.begin >= tied->offset && bucket.range.begin < tied->offset + count_elems(tied->shape)) {
      out.all_reduce.add(bucket.shard.size() * 4);
    }
  }
  return out;
}

}  // namespace

std::vector<UnitUse> unit_uses(const RankPlan& rank, std::span<const Action> actions) {
  std::vector<UnitUse> out;
  std::vector<int64_t> held(rank.units.size(), -1);  // by slot
  const auto use = [&](int64_t layer) {
    for (const int64_t u : rank.units_of(layer)) {
      int64_t& holder = held.at(rank.units[u].weight_slot);
      out.push_back({u, rank.scattered_weights && holder != u});
      holder = u;
    }
  };
  for (const Action& action : actions) {
    const Stage& stage = rank.chunks.at(action.chunk).stage;
    if (action.kind == ActionKind::kForward) {
      if (stage.embedding) use(kEmbeddingLayer);
      for (int64_t l = stage.first_layer; l < stage.end_layer; ++l) use(l);
      if (stage.head) use(kHeadLayer);
    } else {
      const bool whole = action.kind != ActionKind::kBackwardWeight;  // head and embedding are not split
      if (stage.head && whole) use(kHeadLayer);
      for (int64_t l = stage.end_layer; l-- > stage.first_layer;) use(l);
      if (stage.embedding && whole) use(kEmbeddingLayer);
    }
  }
  return out;
}

std::vector<GroupTraffic> step_traffic(const Plan& plan, const RankPlan& rank) {
  const Mesh& mesh = plan.mesh;
  const int64_t shards = plan.shard_size(), replicas = mesh.dp() / shards;
  std::vector<GroupTraffic> out;
  const auto tell = [&](std::string_view group, int64_t size, const Traffic& traffic) {
    if (size > 1) out.push_back({std::string(group), size, traffic});
  };
  if (mesh.tp() > 1) tell(kTpGroup, mesh.tp(), tp_traffic(plan, rank));
  if (shards > 1) tell(replicas == 1 ? kDpGroup : kShardGroup, shards, shard_traffic(plan, rank));
  if (replicas > 1) {
    Traffic sums;
    for (const Bucket& bucket : rank.buckets) sums.all_reduce.add(bucket.shard.size() * 4);
    tell(shards == 1 ? kDpGroup : kReplicaGroup, replicas, sums);
  }
  if (mesh.pp() > 1) {
    Traffic forward, backward;
    for (const Chunk& chunk : rank.chunks) {
      for (int64_t k = 0; k < plan.micro_batches; ++k) {
        if (!chunk.stage.head) forward.send.add(plan.boundary_bytes());
        if (!chunk.stage.embedding) backward.send.add(plan.boundary_bytes());
      }
    }
    tell(kForwardGroup, mesh.pp(), forward);
    tell(kBackwardGroup, mesh.pp(), backward);
    if (plan.has_tied_copy() && (rank.embedding() || rank.head()))
      tell(kEmbeddingGroup, 2, embedding_traffic(plan, rank));
  }
  Traffic world;
  const auto sources = static_cast<int64_t>(plan.recipe.data.sources.size());
  world.all_reduce.add((sources * (ExactSum::kWords + 1) + ExactSum::kWords + 1) * 8);  // losses, norm, bank
  if (plan.recipe.optimizer.kind == OptimizerKind::kLamb) {
    world.all_reduce.add(static_cast<int64_t>(plan.tensors.size()) * 2 * ExactSum::kWords * 8);  // norms of each tensor
  }
  if (plan.recipe.optimizer.qk_clip > 0) world.all_reduce.add(plan.recipe.model.layers * plan.recipe.model.heads * 4);
  world.broadcast.add(rank.rank == 0 ? 8 : 0);  // the step's order
  tell(kWorldGroup, mesh.world(), world);
  return out;
}

}  // namespace cairn
