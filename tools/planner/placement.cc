#include "tools/planner/placement.h"

#include <algorithm>
#include <map>
#include <vector>

namespace cairn::tools {

GroupSpan span_of(std::span<const int64_t> ranks, int64_t node_devices) {
  std::map<int64_t, int64_t> members;  // of each node
  for (const int64_t rank : ranks) ++members[rank / node_devices];
  GroupSpan out{.ranks = std::ssize(ranks), .in_node = std::ssize(ranks), .crosses = members.size() > 1};
  for (const auto& [node, count] : members) out.in_node = std::min(out.in_node, count);
  return out;
}

Placement place_groups(const Plan& plan, int64_t node_devices) {
  const Mesh& mesh = plan.mesh;
  const auto worse = [&](GroupSpan* span, const std::vector<int64_t>& ranks) {
    const GroupSpan found = span_of(ranks, node_devices);
    if (span->ranks == 1 || found.in_node < span->in_node) *span = found;
  };
  Placement out;
  for (const int64_t rank : {int64_t{0}, mesh.world() / 2, mesh.world() - 1}) {
    worse(&out.tp, mesh.group(MeshAxis::kTp, rank));
    worse(&out.cp, mesh.group(MeshAxis::kCp, rank));
    if (mesh.ep() > 1) worse(&out.ep, mesh.expert_group(rank));
    worse(&out.shard, mesh.shard_group(rank, plan.shard_size()));
    worse(&out.replica, mesh.replica_group(rank, plan.shard_size()));
    const std::vector<int64_t> stages = mesh.group(MeshAxis::kPp, rank);
    for (size_t i = 1; i < stages.size(); ++i) {
      if (stages[i] / node_devices != stages[i - 1] / node_devices) out.pipeline_crosses = true;
    }
  }
  return out;
}

}  // namespace cairn::tools
