#pragma once
// The largest work of a rank's kernels, and what the host gives to its device in a step: from the plan alone.

#include "runtime/device/machine.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

WorkShapes work_shapes(const Plan& plan, int64_t rank);

/// Of one pass forward, whole texts or tokens with a cache, whose logits or losses the host is told.
WorkShapes forward_shapes(const Plan& plan, const RankPlan& rank);

}  // namespace cairn::trainer
