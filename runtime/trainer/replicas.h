#pragma once
// Whether replicas hold the same weights, bit for bit: watch.replicas. Each rank hashes the weights that its forward
// reads, the hashes go to all ranks, and those with the same weights vote. ZeRO-3 divides weights: the ranks that hold
// the same part are compared.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/device/pointer.h"
#include "runtime/device/stream.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

/// Weights by the other ranks that hold them: replicas; replicas and all tp ranks; replicas of a part of the experts.
enum class HeldBy { kReplicas, kReplicasAndTp, kExpertReplicas };
inline constexpr size_t kHeldByCount = 3;
using ReplicaHashes = std::array<uint64_t, kHeldByCount>;

/// The ranks that hold what `rank` does of that kind, itself among them, ascending; empty: the plan has no such
/// weights.
std::vector<int64_t> holders(const Plan& plan, int64_t rank, HeldBy kind);

/// Hashes the rank's weights (optim::Arrays::weights). Padding does not count. Settles the stream; its errors.
Result<ReplicaHashes> hash_replicas(Stream& stream, const Plan& plan, const RankPlan& rank,
                                    DevicePtr<const std::byte> weights);

struct ReplicaVote {
  std::vector<int64_t> ranks;  // whose weights are not those of the most ranks that hold them; ascending
  bool tied = false;           // in some vote no set of ranks was the largest, and `ranks` has all of these
  bool operator==(const ReplicaVote&) const = default;
};

/// `of_rank`: of each rank of the plan. Pure.
ReplicaVote vote(const Plan& plan, std::span<const ReplicaHashes> of_rank);

}  // namespace cairn::trainer
