#include "ckpt/mirror/mirror.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>

#include "ckpt/format/names.h"
#include "ckpt/mirror/placed_step.h"
#include "ckpt/persist/read.h"
#include "ckpt/retention/catalog.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

std::vector<int64_t> steps_to_remove(const std::vector<int64_t>& placed, const MirrorPolicy& policy,
                                     const Labels& labels) {
  std::vector<int64_t> out, usable;
  if (policy.keep_last <= 0) return out;
  const auto label = [&](int64_t step) {
    const auto found = labels.find(step);
    return found == labels.end() ? std::optional<Label>() : std::optional(found->second.label);
  };
  for (const int64_t step : placed) (label(step) == Label::kBad ? out : usable).push_back(step);
  if (usable.empty()) return {};
  int64_t good = -1, candidate = -1;
  for (const int64_t step : usable) {
    if (label(step) == Label::kGood) {
      good = step;
      candidate = -1;
    }
    if (label(step) == Label::kNew && candidate < 0) candidate = step;
  }
  for (size_t i = 0; i < usable.size(); ++i) {
    if (usable.size() - i <= static_cast<size_t>(policy.keep_last)) break;
    const bool oldest_of_window =
        policy.keep_every > 0 && (i == 0 || usable[i - 1] / policy.keep_every != usable[i] / policy.keep_every);
    if (!oldest_of_window && usable[i] != good && usable[i] != candidate) out.push_back(usable[i]);
  }
  std::sort(out.begin(), out.end());
  return out;
}

Result<Labels> placed_labels(Place& place) {
  RT_TRY_SET(const std::optional<std::string> note, place.read_note(std::string(kLabelsName)));
  if (!note) return Labels();
  return decode_labels(*note).with(fmt::format("{}/{}", place.describe(), kLabelsName));
}

Status place_labels(Place& place, const Labels& labels, const std::vector<int64_t>& steps) {
  RT_TRY_SET(const Labels there, placed_labels(place));
  Labels wanted;
  for (const auto& [step, entry] : labels) {
    if (std::ranges::find(steps, step) != steps.end()) wanted[step] = entry;
  }
  return wanted == there ? Status() : place.write_note(std::string(kLabelsName), encode_labels(wanted));
}

/// Damaged ones, here or there, hold up no copy: they stay as they are, and nothing there is removed.
Result<Labels> Mirror::all_labels() {
  Result<Labels> there = placed_labels(place_);
  const bool damaged = !there.ok() && there.error().code == ErrorCode::kCorrupt;
  if (!there.ok() && !damaged) return there;
  if (damaged && placed_labels_.ok()) notices_.push_back("warning: " + there.error().message);
  placed_labels_ = damaged ? Status(there.error()) : Status();
  Labels labels = damaged ? Labels() : std::move(there).value();
  const Result<Labels> here = read_labels(io_, dir_);
  if (!here.ok() && local_labels_.ok()) notices_.push_back("warning: " + here.error().message);
  local_labels_ = here.ok() ? Status() : Status(here.error());
  if (here.ok()) merge_labels(here.value(), labels);
  return labels;
}

std::vector<int64_t> of_this_line(const std::vector<int64_t>& placed, const std::vector<int64_t>& local) {
  if (local.empty()) return placed;
  return {placed.begin(), std::upper_bound(placed.begin(), placed.end(), local.back())};
}

