#include "runtime/trainer/sum_rooms.h"

#include <algorithm>

#include "runtime/trainer/staging_rooms.h"

namespace cairn::trainer {
namespace {

// At 400 GB/s between devices 32 MiB take 80 us, ten times what a launch does: no larger room makes an operation
// faster.
constexpr int64_t kMost = int64_t{32} << 20;
constexpr int64_t kMostMaxima = int64_t{1} << 20;
constexpr int64_t kLeastOfRank = 256;  // NcclRooms

/// NCCL adds in memory of its own. Here lie maxima, in parts if they must, and whole what is added to what is there.
SumRooms with_nccl_sums(const Plan& plan, const SumRooms& ranked) {
  SumRooms out{.own_bytes = std::min(ranked.own_bytes, kMostMaxima), .beside_bytes = 0};
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
    const RankPlan rank = plan.rank(plan.mesh.rank({.pp = pp}));
    if (!rank.scattered_grads) continue;
    for (const Bucket& bucket : rank.buckets) {
      if (plan.shard_size(bucket.experts) > 1) out.beside_bytes = std::max(out.beside_bytes, bucket.shard.size() * 4);
    }
  }
  return out;
}

}  // namespace

SumRooms sum_rooms(const Plan& plan) {
  const int64_t world = plan.mesh.world();
  if (world == 1) return {};
  SumRooms out;
  for (int64_t pp = 0; pp < plan.mesh.pp(); ++pp) {
    // What would be staged is no less than what is summed.
    const StagingRooms staged = staging_rooms(plan, plan.mesh.rank({.pp = pp}));
    out.own_bytes = std::max(out.own_bytes, staged.own_bytes);
    out.beside_bytes = std::max(out.beside_bytes, staged.lane_bytes);
  }
  for (int64_t* const bytes : {&out.own_bytes, &out.beside_bytes}) *bytes = std::min(*bytes, kMost);
  if (plan.recipe.sums == Sums::kNccl) out = with_nccl_sums(plan, out);
  for (int64_t* const bytes : {&out.own_bytes, &out.beside_bytes}) *bytes = std::max(*bytes, world * kLeastOfRank);
  return out;
}

}  // namespace cairn::trainer
