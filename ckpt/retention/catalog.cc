#include "ckpt/retention/catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

/// The only code that looks into a cache.
struct CatalogAccess {
  using Seen = CatalogCache::Seen;
  static Seen* find(CatalogCache* cache, const fs::path& dir) {
    if (cache == nullptr) return nullptr;
    const auto it = cache->seen_.find(dir);
    return it == cache->seen_.end() ? nullptr : &it->second;
  }
  static void put(CatalogCache* cache, const fs::path& dir, const Seen& seen) {
    if (cache == nullptr) return;
    cache->seen_[dir] = seen;
    ++cache->decoded_;
  }
  /// What is no longer there is forgotten.
  static void keep_only(CatalogCache* cache, const fs::path& parent, const std::vector<int64_t>& steps) {
    if (cache == nullptr) return;
    std::erase_if(cache->seen_, [&](const auto& entry) {
      const std::optional<int64_t> step = parse_step_dir_name(entry.first.filename().string());
      return entry.first.parent_path() == parent && !(step && std::binary_search(steps.begin(), steps.end(), *step));
    });
  }
};

std::optional<double> CheckpointInfo::metric(std::string_view name) const {
  const auto it = metrics.find(metric_key(name));
  return it == metrics.end() ? std::nullopt : std::optional(it->second);
}

namespace {

Result<CatalogAccess::Seen> decode(const std::string& json, const std::string& table, const fs::path& dir,
                                   int64_t step) {
  RT_TRY_SET(const Manifest manifest, decode_manifest(json, table, dir.string()));
  if (manifest.step != step)
    return Error{ErrorCode::kCorrupt, fmt::format("{}: is of step {}", (dir / kManifestName).string(), manifest.step)};
  CatalogAccess::Seen seen;
  seen.info.created_unix_ms = manifest.created_unix_ms;
  seen.info.size_bytes = static_cast<int64_t>(json.size() + table.size());
  seen.info.metrics = manifest.metrics;
  for (const FileEntry& file : manifest.files) {
    seen.files.emplace_back(checkpoint_file_path(dir, file.step, file.name), file.size_bytes);
    if (file.step < 0) seen.info.size_bytes += file.size_bytes;  // the others are counted where they lie
  }
  seen.info.references = needed_steps(manifest.files);
  seen.info.run_id = manifest.run.id;
  seen.info.starts = starts_of(manifest);
  return seen;
}

// Fills in what the manifest says; the status tells why the checkpoint is not complete.
Status inspect(IoBackend& io, CheckpointInfo& info, CatalogCache* cache) {
  RT_TRY_SET(const std::string json, read_file(io, info.dir / kManifestName, kMaxManifestBytes + 4096));
  RT_TRY_SET(const std::string table, read_file(io, info.dir / kTableName, kMaxTableBytes));
  const std::array hashes{hash_bytes(json), hash_bytes(table)};
  CatalogAccess::Seen seen;
  if (const CatalogAccess::Seen* known = CatalogAccess::find(cache, info.dir);
      known != nullptr && known->hashes == hashes) {
    seen = *known;
  } else {
    RT_TRY_SET(seen, decode(json, table, info.dir, info.step));
    seen.hashes = hashes;
    CatalogAccess::put(cache, info.dir, seen);
  }
  seen.info.step = info.step;
  seen.info.dir = info.dir;
  info = seen.info;
  for (const auto& [path, size_bytes] : seen.files) {
    RT_TRY_SET(const FileStat stat, io.stat(path));
    if (stat.size_bytes != size_bytes)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("{}: {} bytes, the manifest has {}", path.string(), stat.size_bytes, size_bytes)};
  }
  return {};
}

bool proves_damage(const Error& error) {
  if (error.os_errno != 0) return is_not_found(error);
  return error.code == ErrorCode::kCorrupt || error.code == ErrorCode::kInvalidInput;
}

}  // namespace

Result<Names> list_names(IoBackend& io, const fs::path& checkpoints_dir) {
  Names names;
  Result<std::vector<DirEntry>> entries = io.list(checkpoints_dir);
  if (!entries.ok()) {
    if (is_not_found(entries.error())) return names;
    return std::move(entries).error();
  }
  for (const DirEntry& entry : entries.value()) {
    if (const auto step = entry.is_dir ? parse_step_dir_name(entry.name) : std::nullopt) {
      names.steps.push_back(*step);
    } else if (entry.is_dir && (entry.name.starts_with(kTmpPrefix) || entry.name.starts_with(kTrashPrefix) ||
                                entry.name.starts_with(kSparePrefix) || entry.name.starts_with(kPinPrefix))) {
      names.leftovers.push_back(entry.name);
    } else if (entry.is_dir || !entry.name.starts_with(kLabelsName)) {
      names.unknown.push_back(entry.name);
    }
  }
  const std::set<std::string_view> leftovers(names.leftovers.begin(), names.leftovers.end());
  std::set<int64_t> steps(names.steps.begin(), names.steps.end());
  for (const std::string& old : names.leftovers) {
    const std::optional<WorkDir> work = parse_work_dir_name(kTrashPrefix, old);
    if (!work || steps.contains(work->step)) continue;
    std::string made = work_dir_name(kTmpPrefix, work->step, work->writer);
    if (!leftovers.contains(made)) continue;
    steps.insert(work->step);
    names.cut_off.push_back({work->step, std::move(made), old});
  }
  names.steps.assign(steps.begin(), steps.end());
  return names;
}

