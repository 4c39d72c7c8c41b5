#pragma once
// Guards inside a step know this of the steps before: part of the training position, the same on every rank.

#include <cstdint>
#include <vector>

namespace cairn::trainer {

struct GuardState {
  uint64_t level = 0;  // of what losses are (level_key()); another one: the windows are of no use
  std::vector<float> losses,
      norms;  // of the last steps that were no outliers, the newest at the end; norms: ln of them
  int64_t outliers_in_row = 0;
  int64_t skipped = 0;                   // updates of the run that a guard or watch.skip_steps has left out
  std::vector<int64_t> skipped_steps;    // the newest of them, ascending
  std::vector<int64_t> without_targets;  // of these the ones without a token to guess, which no guard has chosen
  std::vector<int64_t> recomputed;       // the newest outliers that were computed again, ascending
  int64_t audited = 0;                   // the last step whose audit found nothing
  int64_t replicated = 0;                // the last step behind which all replicas held the same weights
  bool operator==(const GuardState&) const = default;
};

}  // namespace cairn::trainer
