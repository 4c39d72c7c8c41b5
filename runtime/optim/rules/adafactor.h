#pragma once
// Adafactor over a rank's state: squares of gradients are added up over the rows and columns of whole tensors, the
// factored second moments go on and leave their factors, and these give the steps (runtime/kernels/adafactor.h), whose
// norms are again of whole tensors. Ranks add up both in the order of the device's work.

#include <span>

#include "runtime/comm/rank_groups.h"
#include "runtime/core/result.h"
#include "runtime/optim/rules/groups.h"
#include "runtime/optim/rules/update.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// `rates`: of the plan's tensors. `groups`: of the rank; tp, shard and expert_shard add up squares.
Status adafactor(StateWalk& walk, std::span<const TensorRates> rates, const Update& update,
                 const comm::RankGroups& groups);

}  // namespace cairn::optim
