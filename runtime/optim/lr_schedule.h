#pragma once
// Learning rate as a pure function of the step. Sources: Megatron-LM's optimizer_param_scheduler (warm-up, cosine,
// linear, inverse square root); warm-up, hold and a short decay: Hu et al. 2024 (WSD); one minus square root: Haegele
// et al. 2024.

#include <cstdint>
#include <span>

#include "runtime/config/recipe.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::optim {

/// The product of the factors that lower the rate of `step`; 1 without any.
double lowered_by(std::span<const LoweredRate> lowered, int64_t step);

/// The rate of optimizer step `step`, 1 for the first, of a run of `stop_steps`. Stages follow one another: warm-up
/// rises from 0 to the peak; cosine, linear, exponential and one minus square root go from the rate before them to
/// `to`; inverse square root falls as 1 / sqrt(step) from it, not below `to`; hold keeps it. A stage without a length
/// takes what the others leave of the run. Past the last stage the rate stays. Without stages it is the peak
/// throughout. The factors of watch.lowered_rates are in it.
///
/// In a run under way whose recipe has changed (`past`), spans in samples and tokens are read on what was really
/// consumed. With optimizer.lr_from = "stage" the schedule begins behind step past.lr_step at the rate past.lr, warm-up
/// rises from there, and fractions are of what remained of the run.
double learning_rate(const Recipe& recipe, int64_t step, int64_t stop_steps, const RunPast& past = {});

}  // namespace cairn::optim
