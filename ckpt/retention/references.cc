#include "ckpt/retention/references.h"

#include <string>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/retention/retention.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 20;

Status add(IoBackend& io, const std::filesystem::path& dir, std::set<int64_t>& steps) {
  const Result<std::string> text = read_file(io, dir / kReferencesName, kMostBytes);
  if (!text.ok()) return is_not_found(text.error()) ? Status() : Status(text.error());
  for (const int64_t step : parse_references(text.value())) steps.insert(step);
  return {};
}

}  // namespace

Result<std::map<std::string, std::set<int64_t>>> announcements(IoBackend& io,
                                                               const std::filesystem::path& checkpoints_dir) {
  std::map<std::string, std::set<int64_t>> out;
  for (const bool committed : {false, true}) {  // listed anew: a save may commit meanwhile
    const Result<std::vector<DirEntry>> entries = io.list(checkpoints_dir);
    if (!entries.ok()) {
      if (is_not_found(entries.error())) return out;
      return entries.error();
    }
    for (const DirEntry& entry : entries.value()) {
      if (const auto pin = parse_work_dir_name(kPinPrefix, entry.name); pin && !committed && may_be_alive(pin->writer))
        out[entry.name] = {pin->step};
      const bool wanted = committed ? parse_step_dir_name(entry.name).has_value() : entry.name.starts_with(kTmpPrefix);
      if (!entry.is_dir || !wanted) continue;
      std::set<int64_t> steps;
      RT_TRY(add(io, checkpoints_dir / entry.name, steps));
      if (!steps.empty()) out[entry.name] = std::move(steps);
    }
  }
  return out;
}

Result<std::set<int64_t>> announced_references(IoBackend& io, const std::filesystem::path& checkpoints_dir) {
  RT_TRY_SET(const auto all, announcements(io, checkpoints_dir));
  std::set<int64_t> steps;
  for (const auto& [name, needs] : all) steps.insert(needs.begin(), needs.end());
  return steps;
}

Result<std::vector<int64_t>> steps_that_need(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                             int64_t step) {
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  std::vector<int64_t> out;
  for (const int64_t other : names.steps) {
    if (other == step) continue;
    const CheckpointInfo info = look_at_checkpoint(io, checkpoints_dir, other);
    std::set<int64_t> needs(info.references.begin(), info.references.end());
    if (info.unread) RT_TRY(add(io, info.dir, needs));
    if ((info.complete || info.unread) && needs.contains(step)) out.push_back(other);
  }
  return out;
}

}  // namespace cairn::ckpt
