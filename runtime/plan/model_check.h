#pragma once
// Whether a model can exist: what its options demand of each other, whoever wrote them (a recipe, a converter).

#include <string>
#include <vector>

#include "runtime/config/recipe.h"

namespace cairn {

struct ModelMistake {
  std::string field;     // "model.rope.dims"
  std::string message;   // names the field, the values and what is wrong
  std::string accepted;  // what would do, may be empty: "head_dim 6 or 8"
};

/// All mistakes, in the order of the fields. Sizes are > 0 already; kv_heads is the layout's business. Pure.
std::vector<ModelMistake> find_mistakes(const ModelConfig& model);

}  // namespace cairn
