#include "runtime/plan/batch_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace cairn {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct Walk {
  const Recipe& recipe;
  PastPoint origin;
  int64_t step = origin.step + 1;     // the next one
  int64_t consumed = origin.samples;  // samples before it

  bool ramps() const { return recipe.batch.ramp.from > 0; }
  int64_t increments() const { return (recipe.batch.samples - recipe.batch.ramp.from) / recipe.batch.ramp.by; }

  /// Whether a span from the beginning of the run is over, before the next step.
  bool reached(const Span& span) const { return steps_until(span, 1) == 0; }

  /// Steps of `samples` each until it is.
  int64_t steps_until(const Span& span, int64_t samples) const {
    if (span.unit == Span::Unit::kSteps) {
      return std::max<int64_t>(0, static_cast<int64_t>(std::ceil(span.value)) - (step - 1));
    }
    double left = span.value - static_cast<double>(consumed);
    if (span.unit == Span::Unit::kTokens) {  // of the past, samples may have had another length
      const auto context = static_cast<double>(recipe.model.context);
      left =
          (span.value - static_cast<double>(origin.tokens)) / context - static_cast<double>(consumed - origin.samples);
    }
    return left <= 0 ? 0 : static_cast<int64_t>(std::ceil(left / static_cast<double>(samples)));
  }

  /// Increments that the ramp has taken: each is reached behind the one before.
  int64_t taken() const {
    int64_t low = 0, high = increments();
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (reached(increment(middle))) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  /// Samples at which the ramp takes its k-th increment.
  Span increment(int64_t k) const {
    const Span& over = recipe.batch.ramp.over;
    return {over.unit, over.value * static_cast<double>(k) / static_cast<double>(increments())};
  }

  StepStage settings() const {
    StepStage out{.first_step = step,
                  .samples_before = consumed,
                  .samples = recipe.batch.samples,
                  .micro = recipe.batch.micro,
                  .tokens = recipe.batch.tokens > 0 ? recipe.batch.tokens : recipe.model.context,
                  .rope_theta = recipe.model.rope_theta};
    if (ramps()) out.samples = recipe.batch.ramp.from + taken() * recipe.batch.ramp.by;
    for (const BatchPhase& phase : recipe.batch.phases) {
      if (!reached(phase.at)) continue;
      if (phase.samples > 0) out.samples = phase.samples;
      if (phase.micro > 0) out.micro = phase.micro;
      if (phase.tokens > 0) out.tokens = phase.tokens;
      if (phase.rope_theta > 0) out.rope_theta = phase.rope_theta;
    }
    return out;
  }

  /// Steps until something may change; kNever when nothing will.
  int64_t steps_to_change(int64_t samples) const {
    int64_t out = kNever;
    const auto consider = [&](const Span& span) {
      const int64_t steps = steps_until(span, samples);
      if (steps > 0) out = std::min(out, steps);
    };
    if (ramps() && taken() < increments()) consider(increment(taken() + 1));
    for (const BatchPhase& phase : recipe.batch.phases) consider(phase.at);
    return out;
  }
};

}  // namespace

std::vector<StepStage> step_stages(const Recipe& recipe, const RunPast& past) {
  std::vector<StepStage> out;
  for (Walk walk{recipe, past.origin()};;) {
    const StepStage now = walk.settings();
    if (out.empty() || !out.back().same_batch(now)) out.push_back(now);
    const int64_t steps = walk.steps_to_change(now.samples);
    if (steps == kNever) return out;
    walk.step += steps;
    walk.consumed += steps * now.samples;
  }
}

size_t stage_of_step(const std::vector<StepStage>& stages, int64_t step) {
  const auto after = std::partition_point(stages.begin(), stages.end(),
                                          [&](const StepStage& stage) { return stage.first_step <= step; });
  return after == stages.begin() ? 0 : static_cast<size_t>(after - stages.begin()) - 1;
}

int64_t samples_after(const std::vector<StepStage>& stages, int64_t step) {
  const StepStage& stage = stages[stage_of_step(stages, step)];
  return stage.samples_before + std::max<int64_t>(0, step - stage.first_step + 1) * stage.samples;
}

int64_t steps_for_samples(const std::vector<StepStage>& stages, double samples) {
  if (samples <= 0) return 0;
  const auto after = std::partition_point(stages.begin() + 1, stages.end(), [&](const StepStage& stage) {
    return static_cast<double>(stage.samples_before) < samples;
  });
  const StepStage& stage = *(after - 1);
  const double left = samples - static_cast<double>(stage.samples_before);
  return stage.first_step - 1 + static_cast<int64_t>(std::ceil(left / static_cast<double>(stage.samples)));
}

RunClock::RunClock(const Recipe& recipe, const RunPast& past)
    : points_{PastPoint{}}, stages_(step_stages(recipe, past)), context_(recipe.model.context) {
  for (const PastPoint& point : past.points) {
    if (point.step > points_.back().step) points_.push_back(point);
  }
}

PastPoint RunClock::at(int64_t step) const {
  const PastPoint& origin = points_.back();
  step = std::max<int64_t>(0, step);
  if (step >= origin.step) {
    const int64_t samples = samples_after(stages_, step);
    return {step, samples, origin.tokens + (samples - origin.samples) * context_};
  }
  const auto next =
      std::ranges::upper_bound(points_, step, {}, &PastPoint::step);  // not the first, and there: step < origin.step
  const PastPoint &a = *(next - 1), &b = *next;
  const auto between = [&](int64_t from, int64_t to) {
    return from + (to - from) * (step - a.step) / (b.step - a.step);
  };
  return {step, between(a.samples, b.samples), between(a.tokens, b.tokens)};
}

int64_t RunClock::first_step_of(double value, int64_t PastPoint::*what) const {
  int64_t low = 0, high = points_.back().step;  // what it grows to in the past
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<double>(at(middle).*what) >= value) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

int64_t RunClock::step_of_samples(double samples) const {
  const PastPoint& origin = points_.back();
  if (origin.step > 0 && samples <= static_cast<double>(origin.samples)) {
    return first_step_of(samples, &PastPoint::samples);
  }
  return steps_for_samples(stages_, samples);
}

int64_t RunClock::step_of_tokens(double tokens) const {
  const PastPoint& origin = points_.back();
  if (origin.step > 0 && tokens <= static_cast<double>(origin.tokens)) {
    return first_step_of(tokens, &PastPoint::tokens);
  }
  const auto context = static_cast<double>(context_);
  if (origin.step == 0) return steps_for_samples(stages_, tokens / context);
  return steps_for_samples(
      stages_, static_cast<double>(origin.samples) + (tokens - static_cast<double>(origin.tokens)) / context);
}

int64_t RunClock::step_of(const Span& span, int64_t stop_steps) const {
  switch (span.unit) {
    case Span::Unit::kSteps:
      return static_cast<int64_t>(std::ceil(span.value));
    case Span::Unit::kSamples:
      return step_of_samples(span.value);
    case Span::Unit::kTokens:
      return step_of_tokens(span.value);
    case Span::Unit::kFraction:
      return static_cast<int64_t>(std::llround(span.value * static_cast<double>(stop_steps)));
  }
  return 0;
}

}  // namespace cairn
