#include "dsl/checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "dsl/stages.h"
#include "runtime/plan/recipe_rules.h"

namespace cairn::dsl {

Diagnostic to_diagnostic(Mistake mistake) {
  Diagnostic out;
  out.path = std::move(mistake.field);
  out.code = "cross_field";
  out.message = std::move(mistake.message);
  out.accepted = std::move(mistake.accepted);
  out.detail = std::move(mistake.detail);
  return out;
}

std::vector<Mistake> segment_mistakes(const Recipe& segment, int64_t world, const std::optional<RunPast>& past,
                                      const FieldNotes& notes) {
  if (past) return find_mistakes(segment, world, notes, *past);
  FieldNotes without_rates = notes;
  without_rates.known = [&](const std::string& field) {
    return field != "optimizer.lr" && (!notes.known || notes.known(field));
  };
  return find_mistakes(segment, world, without_rates);
}

std::vector<Diagnostic> check_recipe(const Recipe& recipe, int64_t world, const RunPast& past_of_run) {
  std::vector<Diagnostic> out;
  // The rules are about values that each passed their own check.
  if (const Result<Recipe> valid = decode_recipe(encode_recipe(recipe)); !valid.ok()) {
    Diagnostic bad;
    bad.code = "out_of_range";
    bad.message = valid.error().message;
    out.push_back(std::move(bad));
    return out;
  }
  const std::vector<Recipe> segments = recipe_segments(recipe).value();  // decoded above
  PastWalk walk(segments[0], past_of_run);
  for (size_t i = 0; i < segments.size(); ++i) {
    const std::optional<RunPast> past = i == 0 ? past_of_run : walk.enter(recipe.stages[i - 1], segments[i]);
    for (Mistake& mistake : segment_mistakes(segments[i], world, past)) {
      const bool told = std::any_of(out.begin(), out.end(), [&](const Diagnostic& known) {
        return known.path == mistake.field && known.message.ends_with(mistake.message);
      });
      if (told) continue;  // of an earlier segment
      if (i > 0) mistake.message = fmt::format("stages[{}]: {}", i, mistake.message);
      out.push_back(to_diagnostic(std::move(mistake)));
    }
  }
  if (auto wrong = stage_out_of_order(recipe, segments)) out.push_back(to_diagnostic(std::move(wrong->second)));
  return out;
}

}  // namespace cairn::dsl
