#include "runtime/trainer/step_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/core/random.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::trainer {
namespace {

constexpr int64_t kLeastKept = 1000;  // steps behind a skipped one whose lines in metrics.jsonl name it
constexpr int64_t kMostKept = 64;     // so that the position of a snapshot keeps its room

int64_t within(const std::vector<int64_t>& steps, int64_t number, int64_t span) {
  return std::ranges::count_if(steps, [&](int64_t step) { return step > number - span && step < number; });
}

void keep_newest(std::vector<int64_t>& steps, int64_t number, int64_t span) {
  std::erase_if(steps, [&](int64_t step) { return step <= number - std::max(span, kLeastKept); });
  if (std::ssize(steps) > kMostKept) steps.erase(steps.begin(), steps.end() - kMostKept);
}

void push(std::vector<float>& window, float value, int64_t length) {
  window.push_back(value);
  if (std::ssize(window) > length) window.erase(window.begin(), window.end() - length);
}

}  // namespace

telemetry::WatchRules watch_rules(const Plan& plan, int64_t level_after) {
  const Recipe& recipe = plan.recipe;
  telemetry::WatchRules rules{.window = recipe.watch.window,
                              .proof = recipe.watch.proof,
                              .ceiling = telemetry::loss_ceiling(recipe.model.vocab),
                              .level_after = level_after};
  if (const auto& lr = recipe.optimizer.lr; !lr.empty() && lr[0].kind == LrStage::Kind::kWarmup) {
    const Span& over = lr[0].over;
    const double samples =
        over.unit == Span::Unit::kTokens ? over.value / static_cast<double>(recipe.model.context) : over.value;
    const int64_t end = over.unit == Span::Unit::kSteps ? static_cast<int64_t>(std::ceil(over.value))
                        : over.unit == Span::Unit::kFraction
                            ? std::llround(over.value * static_cast<double>(plan.steps))
                            : steps_for_samples(plan.step_stages, samples);
    rules.begin = std::max(rules.begin, end);
  }
  return rules;
}

uint64_t level_key(const Plan& stage) {
  const Recipe& recipe = stage.recipe;
  const ObjectiveConfig& objective = recipe.objective;
  std::string text = fmt::format("{} {} {} {} {} {} {}", recipe.batch.samples, stage.sequence_tokens,
                                 recipe.model.rope_theta, static_cast<int>(objective.kind), objective.document_end,
                                 objective.gmask_share, objective.document_loss);
  for (const DataSource& source : recipe.data.sources) {
    text += fmt::format(" {}:{}", source.name, source.weight);
    if (source.weigh != DataSource::Weigh::kToken) text += ":by sample";
  }
  const MaskRepeats& masks = recipe.data.mask_repeats;
  if (masks.period > 0) text += fmt::format(" masks {} {}", masks.period, masks.count);
  return stream_key(0, text);
}

bool may_act(const WatchConfig& watch, int64_t number) {
  return !watch.on_outlier.empty() || (watch.audit_steps > 0 && number % watch.audit_steps == 0) ||
         compares_replicas(watch, number) || std::ranges::find(watch.skip_steps, number) != watch.skip_steps.end();
}

bool compares_replicas(const WatchConfig& watch, int64_t number) {
  return watch.replica_steps > 0 && number % watch.replica_steps == 0;
}

StepGuard::StepGuard(const WatchConfig& watch, const telemetry::WatchRules& rules, uint64_t level, GuardState* state)
    : watch_(watch), rules_(rules), state_(*state) {
  rules_.window = watch.window;
  if (watch_.on_outlier.empty()) level = 0;
  if (state_.level == level) return;
  state_.level = level;
  state_.losses.clear();
  state_.norms.clear();
  state_.outliers_in_row = 0;
}

bool StepGuard::acts(GuardAction action) const {
  return std::ranges::find(watch_.on_outlier, action) != watch_.on_outlier.end();
}

bool StepGuard::listed(int64_t number) const {
  return std::ranges::find(watch_.skip_steps, number) != watch_.skip_steps.end();
}

telemetry::StepVerdict StepGuard::look(int64_t number, double loss, double norm) const {
  if (watch_.on_outlier.empty()) return {};
  return telemetry::judge_step(rules_, {.step = number, .loss = loss, .grad_norm = std::isfinite(norm) ? norm : NAN},
                               state_.losses, state_.norms);
}

bool StepGuard::recomputes(int64_t number, const telemetry::StepVerdict& verdict) const {
  return verdict.outlier() && acts(GuardAction::kRecompute) &&
         within(state_.recomputed, number, watch_.recompute.within) < watch_.recompute.at_most;
}

bool StepGuard::audits(int64_t number) const { return watch_.audit_steps > 0 && number % watch_.audit_steps == 0; }

bool StepGuard::skips(int64_t number, const telemetry::StepVerdict& verdict) const {
  if (listed(number)) return true;
  if (!verdict.outlier() || !acts(GuardAction::kSkip)) return false;
  std::vector<int64_t> own = state_.skipped_steps;  // others use up no try of the guard's
  std::erase_if(own, [&](int64_t step) {
    return listed(step) || std::ranges::find(state_.without_targets, step) != state_.without_targets.end();
  });
  return within(own, number, watch_.skip.within) < watch_.skip.at_most;
}

std::string StepGuard::why(int64_t number, const telemetry::StepVerdict& verdict) const {
  return listed(number) ? "watch.skip_steps names it" : verdict.why;
}

void StepGuard::note_recomputed(int64_t number) {
  state_.recomputed.push_back(number);
  keep_newest(state_.recomputed, number, watch_.recompute.within);
}

void StepGuard::note_audit(int64_t number, bool clean) {
  if (clean) state_.audited = number;
}

void StepGuard::note_without_targets(int64_t number) {
  state_.without_targets.push_back(number);
  keep_newest(state_.without_targets, number, watch_.skip.within);
  note(number, {}, true);
}

void StepGuard::note(int64_t number, const telemetry::StepVerdict& verdict, bool skipped) {
  if (skipped) {
    ++state_.skipped;
    state_.skipped_steps.push_back(number);
  }
  keep_newest(state_.skipped_steps, number, watch_.skip.within);
  if (watch_.on_outlier.empty() || (skipped && verdict.why.empty() && !listed(number))) return;  // it had no loss
  if (verdict.loss_counts) push(state_.losses, verdict.loss, rules_.window);
  if (verdict.norm_counts) push(state_.norms, verdict.norm, rules_.window);
  state_.outliers_in_row = verdict.upward || !verdict.loss_counts ? state_.outliers_in_row + 1 : 0;
  if (state_.outliers_in_row < std::max<int64_t>(1, rules_.window / 2)) return;
  state_.losses.clear();  // the level has moved
  state_.norms.clear();
  state_.outliers_in_row = 0;
}

}  // namespace cairn::trainer
