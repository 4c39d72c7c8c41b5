#pragma once
// Which groups of ranks lie on one node: what mesh.order and mesh.shard decide. Pure.

#include <cstdint>
#include <span>

#include "runtime/plan/plan.h"

namespace cairn::tools {

/// Where the members of a group of ranks lie.
struct GroupSpan {
  int64_t ranks = 1;     // of the group
  int64_t in_node = 1;   // the fewest of them on a node that has some
  bool crosses = false;  // they lie on several nodes
};

/// Ranks [k n, (k + 1) n) share a node of n devices.
GroupSpan span_of(std::span<const int64_t> ranks, int64_t node_devices);

/// Of the groups that a step uses, the worst of those looked at: of the first, middle and last rank.
struct Placement {
  GroupSpan tp, cp, ep, shard, replica;
  bool pipeline_crosses = false;  // some neighbouring stages lie on different nodes
};

Placement place_groups(const Plan& plan, int64_t node_devices);

}  // namespace cairn::tools
