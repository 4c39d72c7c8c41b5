#include "runtime/plan/communication.h"

#include <algorithm>
#include <string>

#include "runtime/core/exact_sum.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/boundary.h"
#include "runtime/plan/model_tensors.h"

namespace cairn {
namespace {

/// The sum of gradients that are partial, once the shards are.
void add_partial(const RankPlan& rank, bool LocalTensor::*partial, Traffic* out) {
  int64_t elems = 0;
  for (const LocalTensor& local : rank.tensors) {
    if (!(local.*partial)) continue;
    for (const Bucket& bucket : rank.buckets) {
      elems += std::max<int64_t>(0, std::min(bucket.shard.end, local.offset + count_elems(local.shape)) -
                                        std::max(bucket.shard.begin, local.offset));
    }
  }
  if (elems > 0) out->all_reduce.add(elems * 4);
}

/// The same where micro-batches are added up one by one: a unit's gradients once each.
void add_partial_by_unit(const Plan& plan, const RankPlan& rank, Traffic* out) {
  for (const Unit& unit : rank.units) {
    const int64_t elems = partial_elems(rank, unit);
    for (int64_t k = 0; elems > 0 && k < plan.micro_batches; ++k) out->all_reduce.add(elems * 4);
  }
}

/// Gathered over tp of what the stages before and behind have sent.
void add_boundary_gathers(const Plan& plan, const RankPlan& rank, Traffic* out) {
  const BoundaryTensor tensor = boundary_tensor(plan);
  const ScheduleShape shape = plan.schedule();
  for (int64_t chunk = 0; chunk < std::ssize(rank.chunks); ++chunk) {
    const int64_t stage = stage_at(shape, rank.at.pp, chunk);
    const bool activations = stage > 0 && tensor.cut(passes_to_itself(shape, stage - 1));
    const bool gradients = stage + 1 < std::ssize(plan.stages) && tensor.cut(passes_to_itself(shape, stage));
    for (int64_t k = 0; k < plan.micro_batches; ++k) {
      if (activations) out->all_gather.add(tensor.part_bytes);
      if (gradients) out->all_gather.add(tensor.part_bytes);
    }
  }
}

Traffic tp_traffic(const Plan& plan, const RankPlan& rank) {
  const StageDims d = stage_dims(plan, rank);
  const int64_t elem = dtype_size_bytes(plan.compute_dtype());
  const int64_t partial = d.all_parts > 1 ? 4 : elem;  // parts are added before they are rounded
  const bool scattered = plan.recipe.mesh.sequence_parallel;
  Traffic out;
  const auto reduce_rows = [&](int64_t width, int64_t bytes) {
    (scattered ? out.reduce_scatter : out.all_reduce).add(d.rows * width * bytes);
  };
  const auto gather_rows = [&](int64_t width) {
    if (scattered) out.all_gather.add(d.local_rows * width * elem);
  };
  const auto reduce = [&] { reduce_rows(d.width, partial); };
  const auto gather = [&] { gather_rows(d.width); };
  const auto branch = [&](bool split) {  // attention or MLP, forward and backward
    gather(), reduce();                  // norm -> column cut; row cut -> sum
    gather(), gather(), reduce();        // gradient of the output; norm again; gradient of the input
    if (split) gather();                 // the second half of a backward wants the gradient of the output too
  };
  // With latent vectors these are gathered, their gradients reduced; x and its gradient where queries come from it.
  const auto latent_input = [&] {
    gather_rows(d.latent());
    if (d.q_rank == 0) gather();
  };
  const auto latent_branch = [&](bool split) {
    latent_input(), reduce();
    gather(), latent_input(), reduce_rows(d.latent(), elem);
    if (d.q_rank == 0) reduce();
    if (split) gather();
  };
  const bool latents = d.latent() > 0;
  const auto attention = [&](bool split) { latents ? latent_branch(split) : branch(split); };
  const bool top_query = plan.recipe.model.top_query;
  const QkNorm qk_norm = plan.recipe.model.qk_norm;
  const auto squares = [&] { out.all_reduce.add(2 * d.rows * 4); };  // of q and of k, for norms over all heads
  const auto recompute = [&](bool split, bool dense) {               // a whole layer, but for an MLP's last projection
    latents ? latent_input() : gather(), reduce();                   // attention
    if (qk_norm == QkNorm::kWhole) squares();
    gather();  // MLP or experts
    if (!dense) reduce();
    if (!distributes_inputs(plan)) return;
    const int64_t part = d.local_rows * d.width / plan.mesh.tp() * elem;
    for (int pass = 0; pass < (split ? 2 : 1); ++pass) out.all_gather.add(part);
  };
  const auto layer = [&](const Stage& stage, int64_t l, bool split) {
    const bool dense = !has_experts(plan.recipe.model, l);
    attention(split), branch(split && dense);
    const int64_t shared = shared_norm_sums(plan.recipe.model);
    if (d.all_token_parts > 1 && shared > 0) out.all_reduce.add(2 * d.held.parts * shared * d.head_dim * 4);
    if (qk_norm == QkNorm::kWhole) squares(), out.all_reduce.add(4 * d.rows * 4);
    const int64_t weights = d.choices + (plan.recipe.model.moe.shared_gate ? 1 : 0);
    if (!dense) out.all_reduce.add(d.rows * weights * 4);  // gradients of the experts' weights
    if (layer_recompute(plan, stage, l) == RecomputeMode::kFull) recompute(split, dense);
  };
  const auto head = [&] {
    gather_rows(d.embed), gather_rows(d.embed), reduce_rows(d.embed, partial);  // forward; backward, which norms again
    out.all_reduce.add(d.rows * 4);                                             // maximum of each row
    out.all_reduce.add(2 * d.rows * 4);                                         // sum of exponentials, target's logit
  };
  for (int64_t k = 0; k < plan.micro_batches; ++k) {
    for (const Chunk& chunk : rank.chunks) {
      const bool split = chunk.late > 0;
      if (chunk.stage.embedding) reduce_rows(d.embed, elem), gather_rows(d.embed);
      for (int64_t l = chunk.stage.first_layer; l < chunk.stage.end_layer; ++l) layer(chunk.stage, l, split);
      if (!chunk.stage.head) continue;
      if (top_query) {
        branch(false), branch(false);
        if (qk_norm == QkNorm::kWhole) squares(), out.all_reduce.add(4 * d.rows * 4);
        reduce();  // gradients of the positions that its queries come from
        if (layer_recompute(plan, chunk.stage, chunk.stage.end_layer) == RecomputeMode::kFull) recompute(false, true);
      }
      head();
      for (int64_t module = 0; module < plan.mtp_depth(); ++module) {
        reduce_rows(d.width, elem), gather();  // embeddings of the tokens ahead, their gradients
        layer(chunk.stage, chunk.stage.end_layer + module, false);
        head();
      }
    }
  }
  add_boundary_gathers(plan, rank, &out);
  if (plan.layout_free()) {
    add_partial_by_unit(plan, rank, &out);
  } else {
    add_partial(rank, &LocalTensor::sum_over_tp, &out);
  }
  if (rank.tp_work.size() > 0) out.all_reduce.add(rank.tp_work.size() * 8);  // Adafactor's rows and columns
  return out;
}

/// Of a rank that sends back to the tokens' ranks as many rows as its own tokens have choices.
Traffic expert_traffic(const Plan& plan, const RankPlan& rank) {
  const StageDims d = stage_dims(plan, rank);
  const int64_t row_bytes = d.width * dtype_size_bytes(plan.compute_dtype()), choices = d.rows * d.choices;
  Traffic out;
  const auto forward = [&] {
    out.all_gather.add(d.experts * 4);  // how many rows for whom
    for (int way = 0; way < 2; ++way) out.all_to_all.add(choices * row_bytes);
  };
  for (const Chunk& chunk : rank.chunks) {
    const int64_t modules = chunk.stage.head ? plan.mtp_depth() : 0;
    for (int64_t l = chunk.stage.first_layer; l < chunk.stage.end_layer + modules; ++l) {
      if (!has_experts(plan.recipe.model, l)) continue;
      for (int64_t k = 0; k < plan.micro_batches; ++k) {
        forward();
        if (layer_recompute(plan, chunk.stage, l) == RecomputeMode::kFull) forward();
        for (int rows = 0; rows < 3; ++rows) out.all_to_all.add(choices * row_bytes);  // dy and x out, dx back
        for (int way = 0; way < 2; ++way) out.all_to_all.add(choices * 4);             // weights, their gradients
        if (!has_bias(plan.recipe.model, BiasOf::kMlp)) continue;
        for (int way = 0; way < 2; ++way) out.all_to_all.add(choices * 4);  // the same for what biases gave
      }
    }
  }
  return out;
}

Traffic context_traffic(const Plan& plan, const RankPlan& rank) {
  const StageDims d = stage_dims(plan, rank);
  const int64_t kv = d.rows * 2 * d.kv_heads * d.head_dim;
  const int64_t kv_bytes = kv * dtype_size_bytes(plan.compute_dtype());
  const bool balances_each_layer = plan.recipe.model.moe.aux_loss > 0 && !balances_over_layers(plan.recipe.model);
  const int64_t gradient_bytes = d.all_token_parts > 1 ? kv * 4 : kv_bytes;  // parts are added before they are rounded
  Traffic out;
  for (const Chunk& chunk : rank.chunks) {
    const bool top_query = chunk.stage.head && plan.recipe.model.top_query;
    for (int64_t l = chunk.stage.first_layer; l < chunk.stage.end_layer + (top_query ? 1 : 0); ++l) {
      const int64_t gathers = layer_recompute(plan, chunk.stage, l) == RecomputeMode::kNone ? 2 : 3;
      for (int64_t k = 0; k < plan.micro_batches; ++k) {
        for (int64_t g = 0; g < gathers; ++g) out.all_gather.add(kv_bytes);
        out.reduce_scatter.add(d.cp * gradient_bytes);
        if (balances_each_layer && has_experts(plan.recipe.model, l)) {
          out.all_reduce.add(d.experts * 4);  // choices of each expert
        }
      }
    }
    if (chunk.stage.head && balances_over_layers(plan.recipe.model)) {
      for (int64_t k = 0; k < plan.micro_batches; ++k) out.all_reduce.add(d.experts * 4);
    }
  }
  return out;
}

/// Inside the shard group, of dense buckets or those of divided experts.
Traffic shard_traffic(const Plan& plan, const RankPlan& rank, bool experts) {
  const int64_t elem = dtype_size_bytes(plan.compute_dtype());
  Traffic out;
  for (const Bucket& bucket : rank.buckets) {
    if (bucket.experts != experts) continue;
    const int64_t times = rank.scattered_grads ? plan.micro_batches * (experts ? plan.expert_sources() : 1) : 1;
    for (int64_t k = 0; k < times; ++k) out.reduce_scatter.add(bucket.range.size() * 4);
    if (!rank.scattered_weights) out.all_gather.add(bucket.shard.size() * elem);
  }
  if (const int64_t work = experts ? rank.expert_work : rank.dense_work; work > 0) out.all_reduce.add(work * 8);
  if (!rank.scattered_weights) return out;
  for (const UnitUse& use : unit_uses(rank, schedule_actions(plan.schedule(), rank.at.pp))) {
    const Unit& unit = rank.units[use.unit];
    if (!use.gather) continue;
    for (int64_t b = unit.first_bucket; b < unit.end_bucket; ++b) {
      if (rank.buckets[b].experts == experts) out.all_gather.add(rank.buckets[b].shard.size() * elem);
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

int64_t partial_elems(const RankPlan& rank, const Unit& unit) {
  int64_t elems = 0;
  for (const LocalTensor& local : rank.tensors) {
    const bool inside = local.offset >= unit.range.begin && local.offset < unit.range.end;
    if (inside && local.sum_over_tp) elems += count_elems(local.shape);
  }
  return elems;
}

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

bool adds_norm_in_order(const Plan& plan) {
  return plan.mesh.world() > 1 && plan.recipe.checkpoint.snapshot_by == SnapshotBy::kCopy;
}

std::vector<GroupTraffic> step_traffic(const Plan& plan, const RankPlan& rank) {
  const Mesh& mesh = plan.mesh;
  std::vector<GroupTraffic> out;
  const auto tell = [&](std::string_view group, int64_t size, const Traffic& traffic) {
    if (size > 1) out.push_back({std::string(group), size, traffic});
  };
  const auto with_norms = [&](Traffic of) {
    if (adds_norm_in_order(plan)) of.all_reduce.add(kNormNumbers * 8);
    if (rank.tensor_norms > 0) of.all_reduce.add(rank.tensor_norms * 8);
    if (plan.recipe.optimizer.qk_clip > 0) of.all_reduce.add(plan.recipe.model.layers * plan.recipe.model.heads * 4);
    return of;
  };
  if (mesh.tp() > 1) tell(kTpGroup, mesh.tp(), with_norms(tp_traffic(plan, rank)));
  if (plan.kv_copies() > 1) {
    Traffic sums;
    add_partial(rank, &LocalTensor::sum_over_kv, &sums);
    tell(kKvGroup, plan.kv_copies(), sums);
  }
  const auto reduce = [&](bool experts, std::string_view shard_group, std::string_view replica_group) {
    const int64_t shards = plan.shard_size(experts), replicas = plan.replicas(experts) / shards;
    const auto in_group = [&](const Traffic& of) { return experts ? of : with_norms(of); };
    if (shards > 1) tell(shard_group, shards, in_group(shard_traffic(plan, rank, experts)));
    Traffic sums;
    for (const Bucket& bucket : rank.buckets) {
      if (bucket.experts == experts) sums.all_reduce.add(bucket.shard.size() * 4);
    }
    tell(replica_group, replicas, in_group(sums));
  };
  reduce(false, plan.shard_size() == mesh.replicas() ? kDpGroup : kShardGroup,
         plan.shard_size() == 1 ? kDpGroup : kReplicaGroup);
  if (mesh.cp() > 1) tell(kContextGroup, mesh.cp(), context_traffic(plan, rank));
  if (mesh.ep() > 1) {
    reduce(true, kExpertShardGroup, kExpertReplicaGroup);
    tell(kExpertGroup, mesh.ep(), expert_traffic(plan, rank));
  }
  if (mesh.pp() > 1) {
    Traffic forward, backward;
    const BoundaryTensor tensor = boundary_tensor(plan);
    const ScheduleShape shape = plan.schedule();
    for (int64_t chunk = 0; chunk < std::ssize(rank.chunks); ++chunk) {
      const int64_t stage = stage_at(shape, rank.at.pp, chunk);
      for (int64_t k = 0; k < plan.micro_batches; ++k) {
        if (stage + 1 < std::ssize(plan.stages)) forward.send.add(tensor.sent_bytes(passes_to_itself(shape, stage)));
        if (stage > 0) backward.send.add(tensor.sent_bytes(passes_to_itself(shape, stage - 1)));
      }
    }
    tell(kForwardGroup, mesh.pp(), with_norms(forward));
    tell(kBackwardGroup, mesh.pp(), backward);
    if (plan.has_table_copy() && (rank.embedding() || rank.head()))
      tell(kEmbeddingGroup, 2, embedding_traffic(plan, rank));
  }
  Traffic world;
  const auto sources = static_cast<int64_t>(plan.recipe.data.sources.size());
  const int64_t losses = sources + plan.recipe.model.mtp.depth;
  const int64_t of_samples = 2 * plan.recipe.batch.samples;  // loss and tokens of each
  world.all_reduce.add((losses * (ExactSum::kWords + 1) + ExactSum::kWords + of_samples + 1) * 8);  // norm, bank too
  world.broadcast.add(rank.rank == 0 ? 8 : 0);                                                      // the step's order
  tell(kWorldGroup, mesh.world(), world);
  return out;
}

}  // namespace cairn
