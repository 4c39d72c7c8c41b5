#pragma once
// The recipe's `watch`. runtime/config/recipe.h says how it is filled.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn {

/// A guard's answer to a trouble.
enum class GuardAction { kRollBack, kStop, kSkip, kLowerLr, kRecompute };

/// How far a guard goes back, and how often (tools/run/folder/guard.h).
struct RollBackConfig {
  int64_t at_most = 4;      // times
  int64_t within = 20'000;  // steps
  int64_t lead = 8;         // steps before the trouble whose samples are skipped too; doubled with each try at a place
};

/// How many updates are left out.
struct SkipConfig {
  int64_t at_most = 3;     // times
  int64_t within = 1'000;  // steps
};

/// How a guard lowers the rate, and how often.
struct LowerLrConfig {
  double by = 0.5;
  int64_t over = 500;  // steps at the lowered rate
  int64_t back = 500;  // steps of the linear way back
  int64_t at_most = 2;
  int64_t within = 20'000;  // steps
};

/// How often a step is computed again.
struct ComputeAgainConfig {
  int64_t at_most = 3;
  int64_t within = 10'000;  // steps
};

/// The rate is times `by` for `over` steps after step `at`, then goes back to 1 over `back` steps.
struct LoweredRate {
  int64_t at = 0;
  double by = 1;
  int64_t over = 0, back = 0;
};

/// The run ends, as if it were done, after `evaluations` without a better value of the metric.
struct PatienceConfig {
  std::string metric;       // a name of runtime/config/metric_name.h; empty: the run goes to its end
  int64_t evaluations = 0;  // in a row
  double least = 0;         // that counts as better, in the metric's unit
};

/// What is looked for in the numbers of the steps, to tell good checkpoints from others (ckpt/retention/labels.h).
struct WatchConfig {
  int64_t window = 128;    // clean steps that a new one is compared with
  int64_t proof = 32;      // clean steps behind a checkpoint that make it good
  bool forensics = false;  // a state with ruined weights is written to RUN/forensics, which no start takes
  /// The first that can be done is; none: a warning, and a stop where the loss is not finite.
  std::vector<GuardAction> on_outlier, on_divergence, on_drop, on_not_finite, on_sdc;
  RollBackConfig roll_back;
  SkipConfig skip;
  LowerLrConfig lower_lr;
  ComputeAgainConfig recompute;
  PatienceConfig early_stop;
  std::vector<int64_t> skip_steps;         // whose updates are left out
  std::vector<LoweredRate> lowered_rates;  // what guards have done, for a run that repeats it
  int64_t audit_steps = 0;                 // steps from one audit to the next, which computes gradients twice; 0: never
  int64_t replica_steps = 0;               // steps from one comparison of replicas' weights to the next; 0: none
};

}  // namespace cairn
