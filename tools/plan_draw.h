#pragma once
// A pipeline schedule as a picture: one row a rank, time from left to right, forward 1 unit and backward 2, its halves
// 1 each where the schedule splits it.

#include <string>

#include "runtime/core/result.h"
#include "runtime/plan/schedule.h"
#include "tools/commands.h"

namespace cairn::tools {

/// For a terminal of `columns`: `3>` is the forward of micro-batch 3, `<3` its backward, `3w` the half of it that is
/// for the weights, dots are the bubble. What does not fit is left out at the right, and said so. Chunks are told apart
/// by a letter (`3a>`).
Result<std::string> draw_schedule(const ScheduleShape& shape, int64_t columns, const Palette& color);

/// The same as one SVG document.
Result<std::string> schedule_svg(const ScheduleShape& shape, const std::string& title);

}  // namespace cairn::tools
