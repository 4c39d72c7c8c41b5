#pragma once
// The pinned memory that a rank's communication takes in training where it is staged through the host: from the plan
// alone. Of experts' rows the worst case, as the plan has it for the device.

#include "runtime/device/staging_rooms.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

StagingRooms staging_rooms(const Plan& plan, int64_t rank);

}  // namespace cairn::trainer
