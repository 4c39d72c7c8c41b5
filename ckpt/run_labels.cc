#include "ckpt/run_labels.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/retention/label_store.h"
#include "runtime/core/clock.h"
#include "runtime/json/json.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::ckpt {
namespace {

namespace fs = std::filesystem;

StepNumbers numbers_of(const telemetry::StepMetrics& metrics) {
  StepNumbers out{
      .step = metrics.step, .loss = metrics.loss, .grad_norm = metrics.grad_norm, .skipped = metrics.was_skipped()};
  for (const telemetry::MachineError& error : telemetry::machine_errors(metrics)) {
    out.suspect_from = out.suspect_from == 0 ? error.since + 1 : std::min(out.suspect_from, error.since + 1);
    out.stays = out.stays || error.kind == "replica";
  }
  return out;
}

/// Complete saves that labels may be of. `unknown`: steps that are there and are not complete, or cannot be read.
Result<std::vector<std::pair<int64_t, int64_t>>> saves_in(IoBackend& io, const fs::path& dir, CatalogCache* cache,
                                                          std::vector<int64_t>* unknown = nullptr) {
  RT_TRY_SET(const Catalog catalog, list_unlabelled(io, dir, cache));
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const CheckpointInfo& info : catalog.checkpoints) {
    if (info.complete) {
      out.emplace_back(info.step, info.created_unix_ms);
    } else if (unknown != nullptr) {
      unknown->push_back(info.step);
    }
  }
  return out;
}

}  // namespace

Labels labels_from_metrics(IoBackend& io, const fs::path& checkpoints_dir, const WatchRules& rules, int64_t run_steps) {
  Labels labels;
  const fs::path dir = (fs::absolute(checkpoints_dir).lexically_normal() / "").parent_path();
  if (dir.filename() != "checkpoints") return labels;  // no run's
  const Result<std::vector<telemetry::StepMetrics>> steps =
      telemetry::read_metrics(dir.parent_path() / "metrics.jsonl");
  const Result<std::vector<std::pair<int64_t, int64_t>>> saves = saves_in(io, checkpoints_dir, nullptr);
  if (!steps.ok() || !saves.ok()) return labels;
  // A save is judged by the steps around it: they are not all kept.
  const auto& all = steps.value();
  const double now = SystemClock().unix_s();
  StepJudge judge(rules);
  size_t at = 0;
  for (const auto& save : saves.value()) {
    int64_t to = save.first + rules.proof;  // a step whose update was left out may prove nothing: one more then
    for (auto next = std::ranges::upper_bound(all, save.first, {}, &telemetry::StepMetrics::step);
         next != all.end() && next->step <= to; ++next) {
      if (next->was_skipped()) ++to;
    }
    for (; at < all.size() && all[at].step <= to; ++at) {
      judge.add(numbers_of(all[at]));
      if (all[at].end_loss) judge.set_end_loss(all[at].step, *all[at].end_loss);
    }
    Labels one;
    judge_saves(judge, {save}, run_steps, now, one);
    labels.merge(one);
  }
  return labels;
}

Labels label_from_metrics(IoBackend& io, const fs::path& checkpoints_dir, Catalog& catalog) {
  const bool labelled =
      std::ranges::any_of(catalog.checkpoints, [](const auto& info) { return info.label.has_value(); });
  if (labelled) return {};
  Labels labels = labels_from_metrics(io, checkpoints_dir);
  if (labels.empty()) return labels;
  for (CheckpointInfo& info : catalog.checkpoints) {
    const LabelEntry* const entry = entry_of(labels, info.step, info.created_unix_ms);
    info.label = entry != nullptr ? entry->label : Label::kNew;
    if (entry != nullptr) info.label_why = entry->why;
  }
  return labels;
}

void RunLabels::seed(std::span<const telemetry::StepMetrics> steps) {
  const std::lock_guard lock(mutex_);
  for (const telemetry::StepMetrics& metrics : steps) {
    judge_.add(numbers_of(metrics));
    seen_to_ = metrics.step;
    if (metrics.end_loss) judge_.set_end_loss(metrics.step, *metrics.end_loss);
  }
}

void RunLabels::drain(bool all) {
  while (!early_.empty() && (all || early_.begin()->first <= judge_.last() + 1)) {
    const telemetry::StepMetrics metrics = std::move(early_.begin()->second);
    early_.erase(early_.begin());
    if (metrics.step > judge_.last()) {
      std::optional<StepAlarm> alarm = judge_.add(numbers_of(metrics));
      if (alarm) {
        alarm->again = metrics.step <= seen_to_;
        alarms_.push_back(std::move(*alarm));
      }
      seen_to_ = std::max(seen_to_, metrics.step);
    }
    if (metrics.end_loss && metrics.step == judge_.last()) judge_.set_end_loss(metrics.step, *metrics.end_loss);
  }
}

