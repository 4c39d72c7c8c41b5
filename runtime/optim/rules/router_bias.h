#pragma once
// Biases of routers that balance experts (TensorSpec::balances; Wang et al. 2024, DeepSeek-V3). No gradient trains
// them: where that would lie are how many tokens chose each expert. So this is their rule, beside the optimizer's.

#include <span>

#include "runtime/optim/rules/groups.h"
#include "runtime/optim/rules/update.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// Each bias goes a step of moe.bias_rate towards as many choices as the others have; their moments stay. `rates`: of
/// the plan's tensors; a rate of 0 keeps a tensor as it is.
void router_bias(StateWalk& walk, std::span<const TensorRates> rates, const Update& update);

}  // namespace cairn::optim
