#pragma once
// The rules of a recipe: everything that its fields demand of each other and of the number of ranks, once. The recipe
// language (dsl/checks.h) reports all of them with file and line, make_plan() refuses with the first. So a recipe that
// `cairn check --world N` accepts is one that make_plan(recipe, N) plans, and the other way round.
//
// A recipe with stages is several to these rules, one from each stage on; dsl/stages.h makes them, and has the rules of
// the stages themselves.
//
// A rule about one field alone (its type, its range) is the schema's business (dsl/schema.h): here values have passed
// it. Only sizes that rules divide by are looked at again, since a Recipe may come from anywhere.
//
// Files by topic, each adds to a RuleList (runtime/plan/rule_list.h): model_rules, layout_rules, batch_rules,
// run_rules; what else can be asked apart has a find_mistakes() of its own: model_check.h, objective_check.h,
// schedule.h, mesh.h.

#include <cstdint>
#include <vector>

#include "runtime/config/mistake.h"
#include "runtime/config/recipe.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn {

/// All mistakes of `recipe` on `world` ranks, each once, without those that only follow from another; empty: it can be
/// planned and run. `world` 0: unknown, and what depends on it is left out unless no world would do. `past`: of a run
/// under way, whose batch and rates are looked at from its position on. Pure, and cheap where there is no mistake: a
/// search over layouts calls it for each.
std::vector<Mistake> find_mistakes(const Recipe& recipe, int64_t world, const FieldNotes& notes = {},
                                   const RunPast& past = {});

}  // namespace cairn