void RunLabels::note(const telemetry::StepMetrics& metrics) {
  const std::lock_guard lock(mutex_);
  early_.insert_or_assign(metrics.step, metrics);
  drain(false);
}

std::vector<StepAlarm> RunLabels::take_alarms() {
  const std::lock_guard lock(mutex_);
  return std::exchange(alarms_, {});
}

void RunLabels::note(std::span<const std::string> news) {
  for (const std::string& text : news) {
    const Result<telemetry::StepMetrics> metrics = telemetry::step_metrics_from_json(json_or_nothing(text));
    if (metrics.ok()) note(metrics.value());
  }
}

void RunLabels::go_back(int64_t step) {
  const std::lock_guard lock(mutex_);
  early_.clear();
  judge_.go_back(step);
  if (std::exchange(starts_, false)) judge_.raise_again();
}

void RunLabels::leave_line(int64_t step) {
  const std::lock_guard lock(mutex_);
  seen_to_ = std::min(seen_to_, step);
}

Status RunLabels::settle(IoBackend& io, const fs::path& checkpoints_dir, CatalogCache* cache,
                         const std::function<Status()>& check_folder) {
  std::vector<int64_t> unknown;
  RT_TRY_SET(const auto saves, saves_in(io, checkpoints_dir, cache, &unknown));
  const std::lock_guard lock(mutex_);
  drain(true);
  RT_TRY_SET(Labels labels, read_labels(io, checkpoints_dir));
  const bool changed = judge_saves(judge_, saves, run_steps_, SystemClock().unix_s(), labels, unknown);
  unproved_.clear();
  for (const auto& [step, entry] : labels) {
    if (entry.label == Label::kNew && entry.by != "hand") unproved_.push_back(step);
  }
  return changed ? write_labels(io, checkpoints_dir, labels, check_folder) : Status();
}

bool RunLabels::may_prove(int64_t step) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(unproved_, [&](int64_t saved) {
    if (saved + proof_ >= step) return saved + proof_ == step;
    const std::optional<StepJudge::Verdict> verdict = judge_.judge(saved, run_steps_);  // steps were passed over
    return verdict && verdict->label != Label::kNew;
  });
}

Status RunLabels::condemn_from_onset(IoBackend& io, const fs::path& checkpoints_dir,
                                     const std::function<Status()>& check_folder) {
  if (!ruined_) return {};
  std::optional<StepJudge::Onset> onset;
  {
    const std::lock_guard lock(mutex_);
    drain(true);
    onset = judge_.onset();
  }
  if (!onset) return {};
  const int64_t from = onset->above ? onset->step - 1 : onset->step;
  RT_TRY_SET(const auto saves, saves_in(io, checkpoints_dir, nullptr));
  RT_TRY_SET(const Labels labels, read_labels(io, checkpoints_dir));
  for (const auto& [step, saved_unix_ms] : saves) {
    const LabelEntry* const entry = entry_of(labels, step, saved_unix_ms);
    const bool settled =
        entry != nullptr && (entry->by == "hand" || entry->label == Label::kGood || entry->label == Label::kBad);
    if (step < from || settled) continue;
    RT_TRY(
        put_label(io, checkpoints_dir, step, Label::kBad,
                  "saved in the trouble that stopped the run; its first sign was step " + std::to_string(onset->step),
                  "guard", check_folder));
  }
  return {};
}

Result<int64_t> drop_ruined(Arena& arena, IoBackend& io, const fs::path& checkpoints_dir,
                            const std::function<Status()>& check_folder) {
  const int64_t step = arena.control().ruined_step.load(std::memory_order_acquire);
  if (step == 0) return step;
  const std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; slot < arena.slots(); ++slot) {
    if (views[slot].step == step) arena.invalidate_slot(slot);
  }
  arena.forget_weights();
  // On disk only where this memory's ranks have saved it: another save of that step, as of another line, is not meant.
  if (arena.control().persisted_step.load(std::memory_order_acquire) >= step) {
    if (check_folder) RT_TRY(check_folder());  // another folder would have no such step
    if (look_at_checkpoint(io, checkpoints_dir, step).complete) {
      RT_TRY(put_label(io, checkpoints_dir, step, Label::kBad, "its weights give no finite loss, on its own batch too",
                       "guard", check_folder));
    }
    arena.control().persisted_step.store(0, std::memory_order_release);
  }
  arena.control().ruined_step.store(0, std::memory_order_release);
  return step;
}

}  // namespace cairn::ckpt
