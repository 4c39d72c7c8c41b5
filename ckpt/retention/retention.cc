#include "ckpt/retention/retention.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/replace.h"
#include "runtime/core/process.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

bool is_missing(IoBackend& io, const fs::path& path) {
  const Result<FileStat> stat = io.stat(path);
  return !stat.ok() && is_not_found(stat.error());
}

}  // namespace

bool is_of_this_host(const WriterId& writer) {
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) != 0) return false;
  // Compared as names spell it: both go through the same replacement of characters.
  const std::optional<WorkDir> here =
      parse_work_dir_name(kTmpPrefix, work_dir_name(kTmpPrefix, 0, WriterId{host, writer.pid, 0, 0}));
  return here && here->writer.host == writer.host;
}

bool may_be_alive(const WriterId& writer) {
  if (!is_of_this_host(writer)) return true;
  if (::kill(static_cast<pid_t>(writer.pid), 0) != 0 && errno == ESRCH) return false;
  const std::optional<ProcessStat> stat = process_stat(writer.pid);  // nullopt: not ours to see
  return !stat || (!stat->ended() && stat->start == writer.start);
}

Status remove_checkpoint(IoBackend& io, const fs::path& checkpoints_dir, int64_t step, const WriterId& writer,
                         SpareFiles* spares) {
  const fs::path dir = checkpoints_dir / step_dir_name(step);
  const fs::path trash = checkpoints_dir / work_dir_name(kTrashPrefix, step, writer);
  const Error needed{
      ErrorCode::kUnavailable,
      fmt::format("{}: kept, a process reads it, or another checkpoint or a save at work refers to its files",
                  dir.string())};
  RT_TRY_SET(const std::set<int64_t> others, announced_references(io, checkpoints_dir));
  if (others.contains(step)) return needed;
  RT_TRY(io.rename(dir, trash));
  const Result<std::set<int64_t>> again = announced_references(io, checkpoints_dir);  // references.h, F
  if (!again.ok() || again.value().contains(step)) {
    RT_TRY(io.rename(trash, dir));
    RT_TRY(io.sync_dir(checkpoints_dir));
    return again.ok() ? needed : again.error();
  }
  RT_TRY(io.sync_dir(checkpoints_dir));  // until here a crash may bring the checkpoint back, and it must be whole then
  return spares != nullptr ? spares->take_in(io, trash) : remove_tree(io, trash);
}

void spare_referenced(IoBackend& io, const fs::path& checkpoints_dir, std::vector<Fate>& fates) {
  Result<std::map<std::string, std::set<int64_t>>> announced = announcements(io, checkpoints_dir);
  if (!announced.ok()) {  // nothing is removed where it is not known what others need
    for (Fate& fate : fates) {
      if (!fate.stays) fate = {fate.step, true, "it is not known whether others need it: " + announced.error().message};
    }
    return;
  }
  auto& needs = announced.value();
  for (auto fate = fates.rbegin(); fate != fates.rend(); ++fate) {  // as they are removed
    if (fate->stays) continue;
    const auto needing = std::ranges::find_if(needs, [&](const auto& one) { return one.second.contains(fate->step); });
    if (needing == needs.end()) {
      needs.erase(step_dir_name(fate->step));
      continue;
    }
    const std::optional<int64_t> step = parse_step_dir_name(needing->first);
    const std::optional<WorkDir> pin = parse_work_dir_name(kPinPrefix, needing->first);
    *fate = {fate->step, true,
             step  ? fmt::format("step {} refers to it", *step)
             : pin ? fmt::format("process {} of {} reads it", pin->writer.pid, pin->writer.host)
                   : "a save at work refers to it"};
  }
}

Result<RetentionReport> remove_steps(IoBackend& io, const fs::path& checkpoints_dir, const std::vector<int64_t>& steps,
                                     const WriterId& writer, SpareFiles* spares) {
  RetentionReport report;
  if (steps.empty()) return report;
  // The names of those that stay must be durable before the first of the others goes.
  RT_TRY(io.sync_dir(checkpoints_dir));
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    Status removed = remove_checkpoint(io, checkpoints_dir, *step, writer, spares);
    if (removed.ok()) {
      report.removed.push_back(*step);
    } else if (removed.error().code == ErrorCode::kUnavailable) {
      report.needed.push_back(*step);
    } else {
      report.problems.push_back(fmt::format("step {}: {}", *step, removed.error().message));
    }
  }
  std::reverse(report.removed.begin(), report.removed.end());
  return report;
}

