#pragma once
// Measures this host for `cairn plan` (tools/planner/calibration.h says what and why).

#include "runtime/core/result.h"
#include "runtime/plan/plan.h"
#include "tools/planner/calibration.h"

namespace cairn::tools {

/// Measures the plan's shape, some seconds. Errors: kInvalidInput for a model too large for this machine, and for a run
/// that cannot be made smaller.
Status calibrate(const Plan& plan, Calibration* calibration);

/// Into calibration_path(). Errors: the system's.
Status save_calibration(const Calibration& calibration);

}  // namespace cairn::tools