int64_t bytes_lying_there(IoBackend& io, const fs::path& dir) {
  int64_t total = 0;
  Result<std::vector<DirEntry>> entries = io.list(dir);
  if (!entries.ok()) return 0;
  for (const DirEntry& entry : entries.value()) {
    if (Result<FileStat> stat = io.stat(dir / entry.name); stat.ok())
      total += std::min(stat.value().size_bytes, stat.value().disk_bytes);  // of a sparse file what it takes
  }
  return total;
}

CheckpointInfo look_at_directory(IoBackend& io, const fs::path& dir, int64_t step, CatalogCache* cache) {
  CheckpointInfo info{step, dir};
  const Status complete = inspect(io, info, cache);
  info.complete = complete.ok();
  if (!info.complete) {
    info.problem = complete.error().message;
    info.os_errno = complete.error().os_errno;
    info.unread = !proves_damage(complete.error());
    info.size_bytes = bytes_lying_there(io, info.dir);
  }
  return info;
}

CheckpointInfo look_at_checkpoint(IoBackend& io, const fs::path& checkpoints_dir, int64_t step, CatalogCache* cache) {
  CheckpointInfo info = look_at_directory(io, checkpoints_dir / step_dir_name(step), step, cache);
  if (info.complete || info.os_errno != ENOENT) return info;
  const Result<Names> names = list_names(io, checkpoints_dir);
  for (size_t k = 0; names.ok() && k < names.value().cut_off.size(); ++k) {
    const CutOff& cut = names.value().cut_off[k];
    if (cut.step != step) continue;
    info.problem = fmt::format(
        "{} is taking the place of another save of this step, or was when its writer died: try again; if it stays so, "
        "the next start of the run, or `cairn ckpt prune --leftovers --yes`, puts it there",
        cut.made);
    info.unread = true;
    info.os_errno = EAGAIN;
  }
  return info;
}

Result<Catalog> list_unlabelled(IoBackend& io, const fs::path& checkpoints_dir, CatalogCache* cache) {
  RT_TRY_SET(Names names, list_names(io, checkpoints_dir));
  Catalog catalog{.leftovers = std::move(names.leftovers), .unknown = std::move(names.unknown)};
  for (const int64_t step : names.steps)
    catalog.checkpoints.push_back(look_at_checkpoint(io, checkpoints_dir, step, cache));
  CatalogAccess::keep_only(cache, checkpoints_dir, names.steps);
  return catalog;
}

Result<Catalog> list_checkpoints(IoBackend& io, const fs::path& checkpoints_dir, CatalogCache* cache) {
  RT_TRY_SET(Catalog catalog, list_unlabelled(io, checkpoints_dir, cache));
  RT_TRY_SET(const Labels labels, read_labels(io, checkpoints_dir));
  for (CheckpointInfo& info : catalog.checkpoints) {
    if (labels.empty()) break;
    const LabelEntry* const entry = entry_of(labels, info.step, info.created_unix_ms);
    info.label = entry != nullptr ? entry->label : Label::kNew;
    if (entry != nullptr) {
      info.label_why = entry->why;
      info.held = entry->held;
    }
  }
  return catalog;
}

Result<CheckpointInfo> newest_complete(IoBackend& io, const fs::path& checkpoints_dir) {
  RT_TRY_SET(const Names names, list_names(io, checkpoints_dir));
  RT_TRY_SET(const Labels labels, read_labels(io, checkpoints_dir));
  std::string problems;
  for (auto it = names.steps.rbegin(); it != names.steps.rend(); ++it) {
    CheckpointInfo info = look_at_checkpoint(io, checkpoints_dir, *it);
    const LabelEntry* const entry = entry_of(labels, info.step, info.created_unix_ms);
    if (info.complete && entry != nullptr && entry->label == Label::kBad) {
      problems += fmt::format("; step {} is bad: {}", info.step, entry->why);
      continue;
    }
    if (info.complete) return info;
    if (info.unread) {
      const ErrorCode code = info.os_errno == EAGAIN ? ErrorCode::kUnavailable
                             : info.os_errno != 0    ? ErrorCode::kIo
                                                     : ErrorCode::kUnsupported;
      return Error{code,
                   fmt::format("step {} is the newest and cannot be read, which is no reason to take an older "
                               "one; name a step's folder to do so: {}",
                               info.step, info.problem),
                   info.os_errno};
    }
    problems += fmt::format("; step {} is damaged: {}", info.step, info.problem);
  }
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: no complete checkpoint{}", checkpoints_dir.string(), problems)};
}

Result<CheckpointInfo> find_step(IoBackend& io, const fs::path& checkpoints_dir, int64_t step) {
  CheckpointInfo found = look_at_checkpoint(io, checkpoints_dir, step);
  if (found.complete) return found;
  if (found.unread) return Error{ErrorCode::kIo, found.problem, found.os_errno};
  Result<Catalog> catalog = list_checkpoints(io, checkpoints_dir);
  if (!catalog.ok()) catalog = list_unlabelled(io, checkpoints_dir);  // the step is missing, whatever labels say
  if (!catalog.ok()) return std::move(catalog).error();
  std::string there;
  for (const CheckpointInfo& info : catalog.value().checkpoints) {
    if (info.complete) there += fmt::format("{}{}{}", there.empty() ? "" : ", ", info.step, info.bad() ? " (bad)" : "");
  }
  return Error{ErrorCode::kInvalidInput, fmt::format("{} has no complete step {}; there: {}", checkpoints_dir.string(),
                                                     step, there.empty() ? "none" : there)};
}

}  // namespace cairn::ckpt
