#pragma once
// The axis below a curve in characters.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::telemetry {

/// Curves are drawn within these bounds: sums and differences of such values are finite.
inline constexpr double kDrawnBound = 8e307;

/// A value beside an axis in 7 columns; large and negative ones take up to 11.
std::string axis_number(double value);

/// Two lines: a rule with a tick at round steps, and the steps below it. `steps`: the first step of each column,
/// ascending; `last`: the last step of all, which ends the line. `margin`: columns before the rule's corner. The first
/// and the last step have a label; one between them only where a space stays free on both sides.
std::string draw_step_axis(const std::vector<int64_t>& steps, int64_t last, int64_t margin, bool utf8);

}  // namespace cairn::telemetry
