#pragma once
// The memory of a device in which a rank of a training sums what the others send it, where they communicate from device
// to device: from the plan alone.

#include "runtime/device/sum_rooms.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

/// Of every rank the same, since the ranks of a group cut an operation by the room that each of them has.
SumRooms sum_rooms(const Plan& plan);

}  // namespace cairn::trainer
