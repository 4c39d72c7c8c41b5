#include "ckpt/retention/replace.h"

#include <fmt/format.h>

#include <cerrno>
#include <optional>

#include "ckpt/format/names.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

bool is_there(IoBackend& io, const fs::path& path) { return io.stat(path).ok(); }

bool is_missing(IoBackend& io, const fs::path& path) {
  const Result<FileStat> stat = io.stat(path);
  return !stat.ok() && is_not_found(stat.error());
}

/// Step 2, by whoever comes first.
Status put_in_place(IoBackend& io, const fs::path& from, const fs::path& dir) {
  Status moved = io.rename(from, dir);
  if (!moved.ok() && is_there(io, dir) && is_missing(io, from)) return {};
  return moved;
}

}  // namespace

Replacement replace_step(IoBackend& io, const fs::path& work, bool must_exchange) {
  const std::optional<WorkDir> name = parse_work_dir_name(kTmpPrefix, work.filename().string());
  RT_CHECK(name.has_value(), "{} is no work directory", work.string());
  const fs::path dir = work.parent_path() / step_dir_name(name->step);
  Replacement out{.old = work};
  out.status = io.exchange(work, dir);
  if (out.status.ok() || out.status.error().code != ErrorCode::kUnsupported || must_exchange) return out;
  out.old = work.parent_path() / work_dir_name(kTrashPrefix, name->step, name->writer);
  out.status = io.sync_dir(work.parent_path());  // or a power loss could leave the old one's new name alone
  if (out.status.ok()) out.status = io.rename(dir, out.old);
  if (!out.status.ok()) return out;
  out.status = put_in_place(io, work, dir);
  if (out.status.ok()) return out;
  if (io.rename(out.old, dir).ok()) return out;
  out.cut_off = true;
  out.status =
      std::move(out.status)
          .with(fmt::format("cut off while it replaced {}, which the next start of the run ends", dir.string()));
  return out;
}

Result<bool> can_exchange(IoBackend& io, const fs::path& checkpoints_dir, const WriterId& writer) {
  const fs::path one = checkpoints_dir / work_dir_name(kTmpPrefix, 0, writer);
  const fs::path other = checkpoints_dir / work_dir_name(kTmpPrefix, 1, writer);
  RT_TRY(io.make_dir(one));
  Status exchanged = io.make_dir(other);
  if (exchanged.ok()) {
    exchanged = io.exchange(one, other);
    ignore(io.remove_dir(other), "it is rubbish by its name");
  }
  ignore(io.remove_dir(one), "it is rubbish by its name");
  if (exchanged.ok()) return true;
  if (exchanged.error().code == ErrorCode::kUnsupported) return false;
  return std::move(exchanged).error();
}

CheckpointInfo look_at_cut_off(IoBackend& io, const fs::path& checkpoints_dir, const CutOff& cut) {
  CheckpointInfo made = look_at_directory(io, checkpoints_dir / cut.made, cut.step);
  if (made.complete || made.unread) return made;  // it always holds, if nobody else was at it
  return look_at_directory(io, checkpoints_dir / cut.old, cut.step);
}

Result<std::vector<std::string>> finish_replacements(IoBackend& io, const fs::path& checkpoints_dir,
                                                     const Names& names) {
  std::vector<std::string> said;
  for (const CutOff& cut : names.cut_off) {
    const fs::path dir = checkpoints_dir / step_dir_name(cut.step);
    const CheckpointInfo info = look_at_cut_off(io, checkpoints_dir, cut);
    if (info.unread) {
      return Error{ErrorCode::kIo, fmt::format("{}: cannot be put in its place: {}", dir.string(), info.problem),
                   info.os_errno};
    }
    if (!info.complete) continue;
    RT_TRY(put_in_place(io, info.dir, dir));
    RT_TRY(io.sync_dir(checkpoints_dir));
    said.push_back(fmt::format("put {} in its place: its writer died, or could not, while it replaced that step",
                               step_dir_name(cut.step)));
  }
  return said;
}

}  // namespace cairn::ckpt
