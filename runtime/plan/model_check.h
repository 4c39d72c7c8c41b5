#pragma once
// Whether a model can exist: what its options demand of each other, whoever wrote them (a recipe, a converter).

#include <vector>

#include "runtime/config/mistake.h"
#include "runtime/config/model.h"

namespace cairn {

/// All mistakes, in the order of the fields. Sizes are > 0 already; kv_heads is the layout's business. Pure.
std::vector<Mistake> find_mistakes(const ModelConfig& model);

}  // namespace cairn
