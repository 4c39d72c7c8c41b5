#pragma once
// Mistakes across fields, found by the rules that the planner has too (runtime/plan/recipe_rules.h), as diagnostics.

#include <cstdint>
#include <optional>
#include <vector>

#include "dsl/dsl.h"
#include "runtime/config/mistake.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::dsl {

/// Without a place: whoever knows where the field was written adds it.
Diagnostic to_diagnostic(Mistake mistake);

/// Those of a recipe from one of its stages on, as a run will plan it there. `past`: of PastWalk (dsl/stages.h);
/// nothing: no rule reads optimizer.lr.
std::vector<Mistake> segment_mistakes(const Recipe& segment, int64_t world, const std::optional<RunPast>& past,
                                      const FieldNotes& notes = {});

}  // namespace cairn::dsl
