#include "ckpt/mirror/mirror.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

std::vector<int64_t> steps_to_remove(const std::vector<int64_t>& placed, const MirrorPolicy& policy) {
  std::vector<int64_t> out;
  if (policy.keep_last <= 0) return out;
  for (size_t i = 0; i < placed.size(); ++i) {
    if (placed.size() - i <= static_cast<size_t>(policy.keep_last)) break;
    const bool oldest_of_window =
        policy.keep_every > 0 && (i == 0 || placed[i - 1] / policy.keep_every != placed[i] / policy.keep_every);
    if (!oldest_of_window) out.push_back(placed[i]);
  }
  return out;
}

std::optional<int64_t> next_due(const std::vector<int64_t>& local, const std::vector<int64_t>& placed,
                                const MirrorPolicy& policy, bool last_one) {
  for (auto step = local.rbegin(); step != local.rend(); ++step) {
    if (std::binary_search(placed.begin(), placed.end(), *step)) continue;
    const bool covered = policy.every_steps > 0 && std::any_of(placed.begin(), placed.end(), [&](int64_t there) {
                           return there / policy.every_steps == *step / policy.every_steps;
                         });
    if (covered && !(last_one && step == local.rbegin())) continue;
    std::vector<int64_t> with = placed;
    with.insert(std::upper_bound(with.begin(), with.end(), *step), *step);
    const std::vector<int64_t> removed = steps_to_remove(with, policy);
    if (!std::binary_search(removed.begin(), removed.end(), *step)) return *step;
  }
  return std::nullopt;
}

Mirror::Mirror(Place& place, IoBackend& io, fs::path checkpoints_dir, fs::path pin_dir, MirrorPolicy policy,
               CopyOptions options)
    : place_(place),
      io_(io),
      dir_(std::move(checkpoints_dir)),
      pin_dir_(std::move(pin_dir)),
      policy_(policy),
      options_(std::move(options)) {}

/// Links to all files of a checkpoint, or the checkpoint itself where the file system has no links.
Result<fs::path> Mirror::pin(int64_t step) {
  const fs::path from = dir_ / step_dir_name(step), to = pin_dir_ / step_dir_name(step);
  const fs::path building = pin_dir_ / ("." + step_dir_name(step));
  RT_TRY(make_dirs(io_, pin_dir_));
  RT_TRY(remove_tree(io_, building));
  RT_TRY(io_.make_dir(building));
  RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(from));
  for (const DirEntry& entry : entries) {
    if (entry.is_dir) continue;
    if (::link((from / entry.name).c_str(), (building / entry.name).c_str()) == 0) continue;
    const int why = errno;
    RT_TRY(remove_tree(io_, building));
    if (why == EXDEV || why == EPERM || why == EMLINK || why == ENOTSUP || why == ENOSYS) return from;
    return os_error(why, (from / entry.name).string());
  }
  RT_TRY(io_.rename(building, to));
  return to;
}

Result<std::optional<int64_t>> Mirror::pinned() {
  Result<std::vector<DirEntry>> entries = io_.list(pin_dir_);
  if (!entries.ok()) {
    if (is_not_found(entries.error())) return std::optional<int64_t>();
    return std::move(entries).error();
  }
  std::optional<int64_t> newest;
  for (const DirEntry& entry : entries.value()) {
    const std::optional<int64_t> step = parse_step_dir_name(entry.name);
    if (step && (!newest || *step > *newest)) {
      if (newest) RT_TRY(remove_tree(io_, pin_dir_ / step_dir_name(*newest)));
      newest = step;
    } else {
      RT_TRY(remove_tree(io_, pin_dir_ / entry.name));
    }
  }
  return newest;
}

Result<std::optional<MirrorReport>> Mirror::copy_next(bool last_one) {
  step_ = 0;
  RT_TRY_SET(std::optional<int64_t> held, pinned());
  RT_TRY_SET(const std::vector<PlacedStep> there, place_.list());
  if (!tidied_) {
    RT_TRY_SET(notices_, place_.tidy(held));
    tidied_ = true;
  }
  RT_TRY_SET(const Catalog catalog, list_checkpoints(io_, dir_));
  std::vector<int64_t> placed, local;
  std::map<int64_t, int64_t> created;
  for (const PlacedStep& step : there) {
    if (step.complete) placed.push_back(step.step);
  }
  for (const CheckpointInfo& info : catalog.checkpoints) {
    const std::pair key(info.step, info.created_unix_ms);
    if (!info.complete || damaged_.contains(key)) continue;
    local.push_back(info.step);
    created[info.step] = info.created_unix_ms;
    const auto copy = std::find(placed.begin(), placed.end(), info.step);
    if (copy == placed.end()) {
      same_.erase(key);
      continue;
    }
    if (!same_.contains(key)) {
      const Result<bool> same = same_checkpoint(place_, info.step, info.dir);
      if (!same.ok() && is_not_found(same.error())) continue;  // removed here or there just now
      if (!same.ok()) return same.error();
      same_[key] = same.value();
    }
    if (!same_[key]) placed.erase(copy);  // an older line of the run had this step: to be replaced
  }

  if (held && std::binary_search(placed.begin(), placed.end(), *held)) {
    RT_TRY_SET(const bool same, same_checkpoint(place_, *held, pin_dir_ / step_dir_name(*held)));
    if (same) {  // killed between the commit and this
      RT_TRY(remove_tree(io_, pin_dir_ / step_dir_name(*held)));
      held.reset();
    }
  }
  // What was begun is ended first, or a run that is killed often would never end a copy.
  const std::optional<int64_t> step = held ? held : next_due(local, placed, policy_, last_one);
  if (!step) return std::optional<MirrorReport>();
  step_ = *step;
  fs::path source = pin_dir_ / step_dir_name(*step);
  if (!held) {
    RT_TRY_SET(source, pin(*step));
  }
  Result<CopyReport> copied = copy_checkpoint(place_, io_, source, options_);
  if (!copied.ok()) {
    if (copied.error().code == ErrorCode::kCorrupt) {
      damaged_.emplace(*step, created[*step]);
      ignore(remove_tree(io_, pin_dir_ / step_dir_name(*step)), "the next start finds it");
    }
    return std::move(copied).error();
  }
  MirrorReport report{.copy = std::move(copied).value()};
  RT_TRY(remove_tree(io_, pin_dir_ / step_dir_name(*step)));
  if (created.contains(*step)) same_.erase({*step, created[*step]});
  if (!std::binary_search(placed.begin(), placed.end(), *step)) {
    placed.insert(std::upper_bound(placed.begin(), placed.end(), *step), *step);
  }
  for (const int64_t old : steps_to_remove(placed, policy_)) {
    if (old == *step) continue;
    const Status removed = place_.remove(old);
    if (removed.ok()) {
      report.removed.push_back(old);
    } else {
      report.problems.push_back(fmt::format("step {} stays in {}: {}", old, place_.describe(), removed.error().message));
    }
  }
  return std::optional<MirrorReport>(std::move(report));
}

}  // namespace cairn::ckpt
