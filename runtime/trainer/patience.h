#pragma once
// When a run ends because a metric has not become better (watch.early_stop). Decided from numbers that all ranks hold;
// what it knows is part of the training position.

#include <cstdint>
#include <string>

#include "runtime/config/watch.h"

namespace cairn::trainer {

struct PatienceState {
  std::string metric;       // that the rest is of; another one: it begins anew
  double best = 0;          // with `evaluations` > 0
  int64_t best_step = 0;    // of it
  int64_t evaluations = 0;  // that had the metric
  int64_t without = 0;      // of them in a row, the last ones, without a better value
  bool operator==(const PatienceState&) const = default;
};

/// Counts the metric's value of an evaluation at `step`. A value that is not finite is not better.
void note_evaluation(const PatienceConfig& patience, int64_t step, double value, PatienceState* state);

/// Whether the run is at its end by these.
bool ended_early(const PatienceConfig& patience, const PatienceState& state);

}  // namespace cairn::trainer
