#pragma once
// Whether a model can be trained for an objective: what the two demand of each other.

#include <vector>

#include "runtime/config/data.h"
#include "runtime/config/mistake.h"
#include "runtime/config/model.h"

namespace cairn {

/// All mistakes. `sequence_tokens`: the shortest sequences of the run. Pure.
std::vector<Mistake> find_mistakes(const ObjectiveConfig& objective, const ModelConfig& model, int64_t sequence_tokens);

}  // namespace cairn
