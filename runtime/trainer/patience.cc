#include "runtime/trainer/patience.h"

#include <cmath>

#include "runtime/config/metric_name.h"

namespace cairn::trainer {

void note_evaluation(const PatienceConfig& patience, int64_t step, double value, PatienceState* state) {
  if (state->metric != patience.metric) *state = {.metric = patience.metric};
  const double gain = lower_is_better(patience.metric) ? state->best - value : value - state->best;
  const bool better = std::isfinite(value) && (state->evaluations == 0 || !std::isfinite(state->best) ||
                                               (patience.least > 0 ? gain >= patience.least : gain > 0));
  if (better || state->evaluations == 0) {
    state->best = value;
    state->best_step = step;
  }
  ++state->evaluations;
  state->without = better ? 0 : state->without + 1;
}

bool ended_early(const PatienceConfig& patience, const PatienceState& state) {
  return !patience.metric.empty() && state.metric == patience.metric && state.without >= patience.evaluations;
}

}  // namespace cairn::trainer
