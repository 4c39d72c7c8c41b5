#pragma once
// Learning rate as a pure function of the step. Source: Megatron-LM's optimizer_param_scheduler (warm-up, cosine,
// linear), stated in docs/recipe.md.

#include <cstdint>

#include "runtime/config/recipe.h"

namespace cairn::optim {

/// The rate of optimizer step `step`, 1 for the first, of a run of `stop_steps`. Stages follow one another: warm-up
/// rises from 0 to the peak, cosine and linear go from the rate before them to `to`, hold keeps it; a stage without a
/// length lasts to the end of the run. Past the last stage the rate stays. Without stages it is the peak throughout.
double learning_rate(const Recipe& recipe, int64_t step, int64_t stop_steps);

}  // namespace cairn::optim
