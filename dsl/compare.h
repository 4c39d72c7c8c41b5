#pragma once
// What differs between two recipes, field by field, named as a recipe writes it. Pure.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsl/schema.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace cairn::dsl {

struct FieldChange {
  std::string path;                        // "optimizer.peak_lr", "checkpoint.save", "data.web.weight"
  std::string before, after;               // as a recipe writes it (lua_text); empty where a source was not there
  nlohmann::json before_json, after_json;  // the stored value; null where a source was not there
};

/// Every field that differs, in the schema's order; empty when the canonical JSON of both is the same.
///
/// Lists (optimizer.lr, batch.phases, checkpoint.keep, stages...) and the tokenizer are one field each. Sources of data
/// are matched by name. "data.NAME": it was added, removed or is of another kind. "data.NAME.FIELD": a field of one
/// that stayed. "data.sources": another order of those that stayed (values: lists of names).
std::vector<FieldChange> compare_recipes(const Recipe& before, const Recipe& after);

/// `recipe` with the value that `change` goes to. Errors: kInvalidInput for a field of a data source, and for one that
/// the recipe then does not decode with.
Status set_field(Recipe& recipe, const FieldChange& change);

/// A value that the canonical JSON holds by itself: no block of fields, but lists as a whole.
struct StoredValue {
  std::string path;  // as a recipe writes it
  std::string key;   // in the canonical JSON: "checkpoint.snapshot_steps" where a recipe writes checkpoint.snapshot
  const Field* field = nullptr;
  Json value;
};

/// All of them in the schema's order, also those that the JSON leaves out at their defaults; without `stages`.
std::vector<StoredValue> stored_values(const Recipe& recipe);

/// The field at a key path of the canonical JSON, if it is such a value; else null.
const Field* find_stored(std::string_view key);

}  // namespace cairn::dsl
