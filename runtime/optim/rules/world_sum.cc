#include "runtime/optim/rules/world_sum.h"

#include <vector>

namespace cairn::optim {
namespace {

std::vector<comm::Comm*> groups_of_several(const comm::RankGroups& groups) {
  std::vector<comm::Comm*> out;
  for (comm::Comm* const group : {groups.tp, groups.shard, groups.replica, groups.activations}) {
    if (group != nullptr && group->size() > 1) out.push_back(group);
  }
  return out;
}

}  // namespace

bool has_other_ranks(const comm::RankGroups& groups) { return !groups_of_several(groups).empty(); }

Status add_over_world(const comm::RankGroups& groups, DevicePtr<double> words, int64_t count, std::string_view what) {
  for (comm::Comm* const group : groups_of_several(groups)) {
    RT_TRY(group->all_reduce(words, count, DType::kF64, comm::ReduceOp::kSum, what));
  }
  return {};
}

Status max_over_world(const comm::RankGroups& groups, DevicePtr<float> x, int64_t count, std::string_view what) {
  for (comm::Comm* const group : groups_of_several(groups)) {
    RT_TRY(group->all_reduce(x, count, DType::kF32, comm::ReduceOp::kMax, what));
  }
  return {};
}

}  // namespace cairn::optim
