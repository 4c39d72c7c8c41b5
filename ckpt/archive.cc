#include "ckpt/archive.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/read.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/retention.h"

namespace cairn::ckpt {

Result<ArchiveReport> archive_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                                         const std::function<void(int64_t done, int64_t total)>& progress) {
  const std::filesystem::path dir = checkpoints_dir / step_dir_name(step);
  RT_TRY_SET(CheckpointReader reader, CheckpointReader::open(io, dir));
  const Manifest& source = reader.manifest();
  ArchiveReport report;
  std::vector<WriterPart> parts;
  for (const FileEntry& file : source.files) {
    if (file.step >= 0) {
      return Error{
          ErrorCode::kUnsupported,
          fmt::format("{} refers to files of step {}: what steps share is not archived", dir.string(), file.step)};
    }
    report.bytes_before += file.size_bytes;
    parts.push_back({file.name, {}});
  }
  report.bytes_after = report.bytes_before;
  report.was_archived = std::any_of(source.shards.begin(), source.shards.end(),
                                    [](const ShardEntry& shard) { return shard.codec != Codec::kRaw; });
  if (report.was_archived) return report;
  RT_TRY_SET(const bool exchanges, can_exchange(io, checkpoints_dir, this_writer()));
  if (!exchanges) {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("{}: not compressed: its file system cannot exchange two names, as most network file "
                             "systems cannot, so nothing can take its place at one instant; `cairn ckpt reshard {} "
                             "NEW_RUN --mesh ... --compress zstd` writes it compressed into another folder",
                             dir.string(), dir.string())};
  }

  const int64_t total = payload_bytes(source);
  int64_t done = 0;
  for (const ShardEntry& shard : source.shards) {
    ShardData data{.tensor = shard.tensor, .lo = shard.box.lo, .hi = shard.box.hi, .bytes = shard.bytes};
    data.fill = [&, file = shard.file, begin = shard.offset](int64_t offset, std::span<std::byte> out) -> Status {
      const ReadRange range{file, begin + offset, static_cast<int64_t>(out.size()), out.data()};
      RT_TRY(reader.read_ranges(std::span(&range, 1)));
      done += range.bytes;
      if (progress) progress(done, total);
      return {};
    };
    parts[static_cast<size_t>(shard.file)].shards.push_back(std::move(data));
  }
  SaveOptions save;
  save.codec = Codec::kShuffleZstd;
  save.must_exchange = true;
  Manifest skeleton = source;
  skeleton.files.clear();
  skeleton.shards.clear();
  RT_TRY_SET(const SaveReport saved, save_checkpoint(io, checkpoints_dir, std::move(skeleton), parts, save));
  report.bytes_after = saved.file_bytes;
  return report;
}

std::vector<std::string> left_by_saves_of(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                          const std::vector<std::string>& leftovers,
                                          const std::vector<int64_t>& steps) {
  std::vector<std::string> out;
  for (const std::string& name : leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(kTmpPrefix, name);
    if (!work || std::ranges::find(steps, work->step) == steps.end() || may_be_alive(work->writer)) continue;
    const Result<std::vector<DirEntry>> entries = io.list(checkpoints_dir / name);
    if (entries.ok() && std::ranges::none_of(entries.value(), [](const DirEntry& e) { return is_note_name(e.name); }))
      out.push_back(name);
  }
  return out;
}

Result<std::vector<std::string>> unnamed_entries(IoBackend& io, const std::filesystem::path& step_dir) {
  RT_TRY_SET(const Manifest manifest, read_manifest(io, step_dir));
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(step_dir));
  std::vector<std::string> out;
  for (const DirEntry& entry : entries) {
    const bool own = entry.name == kManifestName || entry.name == kTableName || entry.name == kReferencesName ||
                     std::ranges::any_of(manifest.files, [&](const FileEntry& file) {
                       return file.step < 0 && file.name == entry.name;
                     });
    if (!own) out.push_back(entry.name);
  }
  return out;
}

}  // namespace cairn::ckpt
