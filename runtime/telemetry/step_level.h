#pragma once
// Whether a step's loss or gradient norm is an outlier among those of the steps before. Used inside a step, where a
// guard leaves its update out, and by the labels of checkpoints (ckpt/retention/labels.h). Pure.

#include <cstdint>
#include <string>
#include <vector>

namespace cairn::telemetry {

/// When a step counts as an outlier, and how many steps prove a checkpoint.
struct WatchRules {
  int64_t window = 128;                         // clean values that a new one is compared with
  int64_t begin = 100;                          // no verdict before that step, except by the ceiling
  int64_t proof = 32;                           // clean steps behind a checkpoint that make it good
  double limit = 6;                             // robust deviations upwards
  double loss_floor = 0.01, norm_floor = 0.05;  // least deviation: nats a token, of ln(norm)
  double ceiling = 0;                           // a loss above it is an outlier at any step; 0: none
  int64_t level_after = 0;  // later steps are not compared with those up to it: other data, another batch
};

/// 1.5 ln(vocab) + 1: worse than knowing nothing.
double loss_ceiling(int64_t vocab);

/// A step's numbers, by which the weights before it are judged. NaN: not known, or an fp16 overflow's norm.
struct StepNumbers {
  int64_t step = 0;
  double loss = 0, grad_norm = 0;
  bool skipped = false;  // its update was left out: the weights behind it are those before it
  /// This step has found an error of the machine (machine_error()): steps from here on may have errors. 0: it has not.
  int64_t suspect_from = 0;
  bool stays = false;  // and so may all steps behind it: replicas differ
};

struct StepVerdict {
  float loss = 0, norm = 0;                       // norm: ln of it
  bool loss_counts = false, norm_counts = false;  // in the window of later steps
  bool upward = false, above = false, downward = false;
  std::string why;  // of an outlier
  bool outlier() const { return upward || downward; }
};

/// `losses` and `norms`: the windows, values that counted of at most `window` steps before. Each is used from half a
/// window on.
StepVerdict judge_step(const WatchRules& rules, const StepNumbers& numbers, std::vector<float> losses,
                       std::vector<float> norms);

}  // namespace cairn::telemetry
