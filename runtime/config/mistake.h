#pragma once
// What is wrong with a recipe, as data. A rule is written once (runtime/plan/recipe_rules.h) and reports Mistakes; the
// recipe language adds where a person wrote the field, the planner refuses with the first one.

#include <functional>
#include <string>

#include "runtime/core/error.h"

namespace cairn {

struct Mistake {
  std::string field;     // the one to change, as a recipe names it: "model.rope.dims", "optimizer.lr[2]"
  std::string message;   // names the fields, their values and what is wrong
  std::string accepted;  // what would do, may be empty: "head_dim 6 or 8"
  std::string detail;    // where a number comes from that no field says, may be empty: "dp = world 8 / tp 2 = 4"
};

/// What the reader of a recipe knows besides its values. Unset functions: every field is known, was set, and has no
/// place.
struct FieldNotes {
  std::function<bool(const std::string& field)> known;   // false: missing or mistaken, no rule reads it
  std::function<bool(const std::string& field)> is_set;  // by a person, not by a default
  std::function<std::string(const std::string& from, const std::string& field)> where;  // " (file:line)" of `field`,
                                                                                        // seen from `from`; or ""
};

/// kInvalidInput: "message (detail); accepted: ...".
inline Error to_error(const Mistake& mistake) {
  std::string text = mistake.message;
  if (!mistake.detail.empty()) text += " (" + mistake.detail + ")";
  if (!mistake.accepted.empty()) text += "; accepted: " + mistake.accepted;
  return Error{ErrorCode::kInvalidInput, std::move(text)};
}

}  // namespace cairn
