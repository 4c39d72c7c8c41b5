#include "ckpt/plan/free_copies.h"

#include <algorithm>
#include <iterator>

namespace cairn::ckpt {
namespace {

/// Ranks that keep all that this one saves, itself among them; ascending.
std::vector<int64_t> keepers(const Plan& plan, int64_t rank) {
  std::vector<int64_t> dense = plan.mesh.replica_group(rank, plan.shard_size());
  std::ranges::sort(dense);
  if (plan.mesh.ep() == 1) return dense;
  std::vector<int64_t> experts = plan.mesh.replica_group(rank, plan.shard_size(true), true), both;
  std::ranges::sort(experts);
  std::ranges::set_intersection(dense, experts, std::back_inserter(both));
  return both;
}

/// Places that keep all that this one saves, itself among them; ascending.
std::vector<int64_t> places_that_keep(const Plan& plan, int64_t place, int64_t ranks) {
  std::vector<int64_t> out;
  for (int64_t of_host = 0; of_host < ranks; ++of_host) {
    std::vector<int64_t> here, both;
    for (const int64_t rank : keepers(plan, place * ranks + of_host)) {
      if (rank % ranks == of_host) here.push_back(rank / ranks);
    }
    if (of_host == 0) {
      out = std::move(here);
      continue;
    }
    std::ranges::set_intersection(out, here, std::back_inserter(both));
    out = std::move(both);
  }
  return out;
}

}  // namespace

std::vector<int64_t> free_holders(const Plan& plan, int64_t hosts) {
  const CheckpointConfig& config = plan.recipe.checkpoint;
  if (hosts < 2 || plan.mesh.world() % hosts != 0 || plan.state_kinds().has(StateKind::kEma) ||
      config.snapshot_by == SnapshotBy::kCopy || plan.recipe.device == DeviceChoice::kCuda ||
      plan.shard_size() == plan.mesh.replicas())
    return {};
  std::vector<int64_t> out;
  std::vector<bool> taken(static_cast<size_t>(hosts), false);
  for (int64_t place = 0; place < hosts; ++place) {
    const std::vector<int64_t> alike = places_that_keep(plan, place, plan.mesh.world() / hosts);
    const int64_t at = std::ranges::find(alike, place) - alike.begin(), count = std::ssize(alike);
    const int64_t holder = alike[static_cast<size_t>((at + count / 2) % count)];
    if (holder == place || taken[static_cast<size_t>(holder)]) return {};
    taken[static_cast<size_t>(holder)] = true;
    out.push_back(holder);
  }
  return out;
}

}  // namespace cairn::ckpt
