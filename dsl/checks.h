#pragma once
// Mistakes across fields, found by the rules that the planner has too (runtime/plan/recipe_rules.h), as diagnostics.

#include "dsl/dsl.h"
#include "runtime/config/mistake.h"

namespace cairn::dsl {

/// Without a place: whoever knows where the field was written adds it.
Diagnostic to_diagnostic(Mistake mistake);

}  // namespace cairn::dsl
