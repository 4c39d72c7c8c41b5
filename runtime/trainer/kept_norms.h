#pragma once
// Whether a rank's device has room for norms' outputs, which save the backward pass computing them again.

#include <cstdint>

#include "runtime/device/machine.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

/// Plan::keeps_norms of a rank: what it reserves with them fits its part of the device, which `device_ranks` share in
/// equal parts, beside kDeviceReserveBytes. False where the device does not say how much memory it has. `plan` and
/// `machine` as of trainer::run(), before it.
bool norms_fit(const Plan& plan, int64_t rank, const Machine& machine, int64_t device_ranks);

}  // namespace cairn::trainer