Result<RetentionReport> apply_retention(IoBackend& io, const fs::path& checkpoints_dir, const RetentionPolicy& policy,
                                        const WriterId& writer, CatalogCache* cache, SpareFiles* spares) {
  RT_TRY_SET(Catalog catalog, list_checkpoints(io, checkpoints_dir, cache));
  const bool cut_off = std::any_of(catalog.checkpoints.begin(), catalog.checkpoints.end(),
                                   [](const CheckpointInfo& info) { return info.unread && info.os_errno == EAGAIN; });
  if (cut_off) {
    RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
    RT_TRY(finish_replacements(io, checkpoints_dir, names));
    RT_TRY_SET(catalog, list_checkpoints(io, checkpoints_dir, cache));
  }
  RT_TRY_SET(const std::vector<Fate> fates, plan_retention(catalog.checkpoints, policy));
  std::vector<int64_t> bad, doomed;
  for (size_t k = 0; k < fates.size(); ++k) {
    if (!fates[k].stays) (catalog.checkpoints[k].bad() ? bad : doomed).push_back(fates[k].step);
  }
  RT_TRY_SET(RetentionReport report, remove_steps(io, checkpoints_dir, bad, writer, spares));
  doomed.insert(doomed.end(), report.needed.begin(), report.needed.end());  // by others that go too, perhaps
  std::sort(doomed.begin(), doomed.end());
  RT_TRY_SET(RetentionReport rest, remove_steps(io, checkpoints_dir, doomed, writer, spares));
  rest.removed.insert(rest.removed.end(), report.removed.begin(), report.removed.end());
  std::sort(rest.removed.begin(), rest.removed.end());
  rest.problems.insert(rest.problems.end(), report.problems.begin(), report.problems.end());
  return rest;
}

std::string why_left(const std::string& name, const std::function<bool(const WriterId&)>& alive) {
  const std::optional<WorkDir> work = parse_work_dir_name(name);
  if (!work) return "not a name that this program makes";
  // Without spare files a live one makes new files.
  if (name.starts_with(kSparePrefix) || !alive(work->writer)) return {};
  if (is_of_this_host(work->writer))
    return fmt::format("process {} of {} may still be at work", work->writer.pid, work->writer.host);
  return fmt::format(
      "process {} of {}, another host, may still be at work; if it is gone, `cairn ckpt prune --leftovers "
      "--other-hosts --yes` removes this",
      work->writer.pid, work->writer.host);
}

Result<CleanReport> clean_leftovers(IoBackend& io, const fs::path& checkpoints_dir,
                                    const std::function<bool(const WriterId&)>& alive) {
  CleanReport report;
  RT_TRY_SET(Names names, list_names(io, checkpoints_dir));
  if (names.leftovers.empty()) return report;
  if (!names.cut_off.empty()) {
    RT_TRY_SET(report.put_back, finish_replacements(io, checkpoints_dir, names));
    RT_TRY_SET(names, list_names(io, checkpoints_dir));
  }
  RT_TRY_SET(const auto announced, announcements(io, checkpoints_dir));
  std::set<int64_t> references;
  for (const auto& [name, steps] : announced) {
    const std::optional<WorkDir> work = parse_work_dir_name(name);
    if (!work || alive(work->writer)) references.insert(steps.begin(), steps.end());  // a dead save needs nothing
  }
  // A leftover may be what an exchange has replaced: the new name must be durable before the old data goes.
  RT_TRY(io.sync_dir(checkpoints_dir));
  for (const std::string& name : names.leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(name);
    if (const std::string why = why_left(name, alive); !why.empty()) {
      report.left.push_back(fmt::format("{}: {}", name, why));
    } else if (name.starts_with(kTrashPrefix) && references.contains(work->step) &&
               is_missing(io, checkpoints_dir / step_dir_name(work->step))) {
      RT_TRY(io.rename(checkpoints_dir / name, checkpoints_dir / step_dir_name(work->step)));
      RT_TRY(io.sync_dir(checkpoints_dir));
      report.left.push_back(
          fmt::format("{}: put back as {}, another checkpoint refers to its files", name, step_dir_name(work->step)));
    } else if (Status removed = remove_tree(io, checkpoints_dir / name); !removed.ok()) {
      report.left.push_back(fmt::format("{}: {}", name, removed.error().message));
    } else {
      report.removed.push_back(name);
    }
  }
  return report;
}

Status fence_saves(IoBackend& io, const fs::path& checkpoints_dir) {
  if (is_missing(io, checkpoints_dir)) return {};
  RT_TRY_SET(Names names, list_names(io, checkpoints_dir));
  if (!names.cut_off.empty()) {
    if (const auto ended = finish_replacements(io, checkpoints_dir, names); !ended.ok()) return ended.error();
    RT_TRY_SET(names, list_names(io, checkpoints_dir));
  }
  bool fenced = false;
  for (const std::string& name : names.leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(kTmpPrefix, name);
    if (!work) continue;
    // No trash: that may be put back as a step.
    const Status moved =
        io.rename(checkpoints_dir / name, checkpoints_dir / work_dir_name(kSparePrefix, work->step, work->writer));
    if (!moved.ok() && !is_not_found(moved.error())) return moved;  // not found: committed or given up just now
    fenced = true;
  }
  return fenced ? io.sync_dir(checkpoints_dir) : Status();
}

}  // namespace cairn::ckpt
