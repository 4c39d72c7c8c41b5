#include "runtime/trainer/replicas.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "runtime/core/dtype.h"
#include "runtime/core/random.h"
#include "runtime/core/word_sums.h"
#include "runtime/device/host_numbers.h"
#include "runtime/kernels/state_ops.h"

namespace cairn::trainer {
namespace {

constexpr int64_t kRunBytes = 4 << 20;  // that go to the host at once
constexpr int64_t kWordBytes = 4;

uint64_t hash_bytes(const std::byte* data, int64_t count) {
  const int64_t words = count / kWordBytes, rest = count % kWordBytes;
  uint64_t sums = word_sums(data, words);
  if (rest == 0) return sums;
  std::array<std::byte, kWordBytes> last = {};
  std::copy_n(data + words * kWordBytes, rest, last.begin());
  return add_word_sums(sums, word_sums(last.data(), 1, words));
}

/// Hashes what a device holds, run by run. Where a run begins in a word changes nothing.
class WeightHasher {
 public:
  WeightHasher(Stream& stream, DevicePtr<const std::byte> weights)
      : on_(kernels::state_exec_on(stream)), weights_(weights), room_(stream, kRunBytes / kWordBytes + 1) {}

  /// Adds bytes [begin, end) to `hash`.
  Status add(int64_t begin, int64_t end, uint64_t* hash) {
    for (int64_t at = begin; at < end; at += kRunBytes) {
      const int64_t until = std::min(end, at + kRunBytes), word = at / kWordBytes * kWordBytes;
      on_.floats_to_host((weights_ + word).as<const float>(),
                         room_.room(0, (until - word + kWordBytes - 1) / kWordBytes));
      RT_TRY(on_.stream.settle());
      const auto* const bytes = reinterpret_cast<const std::byte*>(room_.read().data());
      *hash = mix64(*hash ^ hash_bytes(bytes + (at - word), until - at));
    }
    return {};
  }

 private:
  kernels::StateExec on_;
  DevicePtr<const std::byte> weights_;
  HostNumbers<float> room_;
};

HeldBy kind_of(const Plan& plan, const RankPlan& rank, const LocalTensor& local, bool experts) {
  if (experts && plan.mesh.ep() > 1) return HeldBy::kExpertReplicas;
  const bool whole = plan.tensors[static_cast<size_t>(local.tensor)].cut == TensorCut::kReplicated;
  return whole && plan.mesh.tp() > 1 && !rank.scattered_weights ? HeldBy::kReplicasAndTp : HeldBy::kReplicas;
}

}  // namespace

std::vector<int64_t> holders(const Plan& plan, int64_t rank, HeldBy kind) {
  const Mesh& mesh = plan.mesh;
  const bool scattered = plan.zero() >= 3;
  switch (kind) {
    case HeldBy::kReplicas:
      return mesh.replica_group(rank, scattered ? plan.shard_size() : 1);
    case HeldBy::kExpertReplicas:
      if (mesh.ep() == 1) return {};
      return mesh.replica_group(rank, scattered ? plan.shard_size(true) : 1, true);
    case HeldBy::kReplicasAndTp:
      break;
  }
  std::vector<int64_t> out;
  if (mesh.tp() == 1 || scattered) return out;
  for (const int64_t other : mesh.group(MeshAxis::kTp, rank)) {
    const std::vector<int64_t> more = mesh.replica_group(other, 1);
    out.insert(out.end(), more.begin(), more.end());
  }
  std::ranges::sort(out);
  return out;
}

Result<ReplicaHashes> hash_replicas(Stream& stream, const Plan& plan, const RankPlan& rank,
                                    DevicePtr<const std::byte> weights) {
  const int64_t elem = dtype_size_bytes(plan.compute_dtype());
  WeightHasher hasher(stream, weights);
  ReplicaHashes out = {};
  for (const Bucket& bucket : rank.buckets) {
    const FlatRange held = rank.scattered_weights ? bucket.shard : bucket.range;
    const int64_t moved = rank.scattered_weights ? bucket.shard_offset - bucket.shard.begin : 0;
    for (const LocalTensor& local : rank.tensors) {
      const int64_t begin = std::max(local.offset, held.begin);
      const int64_t end = std::min(local.offset + local.box.count_elems(), held.end);
      if (begin >= end) continue;
      const auto kind = static_cast<size_t>(kind_of(plan, rank, local, bucket.experts));
      RT_TRY(hasher.add((begin + moved) * elem, (end + moved) * elem, &out[kind]));
    }
  }
  return out;
}

ReplicaVote vote(const Plan& plan, std::span<const ReplicaHashes> of_rank) {
  std::set<int64_t> differ;
  bool tied = false;
  for (int64_t rank = 0; rank < std::ssize(of_rank); ++rank) {
    for (size_t kind = 0; kind < kHeldByCount; ++kind) {
      const std::vector<int64_t> group = holders(plan, rank, static_cast<HeldBy>(kind));
      if (group.size() < 2 || group.front() != rank) continue;  // each group votes once
      std::map<uint64_t, std::vector<int64_t>> sides;
      for (const int64_t one : group) sides[of_rank[static_cast<size_t>(one)][kind]].push_back(one);
      if (sides.size() < 2) continue;
      size_t most = 0;
      for (const auto& [hash, side] : sides) most = std::max(most, side.size());
      const bool none = std::ranges::count_if(sides, [&](const auto& one) { return one.second.size() == most; }) > 1;
      tied = tied || none;
      for (const auto& [hash, side] : sides) {
        if (none || side.size() < most) differ.insert(side.begin(), side.end());
      }
    }
  }
  return {.ranks = {differ.begin(), differ.end()}, .tied = tied};
}

}  // namespace cairn::trainer
