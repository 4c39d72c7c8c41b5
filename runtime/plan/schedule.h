#pragma once
// Pipeline schedules as pure lists of actions; one executor (runtime/pipeline) runs any of them.
//
// Terms. The model is cut into pp * v *stages* in model order; rank r of the pipeline holds v of them, its *chunks*:
// chunk c is stage c * pp + r. v = 1 but for the interleaved schedule.
// Sources: GPipe (Huang et al. 2019); 1F1B as in PipeDream-Flush: warm-up of min(pp - r - 1, m) forwards, then pairs of
// one forward and one backward, then the remaining backwards; interleaved 1F1B (Narayanan et al. 2021): micro-batches
// go through the chunks in groups of pp, warm-up of min(2 (pp - r - 1) + (v - 1) pp, m v) forwards, or all when m = pp.

#include <cstdint>
#include <vector>

#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace cairn {

enum class ActionKind { kForward, kBackward };

struct Action {
  ActionKind kind = ActionKind::kForward;
  int64_t micro_batch = 0;
  int64_t chunk = 0;
  int64_t slot = 0;  // of the chunk's activations; a backward names the slot of its forward
  bool operator==(const Action&) const = default;
};

struct ScheduleShape {
  PipelineKind kind = PipelineKind::k1F1B;
  int64_t pp = 1;
  int64_t micro_batches = 1;
  int64_t chunks = 1;  // of a rank
};

/// What the recipe asks of the pipeline when a step has that many micro-batches on a replica.
ScheduleShape schedule_shape(const Recipe& recipe, int64_t micro_batches);

/// Refuses what cannot run: chunks without the interleaved schedule, and micro-batches that are no multiple of pp with
/// it (ranks would wait for each other for ever). Errors: kInvalidInput, with the nearest values that work.
Status check_schedule(const ScheduleShape& shape);

/// What rank `rank` of the pipeline does in one step, in order. In each chunk forwards and backwards run in micro-batch
/// order, so gradients are summed in the same order under every schedule and every pp.
std::vector<Action> schedule_actions(const ScheduleShape& shape, int64_t rank);

/// The forwards of schedule_actions alone, in an order that needs one slot a chunk: for evaluation.
std::vector<Action> forward_actions(const ScheduleShape& shape);

/// Micro-batches whose activations each chunk of `rank` holds at once.
std::vector<int64_t> in_flight_micro_batches(const ScheduleShape& shape, int64_t rank);

/// Fraction of a step that the pipeline idles when every stage takes equally long: (pp - 1) / (m v + pp - 1).
double bubble_fraction(const ScheduleShape& shape);

/// One action on the clock.
struct TimedAction {
  Action action;
  double begin = 0, end = 0;
};

/// What happens when each forward of a stage takes `forward` and each backward `backward` units and messages take no
/// time. Returns the actions of each rank with their times. Errors: kInternal when ranks wait for each other for ever.
Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape, double forward,
                                                                double backward);

}  // namespace cairn
