#include "ckpt/retention/catalog.h"

#include <fmt/format.h>

#include <algorithm>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

// Fills in what the manifest says; the status tells why the checkpoint is not complete.
Status inspect(IoBackend& io, CheckpointInfo& info) {
  RT_TRY_SET(const std::string json, read_file(io, info.dir / kManifestName, kMaxManifestBytes + 4096));
  RT_TRY_SET(const std::string table, read_file(io, info.dir / kTableName, kMaxTableBytes));
  RT_TRY_SET(const Manifest manifest, decode_manifest(json, table, info.dir.string()));
  if (manifest.step != info.step)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: is of step {}", (info.dir / kManifestName).string(), manifest.step)};
  info.created_unix_ms = manifest.created_unix_ms;
  info.size_bytes = static_cast<int64_t>(json.size() + table.size());
  for (const FileEntry& file : manifest.files) {
    const fs::path path = checkpoint_file_path(info.dir, file.step, file.name);
    RT_TRY_SET(const FileStat stat, io.stat(path));
    if (stat.size_bytes != file.size_bytes)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: {} bytes, the manifest has {}", path.string(), stat.size_bytes, file.size_bytes)};
    if (file.step < 0) info.size_bytes += file.size_bytes;  // the others are counted where they lie
  }
  return {};
}

int64_t bytes_lying_there(IoBackend& io, const fs::path& dir) {
  int64_t total = 0;
  Result<std::vector<DirEntry>> entries = io.list(dir);
  if (!entries.ok()) return 0;
  for (const DirEntry& entry : entries.value()) {
    if (Result<FileStat> stat = io.stat(dir / entry.name); stat.ok()) total += stat.value().size_bytes;
  }
  return total;
}

}  // namespace

Result<Catalog> list_checkpoints(IoBackend& io, const fs::path& checkpoints_dir) {
  Catalog catalog;
  Result<std::vector<DirEntry>> entries = io.list(checkpoints_dir);
  if (!entries.ok()) {
    if (is_not_found(entries.error())) return catalog;
    return std::move(entries).error();
  }
  for (const DirEntry& entry : entries.value()) {
    const std::optional<int64_t> step = entry.is_dir ? parse_step_dir_name(entry.name) : std::nullopt;
    if (step) {
      CheckpointInfo info{*step, checkpoints_dir / entry.name};
      const Status complete = inspect(io, info);
      info.complete = complete.ok();
      if (!info.complete) {
        info.problem = complete.error().message;
        info.size_bytes = bytes_lying_there(io, info.dir);
      }
      catalog.checkpoints.push_back(std::move(info));
    } else if (entry.is_dir && (entry.name.starts_with(kTmpPrefix) || entry.name.starts_with(kTrashPrefix))) {
      catalog.leftovers.push_back(entry.name);
    } else {
      catalog.unknown.push_back(entry.name);
    }
  }
  std::sort(catalog.checkpoints.begin(), catalog.checkpoints.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return catalog;
}

Result<CheckpointInfo> newest_complete(IoBackend& io, const fs::path& checkpoints_dir) {
  RT_TRY_SET(const Catalog catalog, list_checkpoints(io, checkpoints_dir));
  std::string problems;
  for (auto it = catalog.checkpoints.rbegin(); it != catalog.checkpoints.rend(); ++it) {
    if (it->complete) return *it;
    problems += fmt::format("; step {} is damaged: {}", it->step, it->problem);
  }
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: no complete checkpoint{}", checkpoints_dir.string(), problems)};
}

}  // namespace cairn::ckpt
