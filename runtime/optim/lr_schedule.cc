#include "runtime/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "runtime/plan/plan.h"

namespace cairn::optim {

double learning_rate(const Recipe& recipe, int64_t step, int64_t stop_steps) {
  const OptimizerConfig& optimizer = recipe.optimizer;
  int64_t given = 0;
  for (const LrStage& stage : optimizer.lr) given += span_in_steps(stage.over, recipe, stop_steps);
  const int64_t left = std::max<int64_t>(1, stop_steps - given);  // for the stage without a length
  double rate = optimizer.peak_lr;
  int64_t begin = 0;  // last step of the stages before
  for (const LrStage& stage : optimizer.lr) {
    const int64_t length = stage.over.value > 0 ? span_in_steps(stage.over, recipe, stop_steps) : left;
    const double into = std::clamp(static_cast<double>(step - begin) / static_cast<double>(length), 0.0, 1.0);
    switch (stage.kind) {
      case LrStage::Kind::kWarmup:
        rate = optimizer.peak_lr * into;
        break;
      case LrStage::Kind::kCosine:
        rate = stage.to + (rate - stage.to) * 0.5 * (1 + std::cos(std::numbers::pi * into));
        break;
      case LrStage::Kind::kLinear:
        rate = rate + (stage.to - rate) * into;
        break;
      case LrStage::Kind::kHold:
        break;
      case LrStage::Kind::kInverseSqrt: {
        const auto first = static_cast<double>(std::max<int64_t>(1, begin));
        const double now = std::max(first, static_cast<double>(std::min(step, begin + length)));
        rate = std::max(stage.to, rate * std::sqrt(first / now));
        break;
      }
      case LrStage::Kind::kExponential:
        rate = rate * std::pow(stage.to / rate, into);
        break;
      case LrStage::Kind::kOneMinusSqrt:
        rate = rate + (stage.to - rate) * std::sqrt(into);
        break;
    }
    begin += length;
    if (step <= begin) break;
  }
  return rate;
}

}  // namespace cairn::optim
