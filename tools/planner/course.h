#pragma once
// A run with its stages, segment by segment, each with the plan by which its ranks train. Pure.

#include <cstdint>
#include <utility>
#include <vector>

#include "dsl/stages.h"
#include "runtime/core/result.h"
#include "runtime/plan/plan.h"

namespace cairn::tools {

struct Course {
  std::vector<dsl::RunSegment> segments;  // that remain, at least one; a later one may have no step
  std::vector<Plan> plans;                // of each, with its end_step

  /// Steps of the run, all its stages counted.
  int64_t run_steps() const { return segments.back().end.step; }
  /// Index of the segment of the run's last step.
  size_t last() const;
  /// The least and the most tokens of a step that is ahead.
  std::pair<int64_t, int64_t> tokens_per_step() const;
};

/// `segments`: of dsl::segments_ahead, their devices settled. Errors: kInvalidInput naming a segment's stage that this
/// world cannot train.
Result<Course> make_course(std::vector<dsl::RunSegment> segments, int64_t world);

/// The plan in the batch phase of the last step that it trains. A run whose stop is not known: in the last phase.
Plan in_last_phase(const Plan& plan);

}  // namespace cairn::tools
