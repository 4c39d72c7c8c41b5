#pragma once
// Guards that act inside a step, between its sums and its update: watch.on_outlier, watch.skip_steps, watch.audit and
// watch.replicas.
// All that they look at is the same on every rank and in every layout, so that no rank need ask another. Pure.

#include <cstdint>
#include <string>

#include "runtime/plan/plan.h"
#include "runtime/telemetry/step_level.h"
#include "runtime/trainer/guard_state.h"

namespace cairn::trainer {

/// The rules of a plan's recipe: no verdict before its warmup has ended. `level_after`: WatchRules::level_after.
telemetry::WatchRules watch_rules(const Plan& plan, int64_t level_after = 0);

/// Key to data, batch and objective of a stage of the batch: losses of steps with another key have another level.
uint64_t level_key(const Plan& stage);

/// Whether step `number` may be computed again or its update left out, or its weights be compared. Then the update is
/// not ordered before the step's numbers are known.
bool may_act(const WatchConfig& watch, int64_t number);

/// Whether step `number` compares the weights it has read between replicas (watch.replicas).
bool compares_replicas(const WatchConfig& watch, int64_t number);

class StepGuard {
 public:
  /// `state` outlives it.
  StepGuard(const WatchConfig& watch, const telemetry::WatchRules& rules, uint64_t level, GuardState* state);

  /// Judges the step by the steps before. An fp16 overflow's norm is not finite.
  telemetry::StepVerdict look(int64_t number, double loss, double norm) const;
  /// Whether it is to be computed again, or its update to be left out: the actions of watch.on_outlier in their order.
  bool recomputes(int64_t number, const telemetry::StepVerdict& verdict) const;
  bool skips(int64_t number, const telemetry::StepVerdict& verdict) const;
  /// Why skips() is so, for people.
  std::string why(int64_t number, const telemetry::StepVerdict& verdict) const;

  /// Whether the step is to be computed again whatever it is.
  bool audits(int64_t number) const;

  void note_recomputed(int64_t number);
  void note_audit(int64_t number, bool clean);
  /// A step whose batch has no token to guess.
  void note_without_targets(int64_t number);
  /// Once the step's fate is known.
  void note(int64_t number, const telemetry::StepVerdict& verdict, bool skipped);

 private:
  bool acts(GuardAction action) const;
  bool listed(int64_t number) const;

  const WatchConfig& watch_;
  telemetry::WatchRules rules_;
  GuardState& state_;
};

}  // namespace cairn::trainer
