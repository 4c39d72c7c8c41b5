#pragma once
// How the batch changes over a run: batch.ramp and batch.phases, as stages of steps with everything fixed. Pure.
//
// A sample stays model.context tokens, so what has been consumed is a number of samples whatever the stage, and the
// data order knows nothing of stages. Shorter sequences are pieces of a sample: attention and positions begin anew in
// each. Source of the ramp: Megatron-LM's rampup_batch_size.

#include <cstdint>
#include <vector>

#include "runtime/config/recipe.h"

namespace cairn {

/// Steps first_step, first_step + 1, ... up to the next stage.
struct StepStage {
  int64_t first_step = 1;
  int64_t samples_before = 0;  // consumed before first_step
  int64_t samples = 0;         // a step
  int64_t micro = 0;
  int64_t tokens = 0;  // of a sequence: model.context or a part of it
  double rope_theta = 0;

  bool same_batch(const StepStage& other) const {
    return samples == other.samples && micro == other.micro && tokens == other.tokens && rope_theta == other.rope_theta;
  }
};

/// In order; the first begins at step 1, the last has no end. At least one. Spans of phases must not be fractions.
std::vector<StepStage> step_stages(const Recipe& recipe);

/// Index of the stage of `step`.
size_t stage_of_step(const std::vector<StepStage>& stages, int64_t step);

/// Samples consumed once `step` steps are done.
int64_t samples_after(const std::vector<StepStage>& stages, int64_t step);

/// The first step after which at least so many samples are consumed; 0 for none.
int64_t steps_for_samples(const std::vector<StepStage>& stages, double samples);

}  // namespace cairn
