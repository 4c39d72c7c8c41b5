#pragma once
// The largest work of a rank's kernels, and what the host gives to its device in a step: from the plan alone.

#include "runtime/device/machine.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

WorkShapes work_shapes(const Plan& plan, int64_t rank);

}  // namespace cairn::trainer
