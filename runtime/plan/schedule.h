#pragma once
// Pipeline schedules as pure lists of actions; one executor (runtime/pipeline) runs any of them.
//
// Terms. The model is cut into pp * v *stages* in model order; a pipeline rank holds v of them, its *chunks*. Where
// they lie is a function of the schedule: in loops (chunk c of rank r is stage c * pp + r), or, for ZB-V, as a V (chunk
// 0 of rank r is stage r, chunk 1 is stage 2 pp - 1 - r: the first and the last stage share rank 0). A backward is one
// pass, or two: the gradient of the input, which the stage before waits for, and the gradients of the weights, which
// nobody waits for until the step ends. Zero-bubble schedules fill idle time with the second.
//
// Sources. GPipe: Huang et al. 2019. 1F1B: PipeDream-Flush, a warm-up of min(pp - r - 1, m) forwards, then pairs of one
// forward and one backward, then the remaining backwards. Interleaved 1F1B: Narayanan et al. 2021, and Megatron-Core's
// microbatch_group_size_per_vp_stage g: micro-batches go through the chunks in groups of g (pp unless set; the last may
// be short), warm-up of min(2 (pp - r - 1) + (v - 1) g, m v) forwards, or all when m = pp. ZB-H1 and ZB-V: Qi et al.,
// Zero Bubble Pipeline Parallelism, 2023, sections 2 and 6: in
// memory for activations about that of 1F1B (ZB-V: half a stage's more).

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/config/mistake.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"

namespace cairn {

enum class ActionKind {
  kForward,
  kBackward,        // both of the following at once
  kBackwardInput,   // the gradient of the stage's input, and of what has no input to pass it on to
  kBackwardWeight,  // the gradients of the weights of the same micro-batch, later
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int64_t micro_batch = 0;
  int64_t chunk = 0;
  int64_t slot = 0;  // of the chunk's activations; the backwards name the slot of their forward
  int64_t late = 0;  // kBackwardInput, kBackwardWeight: the slot of what the second needs from the first
  bool operator==(const Action&) const = default;
};

struct ScheduleShape {
  PipelineKind kind = PipelineKind::k1F1B;
  int64_t pp = 1;
  int64_t micro_batches = 1;
  int64_t chunks = 1;  // of a rank
  int64_t group = 0;   // interleaved: micro-batches that pass a chunk before the next chunk's turn; 0: pp
};

/// What the recipe asks of the pipeline when a step has that many micro-batches on a replica.
ScheduleShape schedule_shape(const Recipe& recipe, int64_t micro_batches);

/// "1f1b", as a recipe writes it.
const char* schedule_name(PipelineKind kind);

/// Some of its backwards are two actions.
bool splits_backward(PipelineKind kind);

/// The stage that is chunk `chunk` of pipeline rank `rank`, and back.
int64_t stage_at(const ScheduleShape& shape, int64_t rank, int64_t chunk);
struct StagePlace {
  int64_t rank = 0, chunk = 0;
};
StagePlace place_of(const ScheduleShape& shape, int64_t stage);

/// Why it cannot run: chunks that the schedule does not have, and micro-batches (0: unknown) that leave a group of the
/// interleaved schedule with fewer than pp (ranks would wait for each other for ever). Pure.
std::vector<Mistake> find_mistakes(const ScheduleShape& shape, const FieldNotes& notes = {});

/// What rank `rank` of the pipeline does in one step, in order. In each chunk the actions of a kind run in micro-batch
/// order, so gradients are summed in the same order under every schedule and every pp.
std::vector<Action> schedule_actions(const ScheduleShape& shape, int64_t rank);

/// The forwards of schedule_actions alone, all in slot 0: for evaluation.
std::vector<Action> forward_actions(const ScheduleShape& shape, int64_t rank);

/// The shape with no more micro-batches than show what it ever holds at once (the functions below take no other): its
/// beginning, its steady part and its end, where the last group is cut as in `shape`. A ramp asks for hundreds of
/// shapes, and few of these differ.
ScheduleShape long_enough(const ScheduleShape& shape);

/// Micro-batches whose activations each chunk of `rank` holds at once: from the forward to the end of the last
/// backward.
std::vector<int64_t> in_flight_micro_batches(const ScheduleShape& shape, int64_t rank);

/// Of those, the most that are between their two backwards at once, the running ones included; 0 without split ones.
std::vector<int64_t> late_micro_batches(const ScheduleShape& shape, int64_t rank);

/// Boundary tensors that a rank needs so that no send makes an action wait: rings of buffers, one ring for each
/// destination of a direction, and one buffer to receive into for each direction.
struct BoundaryBuffers {
  int64_t rings = 1;                       // of each direction
  int64_t activations = 1, gradients = 1;  // buffers of a ring
  int64_t total() const { return 2 + rings * (activations + gradients); }
};
/// Of all ranks the most, when forwards and the two backwards take equally long. With fewer buffers ranks would wait
/// for room; with these, unequal times may still make them wait but never for ever.
BoundaryBuffers boundary_buffers(const ScheduleShape& shape);

/// How long the passes of one stage take, in any unit.
struct PassTimes {
  double forward = 1, backward_input = 1, backward_weight = 1;
};

/// Fraction of a step that a rank idles when every stage takes equally long, a backward's halves as long as a forward
/// each, and messages take no time. With F such a time of a whole rank's share, over m micro-batches:
///   GPipe, 1F1B  idle 3 (pp - 1) F         interleaved  3 (pp - 1) F / v
///   ZB-H1        idle (pp - 1) F for m >= pp      ZB-V  (pp - 1) F / 2 for m >= 2 pp - 1
double bubble_fraction(const ScheduleShape& shape);

/// From so many micro-batches on, each further one makes a step longer by the same time: two steps tell all longer
/// ones. Exact when stages take equally long; to less than 10 % for 6 ranks when some take twice as long as others.
/// With fewer, the work of a further one may fit into a rank's idle time and seem to take none.
int64_t steady_micro_batches(const ScheduleShape& shape);

/// One action on the clock.
struct TimedAction {
  Action action;
  double begin = 0, end = 0;
};

/// What happens when messages take no time; `stages` has the times of each stage in model order. Returns the actions of
/// each rank with their times. Errors: kInternal when ranks wait for each other for ever.
Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape,
                                                                std::span<const PassTimes> stages);

/// The same when all stages take equally long.
Result<std::vector<std::vector<TimedAction>>> simulate_schedule(const ScheduleShape& shape, const PassTimes& times);

}  // namespace cairn
