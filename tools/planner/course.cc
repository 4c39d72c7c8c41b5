#include "tools/planner/course.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace cairn::tools {

size_t Course::last() const {
  size_t out = segments.size() - 1;
  while (out > 0 && segments[out].begin.step == segments[out].end.step) --out;
  return out;
}

std::pair<int64_t, int64_t> Course::tokens_per_step() const {
  int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
  for (size_t k = 0; k < plans.size(); ++k) {
    const dsl::RunSegment& segment = segments[k];
    if (k > 0 && segment.begin.step == segment.end.step) continue;
    const std::vector<StepStage>& stages = plans[k].step_stages;
    const size_t from = stage_of_step(stages, segment.begin.step + 1), to = stage_of_step(stages, segment.end.step);
    for (size_t s = from; s <= std::max(from, to); ++s) {
      least = std::min(least, stages[s].samples * segment.recipe.model.context);
      most = std::max(most, stages[s].samples * segment.recipe.model.context);
    }
  }
  return {least, most};
}

Result<Course> make_course(std::vector<dsl::RunSegment> segments, int64_t world) {
  Course out{.segments = std::move(segments), .plans = {}};
  for (const dsl::RunSegment& segment : out.segments) {
    Result<Plan> plan = make_plan(segment.recipe, world, segment.past);
    if (!plan.ok())
      return segment.stages == 0 ? std::move(plan).error()
                                 : std::move(plan).error().with(fmt::format("stages[{}]", segment.stages));
    plan.value().end_step = segment.end.step;
    out.plans.push_back(std::move(plan).value());
  }
  return out;
}

Plan in_last_phase(const Plan& plan) {
  return plan.at(plan.end_step > 0 ? stage_of_step(plan.step_stages, plan.end_step) : plan.step_stages.size() - 1);
}

}  // namespace cairn::tools
