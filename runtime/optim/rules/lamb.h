#pragma once
// LAMB over a rank's state: two passes (runtime/kernels/lamb.h), and between them the norms of whole tensors.

#include <span>

#include "runtime/comm/rank_groups.h"
#include "runtime/core/result.h"
#include "runtime/optim/rules/groups.h"
#include "runtime/optim/rules/update.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// `rates`: of the plan's tensors. Ranks add up the norms in the order of the device's work.
Status lamb(StateWalk& walk, std::span<const TensorRates> rates, const Update& update, const comm::RankGroups& groups);

}  // namespace cairn::optim
