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

/// Where a run under way stood, after `step` steps, when it went on by a recipe that does not explain how it came
/// there.
struct PastPoint {
  int64_t step = 0;
  int64_t samples = 0, tokens = 0;  // consumed until then
  bool operator==(const PastPoint&) const = default;
};

/// What a position needs of a run's past, besides today's recipe, to go on from it. The same on every rank; empty for a
/// run whose recipe never changed.
struct RunPast {
  std::vector<PastPoint> points;  // ascending; those before the last serve spans that began there
  int64_t lr_step = 0;            // optimizer.lr_from = "stage": the step behind which the schedule began
  double lr = 0;                  // and the rate of that step
  /// Updates less those that the optimizer counts as its own. Positive: its moments began at zero on the way. Negative:
  /// another trainer's count was ahead of its steps, and the state was imported.
  int64_t moments_from = 0;
  bool operator==(const RunPast&) const = default;

  PastPoint origin() const { return points.empty() ? PastPoint{} : points.back(); }
};

/// Steps first_step, first_step + 1, ... up to the next stage.
struct StepStage {
  int64_t first_step = 1;
  int64_t samples_before = 0;  // consumed before first_step
  int64_t samples = 0;         // a step
  int64_t micro = 0;
  int64_t tokens = 0;  // of a sequence: model.context or a part of it
  double rope_theta = 0;

  /// Of each of `dp` replicas a step; in the last round some have no samples where they do not divide (batch.uneven).
  int64_t micro_batches(int64_t dp) const { return (samples + micro * dp - 1) / (micro * dp); }

  bool same_batch(const StepStage& other) const {
    return samples == other.samples && micro == other.micro && tokens == other.tokens && rope_theta == other.rope_theta;
  }
};

/// In order; the first begins behind the past's last point (step 1 without one), the last has no end. At least one.
/// Phases and ramp are read at that point: what lies before it counts as begun there. Spans of phases must not be
/// fractions.
std::vector<StepStage> step_stages(const Recipe& recipe, const RunPast& past = {});

/// Index of the stage of `step`.
size_t stage_of_step(const std::vector<StepStage>& stages, int64_t step);

/// Samples consumed once `step` steps are done.
int64_t samples_after(const std::vector<StepStage>& stages, int64_t step);

/// The first step after which at least so many samples are consumed; 0 for none.
int64_t steps_for_samples(const std::vector<StepStage>& stages, double samples);

/// What a run has consumed after any of its steps, those of its past included. Between two points of the past it is
/// taken to have grown evenly.
class RunClock {
 public:
  RunClock(const Recipe& recipe, const RunPast& past);

  int64_t samples(int64_t step) const { return at(step).samples; }
  int64_t tokens(int64_t step) const { return at(step).tokens; }
  PastPoint at(int64_t step) const;
  /// The first step after which at least so much is consumed; 0 for none.
  int64_t step_of_samples(double samples) const;
  int64_t step_of_tokens(double tokens) const;
  /// Steps from the beginning of the run that a span takes, rounded up; a fraction is of `stop_steps`.
  int64_t step_of(const Span& span, int64_t stop_steps) const;

 private:
  int64_t first_step_of(double value, int64_t PastPoint::*what) const;

  std::vector<PastPoint> points_;  // from {0, 0, 0} to the origin
  std::vector<StepStage> stages_;
  int64_t context_;
};

}  // namespace cairn
