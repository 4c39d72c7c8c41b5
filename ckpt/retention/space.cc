#include "ckpt/retention/space.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

std::string size_text(int64_t bytes) {
  constexpr double kKi = 1024;
  const auto number = static_cast<double>(bytes);
  if (number >= kKi * kKi * kKi * kKi) return fmt::format("{:.2f} TiB", number / (kKi * kKi * kKi * kKi));
  if (number >= kKi * kKi * kKi) return fmt::format("{:.2f} GiB", number / (kKi * kKi * kKi));
  if (number >= kKi * kKi) return fmt::format("{:.1f} MiB", number / (kKi * kKi));
  return fmt::format("{} bytes", bytes);
}

Result<SpaceReport> check_space(IoBackend& io, const fs::path& checkpoints_dir, const SpaceNeed& need) {
  SpaceReport report;
  RT_TRY_SET(const Catalog catalog, list_unlabelled(io, checkpoints_dir));
  for (const CheckpointInfo& info : catalog.checkpoints) report.present_bytes += info.size_bytes;
  fs::path asked = checkpoints_dir;
  for (;;) {
    const Result<FileStat> stat = io.stat(asked);
    if (stat.ok()) break;
    if (!is_not_found(stat.error()) || asked == asked.parent_path()) break;
    asked = asked.has_parent_path() ? asked.parent_path() : fs::path(".");
  }
  RT_TRY_SET(report.free_bytes, io.free_bytes(asked));
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  int64_t elsewhere_bytes = 0;
  for (const std::string& name : names.leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(name);
    const bool save = work && name.starts_with(kTmpPrefix) &&
                      std::ranges::find(names.cut_off, name, &CutOff::made) == names.cut_off.end();
    if (name.starts_with(kSparePrefix) || (save && !may_be_alive(work->writer))) {
      report.free_bytes += bytes_lying_there(io, checkpoints_dir / name);
    } else if (save && !is_of_this_host(work->writer)) {
      elsewhere_bytes += bytes_lying_there(io, checkpoints_dir / name);
    }
  }
  report.needed_bytes = (need.kept.at_least + need.in_flight) * need.checkpoint_bytes;
  // The first save finds all that is there still there; at the fullest moment only what the rules keep is left of it.
  const int64_t first = need.in_flight * need.checkpoint_bytes - report.free_bytes;
  const int64_t fullest = report.needed_bytes - report.present_bytes - report.free_bytes;
  report.missing_bytes = std::max<int64_t>({0, first, fullest});
  if (report.missing_bytes == 0) return report;
  report.text = fmt::format(
      "{}: {}{} kept + {} being written, {} each, are {}; {} of checkpoints are there and {} are free: {} "
      "are missing. {}"
      "Make room, keep fewer (checkpoint.keep), save elsewhere (--run), or say checkpoint.space = \"warn\"",
      checkpoints_dir.string(), need.kept.at_most == need.kept.at_least ? "" : "at least ", need.kept.at_least,
      need.in_flight, size_text(need.checkpoint_bytes), size_text(report.needed_bytes), size_text(report.present_bytes),
      size_text(report.free_bytes), size_text(report.missing_bytes),
      elsewhere_bytes == 0 ? ""
                           : fmt::format("{} lie in saves of other hosts: if those writers are gone, `cairn ckpt prune "
                                         "--leftovers --other-hosts --yes` frees them. ",
                                         size_text(elsewhere_bytes)));
  return report;
}

}  // namespace cairn::ckpt