std::optional<int64_t> next_due(const std::vector<int64_t>& local, const std::vector<int64_t>& placed,
                                const MirrorPolicy& policy, bool last_one, const Labels& labels) {
  const std::vector<int64_t> own = of_this_line(placed, local);
  for (auto step = local.rbegin(); step != local.rend(); ++step) {
    if (std::binary_search(own.begin(), own.end(), *step)) continue;
    if (last_one && step == local.rbegin()) return *step;
    const bool covered = policy.every_steps > 0 && std::any_of(own.begin(), own.end(), [&](int64_t there) {
                           return there / policy.every_steps == *step / policy.every_steps;
                         });
    if (covered) continue;
    std::vector<int64_t> with = own;
    with.insert(std::upper_bound(with.begin(), with.end(), *step), *step);
    const std::vector<int64_t> removed = steps_to_remove(with, policy, labels);
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

/// Links to all files of a checkpoint. False where the file system has no links.
Result<bool> Mirror::link_step(int64_t step) {
  const fs::path from = dir_ / step_dir_name(step), to = pin_dir_ / step_dir_name(step);
  const fs::path building = pin_dir_ / ("." + step_dir_name(step));
  RT_TRY(remove_tree(io_, building));
  RT_TRY(remove_tree(io_, to));
  RT_TRY(io_.make_dir(building));
  RT_TRY_SET(const std::vector<DirEntry> entries, io_.list(from));
  for (const DirEntry& entry : entries) {
    if (entry.is_dir) continue;
    if (::link((from / entry.name).c_str(), (building / entry.name).c_str()) == 0) continue;
    const int why = errno;
    RT_TRY(remove_tree(io_, building));
    if (why == EXDEV || why == EPERM || why == EMLINK || why == ENOTSUP || why == ENOSYS) return false;
    return os_error(why, (from / entry.name).string());
  }
  RT_TRY(io_.rename(building, to));
  return true;
}

/// Holds a checkpoint and the earlier ones that it needs, which come first: what is pinned is whole at any moment.
/// Where links are refused it is the checkpoint itself.
Result<fs::path> Mirror::pin(int64_t step) {
  RT_TRY(make_dirs(io_, pin_dir_));
  // A manifest that does not hold is for copy_checkpoint() to tell.
  const Result<Manifest> manifest = read_manifest(io_, dir_ / step_dir_name(step));
  for (const int64_t other : manifest.ok() ? needed_steps(manifest.value().files) : std::vector<int64_t>()) {
    RT_TRY_SET(const bool linked, link_step(other));
    if (!linked) return dir_ / step_dir_name(step);
  }
  RT_TRY_SET(const bool linked, link_step(step));
  return (linked ? pin_dir_ : dir_) / step_dir_name(step);
}

/// The newest goes first: the others are what it needs.
Status Mirror::unpin() {
  Result<std::vector<DirEntry>> entries = io_.list(pin_dir_);
  if (!entries.ok()) return is_not_found(entries.error()) ? Status() : Status(std::move(entries).error());
  std::sort(entries.value().begin(), entries.value().end(), [](const DirEntry& a, const DirEntry& b) {
    return parse_step_dir_name(a.name) > parse_step_dir_name(b.name);
  });
  for (const DirEntry& entry : entries.value()) RT_TRY(remove_tree(io_, pin_dir_ / entry.name));
  return {};
}

/// What a killed one held: the newest, with the earlier ones that it needs. One without its manifest, which goes first,
/// was being let go.
Result<std::optional<int64_t>> Mirror::pinned() {
  Result<std::vector<DirEntry>> entries = io_.list(pin_dir_);
  if (!entries.ok()) {
    if (is_not_found(entries.error())) return std::optional<int64_t>();
    return std::move(entries).error();
  }
  std::optional<int64_t> newest;
  for (const DirEntry& entry : entries.value()) {
    const std::optional<int64_t> step = parse_step_dir_name(entry.name);
    if (!step || *step < newest.value_or(0)) continue;
    const Result<FileStat> manifest = io_.stat(pin_dir_ / entry.name / kManifestName);
    if (!manifest.ok() && is_not_found(manifest.error())) continue;
    newest = step;
  }
  return newest;
}

/// What retention takes from the place now that `copied` is there; nothing that one of those that stay needs. `local`:
/// the steps here.
Result<std::vector<int64_t>> Mirror::steps_to_retire(int64_t copied, const std::vector<int64_t>& local) {
  RT_TRY_SET(const std::vector<PlacedStep> there, place_.list());
  std::vector<int64_t> placed;
  for (const PlacedStep& step : there) {
    if (step.complete) placed.push_back(step.step);
  }
  RT_TRY_SET(const Labels labels, all_labels());
  RT_TRY(Status(local_labels_));
  RT_TRY(place_labels(place_, labels, placed));  // what is removed relies on them
  const std::vector<int64_t> removed = steps_to_remove(of_this_line(placed, local), policy_, labels);
  std::set<int64_t> doomed(removed.begin(), removed.end());
  doomed.erase(copied);
  for (auto step = there.rbegin(); step != there.rend(); ++step) {  // newest first: what they need is older
    if (!step->complete || doomed.contains(step->step)) continue;
    RT_TRY_SET(const std::vector<int64_t> needed, announced_steps(place_, *step));
    for (const int64_t other : needed) doomed.erase(other);
  }
  return std::vector<int64_t>(doomed.rbegin(), doomed.rend());  // what needs others goes before them
}

Result<std::optional<MirrorReport>> Mirror::copy_next(bool last_one) {
  step_ = 0;
  RT_TRY_SET(std::optional<int64_t> held, pinned());
  RT_TRY_SET(const std::vector<PlacedStep> there, place_.list());
  if (!tidied_) {
    RT_TRY_SET(notices_, place_.tidy(held));
    tidied_ = true;
  }
  RT_TRY_SET(const Labels labels, all_labels());
  Result<Catalog> catalog = list_checkpoints(io_, dir_);
  if (!catalog.ok()) catalog = list_unlabelled(io_, dir_);
  if (!catalog.ok()) return std::move(catalog).error();
  const auto bad = [&](const CheckpointInfo& info) {
    if (info.label) return info.bad();
    const LabelEntry* const there_says = entry_of(labels, info.step, info.created_unix_ms);
    return there_says != nullptr && there_says->label == Label::kBad;
  };
  std::vector<int64_t> placed, local;
  std::map<int64_t, int64_t> created;
  for (const PlacedStep& step : there) {
    if (step.complete) placed.push_back(step.step);
  }
  for (const CheckpointInfo& info : catalog.value().checkpoints) {
    const std::pair key(info.step, info.created_unix_ms);
    if (!info.complete || bad(info) || damaged_.contains(key)) continue;
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
      bool ours = same.value();
      if (!ours) {  // or the same save in another form (ckpt prune --archive), which others there may refer to
        const Result<Manifest> theirs = placed_manifest(place_, info.step);
        if (!theirs.ok() && theirs.error().code != ErrorCode::kCorrupt) return theirs.error();
        ours = theirs.ok() && theirs.value().created_unix_ms == info.created_unix_ms;
      }
      same_[key] = ours;
    }
    if (!same_[key]) placed.erase(copy);  // an older line of the run had this step: to be replaced
  }

  if (const size_t own = of_this_line(placed, local).size(); own < placed.size() && !older_line_told_) {
    notices_.push_back(fmt::format(
        "{} has step {}, from before this run went back; here the newest is {}. It stays there until the run "
        "has passed it, and does not count as one of those that are kept",
        place_.describe(), fmt::join(std::span(placed).subspan(own), ", "), local.back()));
    older_line_told_ = true;
  }
  if (held && std::binary_search(placed.begin(), placed.end(), *held)) {
    RT_TRY_SET(const bool same, same_checkpoint(place_, *held, pin_dir_ / step_dir_name(*held)));
    if (same) held.reset();  // killed between the commit and the end of the hold
  }
  // What was begun is ended first, or a run that is killed often would never end a copy.
  const std::optional<int64_t> step = held ? held : next_due(local, placed, policy_, last_one, labels);
  if (!step) {
    RT_TRY(unpin());
    if (placed_labels_.ok()) RT_TRY(place_labels(place_, labels, placed));
    return std::optional<MirrorReport>();
  }
  step_ = *step;
  fs::path source = pin_dir_ / step_dir_name(*step);
  if (!held) {
    RT_TRY(unpin());
    RT_TRY_SET(source, pin(*step));
  }
  Result<CopyReport> copied = copy_checkpoint(place_, io_, source, options_);
  if (!copied.ok()) {
    if (copied.error().code == ErrorCode::kCorrupt) {
      if (!held) damaged_.emplace(*step, created[*step]);  // here there may be another save of it since
      ignore(unpin(), "the next start finds it");
    } else if (is_refused(copied.error()) || copied.error().code == ErrorCode::kUnsupported) {
      ignore(unpin(), "the next start finds it");  // or it would stand before all that come after it
    }
    return std::move(copied).error();
  }
  MirrorReport report{.copy = std::move(copied).value()};
  report.removed = report.copy.removed;
  RT_TRY(unpin());
  if (created.contains(*step)) same_.erase({*step, created[*step]});
  if (policy_.keep_last <= 0) {
    if (std::ranges::find(placed, *step) == placed.end()) placed.push_back(*step);
    if (const Status put = place_labels(place_, labels, placed); !put.ok())
      report.problems.push_back(put.error().message);
    return std::optional<MirrorReport>(std::move(report));
  }
  Result<std::vector<int64_t>> doomed = steps_to_retire(*step, local);
  if (!doomed.ok()) {
    report.problems.push_back(doomed.error().message);
    return std::optional<MirrorReport>(std::move(report));
  }
  for (const int64_t old : doomed.value()) {
    const Status removed = place_.remove(old);
    if (removed.ok()) {
      report.removed.push_back(old);
    } else {
      report.problems.push_back(
          fmt::format("step {} stays in {}: {}", old, place_.describe(), removed.error().message));
    }
  }
  return std::optional<MirrorReport>(std::move(report));
}

}  // namespace cairn::ckpt
