#include "dsl/checks.h"

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

std::vector<Diagnostic> check_recipe(const Recipe& recipe, int64_t world) {
  std::vector<Diagnostic> out;
  // The rules are about values that each passed their own check.
  if (const Result<Recipe> valid = decode_recipe(encode_recipe(recipe)); !valid.ok()) {
    Diagnostic bad;
    bad.code = "out_of_range";
    bad.message = valid.error().message;
    out.push_back(std::move(bad));
    return out;
  }
  for (Mistake& mistake : find_mistakes(recipe, world)) out.push_back(to_diagnostic(std::move(mistake)));
  return out;
}

}  // namespace cairn::dsl
