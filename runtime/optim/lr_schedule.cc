#include "runtime/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "runtime/plan/batch_schedule.h"

namespace cairn::optim {

namespace {

/// The run's clock in the unit of a span: steps, or what has been consumed, so that a batch ramp does not bend a curve.
class LrClock {
 public:
  LrClock(const Recipe& recipe, int64_t stop_steps, const RunPast& past)
      : run_(recipe, past),
        begin_(recipe.optimizer.lr_from == LrFrom::kStage ? past.lr_step : 0),
        stop_(stop_steps),
        // A change of the batch under way must not bend a stage that takes what the others leave.
        rest_unit_(past.points.empty() ? Span::Unit::kSteps : recipe.stop.unit) {}

  double at(Span::Unit unit, int64_t step) const {
    if (unit == Span::Unit::kSamples) return static_cast<double>(run_.samples(step));
    if (unit == Span::Unit::kTokens) return static_cast<double>(run_.tokens(step));
    return static_cast<double>(step);
  }
  double length(const Span& span) const {
    if (span.unit == Span::Unit::kFraction) return std::round(span.value * static_cast<double>(stop_ - begin_));
    return span.unit == Span::Unit::kSteps ? std::ceil(span.value) : span.value;
  }
  /// The first step at which the clock shows `value`, at least 0.
  int64_t step_of(Span::Unit unit, double value) const {
    if (unit == Span::Unit::kSamples) return run_.step_of_samples(value);
    if (unit == Span::Unit::kTokens) return run_.step_of_tokens(value);
    return std::max<int64_t>(0, static_cast<int64_t>(value));
  }
  int64_t begin() const { return begin_; }
  int64_t stop() const { return stop_; }
  Span::Unit rest_unit() const { return rest_unit_; }

 private:
  RunClock run_;
  int64_t begin_, stop_;
  Span::Unit rest_unit_;
};

/// The last step of each stage: counted from the beginning up to a stage without a length, from the end behind it.
std::vector<int64_t> stage_ends(const std::vector<LrStage>& stages, const LrClock& clock) {
  std::vector<int64_t> ends(stages.size(), clock.stop());
  int64_t begin = clock.begin();
  size_t k = 0;
  for (; k < stages.size() && stages[k].over.value > 0; ++k) {
    const Span::Unit unit = stages[k].over.unit;
    begin = ends[k] = clock.step_of(unit, clock.at(unit, begin) + clock.length(stages[k].over));
  }
  for (size_t last = stages.size(); last-- > k + 1;) {
    const Span::Unit unit = stages[last].over.unit;
    ends[last - 1] = clock.step_of(unit, clock.at(unit, ends[last]) - clock.length(stages[last].over));
  }
  return ends;
}

}  // namespace

double lowered_by(std::span<const LoweredRate> lowered, int64_t step) {
  double out = 1;
  for (const LoweredRate& one : lowered) {
    const int64_t into = step - one.at;
    if (into <= 0 || into > one.over + one.back) continue;
    const double back = into <= one.over ? 0 : static_cast<double>(into - one.over) / static_cast<double>(one.back);
    out *= one.by + (1 - one.by) * back;
  }
  return out;
}

double learning_rate(const Recipe& recipe, int64_t step, int64_t stop_steps, const RunPast& past) {
  const OptimizerConfig& optimizer = recipe.optimizer;
  const bool from_stage = optimizer.lr_from == LrFrom::kStage && !optimizer.lr.empty();
  const LrClock clock(recipe, stop_steps, past);
  const std::vector<int64_t> ends = stage_ends(optimizer.lr, clock);
  double rate = from_stage ? past.lr : optimizer.peak_lr;
  int64_t begin = clock.begin();  // last step of the stages before
  for (size_t k = 0; k < optimizer.lr.size(); ++k) {
    const LrStage& stage = optimizer.lr[k];
    const bool open = stage.over.value <= 0;
    const Span::Unit unit = open ? clock.rest_unit() : stage.over.unit;
    const double length =
        open ? std::max(1.0, clock.at(unit, ends[k]) - clock.at(unit, begin)) : clock.length(stage.over);
    const double into = std::clamp((clock.at(unit, step) - clock.at(unit, begin)) / length, 0.0, 1.0);
    switch (stage.kind) {
      case LrStage::Kind::kWarmup:
        rate = from_stage && k == 0 ? rate + (optimizer.peak_lr - rate) * into : optimizer.peak_lr * into;
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
        const double now = std::max(first, static_cast<double>(std::min(step, ends[k])));
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
    begin = ends[k];
    if (step <= begin) break;
  }
  return rate * lowered_by(recipe.watch.lowered_rates, step);
}

}  // namespace cairn::optim
