#include "ckpt/retention/label_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "runtime/core/clock.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr size_t kAbandonedKept = 2;

double now() { return SystemClock().unix_s(); }

/// "step-00000013-2" -> 13, 2.
std::optional<std::pair<int64_t, int64_t>> parse_abandoned(const std::string& name) {
  const size_t dash = name.rfind('-');
  if (dash == std::string::npos) return std::nullopt;
  const std::optional<int64_t> step = parse_step_dir_name(name.substr(0, dash));
  int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data() + dash + 1, name.data() + name.size(), number);
  if (!step || error != std::errc() || end != name.data() + name.size() || number < 1) return std::nullopt;
  return std::pair(*step, number);
}

}  // namespace

Status put_label(IoBackend& io, const fs::path& checkpoints_dir, int64_t step, Label label, const std::string& why,
                 const std::string& by, const std::function<Status()>& check_folder) {
  const CheckpointInfo info = look_at_checkpoint(io, checkpoints_dir, step);
  if (!info.complete) {
    return Error{info.unread ? ErrorCode::kIo : ErrorCode::kInvalidInput,
                 fmt::format("{} has no complete step {} to label: {}", checkpoints_dir.string(), step, info.problem),
                 info.unread ? info.os_errno : 0};
  }
  RT_TRY_SET(Labels labels, read_labels(io, checkpoints_dir));
  LabelEntry& entry = labels[step];
  if (entry.saved_unix_ms != info.created_unix_ms) entry = {};
  entry.label = label;
  entry.why = why;
  entry.by = by;
  entry.time = now();
  entry.saved_unix_ms = info.created_unix_ms;
  return write_labels(io, checkpoints_dir, labels, check_folder);
}

Status hold_steps(IoBackend& io, const fs::path& checkpoints_dir, const std::vector<int64_t>& steps,
                  const std::string& why) {
  RT_TRY_SET(Labels labels, read_labels(io, checkpoints_dir));
  const Labels before = labels;
  for (auto& [step, entry] : labels) entry.held.clear();
  for (const int64_t step : steps) {
    const CheckpointInfo info = look_at_checkpoint(io, checkpoints_dir, step);
    if (!info.complete) continue;
    LabelEntry& entry = labels[step];
    if (entry.saved_unix_ms != info.created_unix_ms || entry.by.empty())
      entry = {.time = now(), .by = "watch", .saved_unix_ms = info.created_unix_ms};
    entry.held = why;
  }
  return labels == before ? Status() : write_labels(io, checkpoints_dir, labels);
}

Status take_labels(IoBackend& io, const fs::path& checkpoints_dir, const Labels& theirs) {
  RT_TRY_SET(Labels labels, read_labels(io, checkpoints_dir));
  const Labels before = labels;
  Labels of_here;
  for (const auto& [step, entry] : theirs) {
    const CheckpointInfo info = look_at_checkpoint(io, checkpoints_dir, step);
    if (info.complete && info.created_unix_ms == entry.saved_unix_ms) of_here[step] = entry;
  }
  // What the folder has of another save of a step that came is of a save that is gone.
  for (const auto& [step, entry] : of_here) {
    const auto mine = labels.find(step);
    if (mine != labels.end() && mine->second.saved_unix_ms != entry.saved_unix_ms) labels.erase(mine);
  }
  merge_labels(of_here, labels);
  return labels == before ? Status() : write_labels(io, checkpoints_dir, labels);
}

Result<std::vector<int64_t>> abandon_steps(IoBackend& io, const fs::path& checkpoints_dir, const fs::path& abandoned,
                                           int64_t step, const WriterId& writer) {
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  std::vector<int64_t> later(std::upper_bound(names.steps.begin(), names.steps.end(), step), names.steps.end());
  if (later.empty()) return later;
  RT_TRY_SET(const auto announced, announcements(io, checkpoints_dir));
  std::set<int64_t> referred, pinned;
  std::set<std::string> refer;
  for (const auto& [name, steps] : announced) {
    if (name.starts_with(kPinPrefix)) {  // a reader stops no way back: it loses the step's name, as its clients learn
      pinned.insert(steps.begin(), steps.end());
      continue;
    }
    referred.insert(steps.begin(), steps.end());
    if (!steps.empty()) refer.insert(name);
  }
  RT_TRY(make_dirs(io, abandoned));
  std::set<std::string> moved;
  for (auto one = later.rbegin(); one != later.rend(); ++one) {  // what needs others goes before them
    const std::string name = step_dir_name(*one);
    if (!pinned.contains(*one) && (referred.contains(*one) || refer.contains(name))) {
      RT_TRY(remove_checkpoint(io, checkpoints_dir, *one, writer));
      continue;
    }
    RT_TRY_SET(const std::vector<DirEntry> there, io.list(abandoned));
    int64_t number = 1;
    for (const DirEntry& entry : there) {
      if (const auto parsed = parse_abandoned(entry.name); parsed && parsed->first == *one)
        number = std::max(number, parsed->second + 1);
    }
    const std::string to = fmt::format("{}-{}", name, number);
    RT_TRY(io.rename(checkpoints_dir / name, abandoned / to));
    moved.insert(to);
    RT_TRY(io.sync_dir(abandoned));  // first the new name, or a crash may leave neither
    RT_TRY(io.sync_dir(checkpoints_dir));
  }
  RT_TRY_SET(const std::vector<DirEntry> there, io.list(abandoned));
  std::vector<std::pair<std::pair<int64_t, int64_t>, std::string>> kept;  // by (step, number)
  for (const DirEntry& entry : there) {
    if (const auto parsed = parse_abandoned(entry.name)) kept.emplace_back(*parsed, entry.name);
  }
  std::sort(kept.begin(), kept.end(), [&](const auto& a, const auto& b) {  // what was moved now is the newest
    return std::tuple(moved.contains(a.second), a.first) < std::tuple(moved.contains(b.second), b.first);
  });
  for (size_t k = 0; k + kAbandonedKept < kept.size(); ++k) RT_TRY(remove_tree(io, abandoned / kept[k].second));
  return later;
}

}  // namespace cairn::ckpt
