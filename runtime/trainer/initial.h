#pragma once
// The weights that a model has before any training.

#include <cstdint>

#include "runtime/core/shape.h"
#include "runtime/kernels/state_copies.h"
#include "runtime/plan/plan.h"

namespace cairn::trainer {

/// The initial weights of a box of a tensor, row-major: counter-based normals keyed by (seed, tensor's name, global
/// element), so that every layout starts from the same model. A kernel draws them (kernels::draw_weights()).
kernels::FirstWeights first_weights(const Plan& plan, int64_t tensor, const Box& box);
/// The same drawn into memory of the host.
void initial_weights(const Plan& plan, int64_t tensor, const Box& box, float* out);

}  // namespace cairn::trainer
