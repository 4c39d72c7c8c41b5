#pragma once
// What a training step moves between ranks, by arithmetic: the communicators count the same (Comm::traffic()), and a
// test holds the two equal over many layouts. Pure.
//
// Payload that this rank puts in, a step (legend of activations.h; c bytes of the compute type, m micro-batches, G
// elements of a rank's buckets, s ranks of a shard group):
//   kv        4 bytes for each element of k and v that several tp ranks hold, of this rank's shards, all-reduced
//   tp        a layer: 4 m T H c all-reduced, or with sequence parallelism reduced and scattered and 6 m R H c gathered
//   pp        a stage that has one behind it sends m R H c forward, one that has one before it the same back; without
//             sequence parallelism 1 / tp of that, which the tp ranks of the other stage gather (boundary.h)
//   ZeRO-0    4 G all-reduced          ZeRO-1    4 G reduced and scattered, c G / s gathered
//   ZeRO-2    4 m G reduced and scattered, c G / s gathered
//   ZeRO-3    the same reduced; weights are gathered once for each GatherPlan::gather
//   replica   4 G / s all-reduced, between shard groups
//   ep        a layer: 5 m T k H c and 8 m T k exchanged, of which the ranks of experts send back two fifths and a
//   half:
//             dropless routing decides whose part of that is whose, so bytes are those of a rank that sends back as
//             much as it gets, and exact as the sum over the ep group; X 4 m gathered
//   cp        a layer: 2 m T 2 K D c gathered, once more for what is recomputed, and cp m T 2 K D c reduced and
//   scattered, float with deterministic = "layout"
// Divided experts are buckets apart, of which the replicas of one part reduce and gather theirs in the same way.

#include <span>
#include <string_view>
#include <vector>

#include "runtime/core/exact_sum.h"
#include "runtime/core/traffic.h"
#include "runtime/plan/plan.h"

namespace cairn {

// Names of the groups of ranks, in GroupTraffic and in messages. With one shard group or none its group is "dp".
constexpr std::string_view kTpGroup = "tp", kKvGroup = "kv", kDpGroup = "dp", kShardGroup = "shard",
                           kReplicaGroup = "replica", kForwardGroup = "pp", kBackwardGroup = "pp back",
                           kEmbeddingGroup = "embedding", kWorldGroup = "world", kExpertGroup = "ep",
                           kExpertShardGroup = "expert shard", kExpertReplicaGroup = "expert replica",
                           kContextGroup = "cp";

/// Whether the group's collectives run beside the rank's compute (runtime/data_parallel); a step waits for those of all
/// other groups.
constexpr bool runs_beside_compute(std::string_view group) {
  return group == kDpGroup || group == kShardGroup || group == kReplicaGroup || group == kExpertShardGroup ||
         group == kExpertReplicaGroup;
}

/// One time that a rank uses the weights of a unit.
struct UnitUse {
  int64_t unit = 0;
  bool gather = false;  // its slot holds another unit, or nothing yet: gathered before
};

/// Elements of a unit's gradients that are partial over tp. deterministic = "layout" adds them after each micro-batch.
int64_t partial_elems(const RankPlan& rank, const Unit& unit);

/// What a rank uses one after another when it runs `actions`; with ZeRO-3, slots hold nothing at first. Whoever
/// gathers goes by this list, so all members of a shard group gather the same in the same order.
std::vector<UnitUse> unit_uses(const RankPlan& rank, std::span<const Action> actions);

/// Whether ranks add up the squared norm, and what else clips a step's gradients, in the order of their devices' work:
/// over tp, over shards and replicas, over pp. Else the hosts add it up, and the update waits for that.
bool adds_norm_in_order(const Plan& plan);
/// Doubles of that: whether a loss is ruined, the words of the norm, the tokens that count.
inline constexpr int64_t kNormNumbers = ExactSum::kWords + 2;

/// Of one training step, groups of more than one rank alone. Validation, saves and the start of a run come on top.
std::vector<GroupTraffic> step_traffic(const Plan& plan, const RankPlan& rank);

}  // namespace cairn
