#pragma once
// The weights that a model has before any training.

#include <cstdint>

#include "runtime/core/shape.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

/// Fills `out` with the initial weights of a box of a tensor, row-major: counter-based normals keyed by (seed, tensor's
/// name, global element), so that every layout starts from the same model.
void initial_weights(const Plan& plan, int64_t tensor, const Box& box, float* out);

}  // namespace cairn::trainer
