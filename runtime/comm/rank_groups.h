#pragma once
// The groups of a rank, by what they are for. Views: who made them owns them (trainer::Groups).

#include "runtime/comm/comm.h"

namespace cairn::comm {

/// Null: the rank has none, since it would be of this rank alone. Names and members: runtime/plan/communication.h.
struct RankGroups {
  // In which a rank computes its part of a layer.
  Comm *tp = nullptr, *cp = nullptr, *ep = nullptr;
  // From stage to stage: activations forward, their gradients backward.
  Comm *activations = nullptr, *gradients = nullptr;
  // Of the buckets of gradients. shard: the ranks that divide them; replica: those with the same shard of other shard
  // groups; either may be of one rank. The same for the buckets of divided experts. kv: those with the same key and
  // value heads (Plan::kv_group()).
  Comm *shard = nullptr, *replica = nullptr;
  Comm *expert_shard = nullptr, *expert_replica = nullptr;
  Comm *kv = nullptr;
  // Of the two ends of the pipeline, where the rank has one.
  Comm *embedding = nullptr;
  Comm *world = nullptr;
};

}  // namespace cairn::comm
