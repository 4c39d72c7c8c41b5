#pragma once
// Exact sums (runtime/core/exact_sum.h) and maxima of all ranks, made where the numbers lie, in the order of the
// device's work: over tp, over shards and replicas, over pp.

#include <string_view>

#include "runtime/comm/rank_groups.h"

namespace cairn::optim {

/// Whether these send anything.
bool has_other_ranks(const comm::RankGroups& groups);

/// words [count] become those of all ranks. Integers below 2^53 / ranks, or not finite, so that no order changes a bit.
Status add_over_world(const comm::RankGroups& groups, DevicePtr<double> words, int64_t count, std::string_view what);
/// x [count] becomes the largest of all ranks.
Status max_over_world(const comm::RankGroups& groups, DevicePtr<float> x, int64_t count, std::string_view what);

}  // namespace cairn::optim
