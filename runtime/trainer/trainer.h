#pragma once
// The training loop of one rank: sampler -> pipeline of micro-batches -> gradient reduction -> clip -> optimizer ->
// checkpoint hook. The same code runs for ranks that are processes and ranks that are threads of a test.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/comm.h"
#include "runtime/comm/shm_world.h"
#include "runtime/core/result.h"
#include "runtime/core/traffic.h"
#include "runtime/data/scored_texts.h"
#include "runtime/device/machine.h"
#include "runtime/device/op_clock.h"
#include "runtime/plan/plan.h"
#include "runtime/telemetry/metrics.h"
#include "runtime/telemetry/pace.h"
#include "runtime/telemetry/trace.h"
#include "runtime/trainer/checkpoint_hook.h"
#include "runtime/trainer/tuning.h"

namespace cairn::trainer {

/// The loss of one token of a step.
struct TokenLoss {
  int32_t sample = 0;   // of the step, in the order of positions
  int32_t token = 0;    // of the sample: the loss is of what follows it
  int32_t target = -1;  // what followed; -1: it does not count
  float loss = 0;       // nats
};

struct Environment {
  const Plan& plan;
  int64_t rank = 0;
  comm::Engine& engine;
  CheckpointHook& hook;
  /// Where it trains, of this rank alone; it outlives the hook. Null: the CPU. A hook that copies is needed then.
  Machine* machine = nullptr;
  /// World rank that decides about checkpoints (CheckpointHook) and tells of steps: one of the host whose agent leads.
  int64_t decides = 0;
  /// On that rank, after each step (metrics complete: loss averaged over the batch, per source, norm, lr, times).
  std::function<void(const telemetry::StepMetrics&)> on_step;
  /// Every rank: tells where it is ("step 12 forward"), for reports of hangs. May be empty.
  std::function<void(int64_t step, const char* phase)> on_phase;
  /// Every rank, every telemetry::kPaceSteps steps: how long it computes. May be empty.
  std::function<void(const telemetry::Pace& pace)> on_pace;
  /// The run's last step is tried once more after its update, forward alone: no step follows that would show weights
  /// which that update has ruined (StepMetrics::end_loss).
  bool try_end = false;
  /// On `decides`, with a machine that has DeviceTuning: where its choices come from and go to. Null: none are made.
  const TuningFiles* tuning = nullptr;
  /// Ranks that hold the head, once step `token_losses_of` has computed its losses: those of the tokens that this rank
  /// has, of tp ranks the first only. Empty: none are asked for.
  int64_t token_losses_of = 0;
  std::function<void(const std::vector<TokenLoss>& losses)> on_token_losses;
  /// Texts that eval.tasks have scored, and how scores become their numbers. The same on every rank. Empty:
  /// nothing.
  std::span<const data::ScoredText> texts;
  std::function<std::vector<telemetry::TaskNumbers>(std::span<const data::TextScore> scores)> tasks_of;
  telemetry::TraceWindow trace;  // steps whose timeline is drawn
  /// Every rank, once the window has passed or the run ends inside it: a trace file's text. May be empty.
  std::function<void(const std::string& trace)> on_trace;
  /// Every rank, when training ends without an error: how long the ops of its steps took. Empty: they are not timed.
  std::function<void(const OpTimes& times)> on_op_times;
};

struct Outcome {
  TrainPosition position;
  int64_t allocated_bytes = 0;        // by this rank, equal to the plan's figure
  int64_t device_bytes = 0;           // with a machine: what it has reserved, equal to what it says of the plan
  int64_t scratch_bytes = 0;          // of its kernels, equal to nn::kernel_scratch()'s
  std::vector<GroupTraffic> traffic;  // of the whole run; of a step: step_traffic() of plan/communication.h
};

/// Errors, besides: kGuard when loss or gradient norm of a step is not finite, also when computed again. The trainer
/// finds the cause. Weights that are not finite, or give no finite loss on the batch before: the update before did it,
/// and CheckpointHook::condemn() was called. Else the batch did it, and the message names the samples.
Result<Outcome> run(const Environment& environment);

/// Shared memory for the ranks of this plan, with room for all boundary tensors that its schedule has under way at
/// once. A stage that computes sends nothing, so a tensor that is not in the channel by then comes a pass late.
comm::ShmWorldConfig world_config(const Plan& plan);

}  // namespace cairn::trainer
