#pragma once
// AdamW over a rank's state: one fused pass (runtime/kernels/adamw.h).

#include <span>

#include "runtime/config/optimizer.h"
#include "runtime/kernels/adamw.h"
#include "runtime/optim/rules/groups.h"
#include "runtime/optim/rules/update.h"
#include "runtime/optim/walk/state_walk.h"

namespace cairn::optim {

/// Of a tensor, for AdamW and for LAMB, which scales Adam's step.
kernels::AdamwArgs adamw_args(const OptimizerConfig& config, const TensorRates& rates, const Update& update);

/// `rates`: of the plan's tensors.
/// The runs of a batch, each with the place of its weights in the compute dtype.
std::vector<kernels::AdamRun> adam_runs(StateWalk& walk, std::span<const TensorRates> rates, const Update& update,
                                        std::span<const StateBlock> batch);

void adamw(StateWalk& walk, std::span<const TensorRates> rates, const Update& update);

}  // namespace cairn::optim
