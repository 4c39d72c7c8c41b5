#include "ckpt/persist/commit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/persist/incremental.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/spare_files.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

/// Of the files of a manifest, those of earlier steps.
std::vector<FileEntry> referred(const Manifest& manifest) {
  std::vector<FileEntry> out;
  std::ranges::copy_if(manifest.files, std::back_inserter(out), [](const FileEntry& file) { return file.step >= 0; });
  return out;
}

}  // namespace

WorkFolder::WorkFolder(IoBackend& io, fs::path path, int64_t step, SpareFiles* spares)
    : io_(io), path_(std::move(path)), step_(step), spares_(spares), exceptions_(std::uncaught_exceptions()) {}

WorkFolder::~WorkFolder() {
  if (std::uncaught_exceptions() == exceptions_) return;
  try {
    ignore(remove_tree(io_, path_), "the next start removes it");
  } catch (const std::exception&) {  // out of memory still
  }
}

void WorkFolder::give_up_spares(const Error& error) {  // for the next try
  if (error.code == ErrorCode::kNoSpace && spares_ != nullptr) spares_->clear(io_);
}

Error WorkFolder::abandon(Error error) {
  give_up_spares(error);
  if (noted_ && error.code == ErrorCode::kStopped) {
    error.message += fmt::format("; the files that are done stay in {}, the same command resumes from them",
                                 path_.filename().string());
  } else if (Status removed = remove_tree(io_, path_); !removed.ok()) {
    error.message += fmt::format(" (and {} could not be removed: {})", path_.string(), removed.error().message);
  }
  return std::move(error).with(fmt::format("step {} was not saved", step_));
}

Result<bool> check_existing(IoBackend& io, const fs::path& checkpoints_dir, int64_t step,
                            const CommitOptions& options) {
  const fs::path dir = checkpoints_dir / step_dir_name(step);
  const Result<FileStat> existing = io.stat(dir);
  if (!existing.ok()) return is_not_found(existing.error()) ? Result<bool>(false) : existing.error();
  if (!options.replace_existing)
    return invalid(fmt::format("{}: step {} is there already; remove it first, or save with replacing allowed",
                               dir.string(), step));
  if (!options.replace_referred) {
    RT_TRY_SET(const std::vector<int64_t> others, steps_that_need(io, checkpoints_dir, step));
    if (!others.empty())
      return invalid(fmt::format(
          "{}: not replaced, step {} refers to its files; remove what refers to it first, or write to another folder",
          dir.string(), fmt::join(others, ", ")));
  }
  return true;
}

Result<Manifest> join_parts(Manifest skeleton, std::span<PartSet> sets) {
  for (const PartSet& set : sets) {
    if (set.step != skeleton.step)
      return invalid(fmt::format("files of step {} are no part of step {}", set.step, skeleton.step));
  }
  if (sets.size() == 1) {  // nothing is copied: there may be a million shards
    skeleton.files = std::move(sets.front().files);
    skeleton.shards = std::move(sets.front().shards);
    return skeleton;
  }
  skeleton.files.clear();
  skeleton.shards.clear();
  std::vector<std::vector<int64_t>> index;  // of each set's files in the manifest
  for (const PartSet& set : sets) index.emplace_back(set.files.size());
  for (const bool earlier : {false, true}) {  // what is referred to comes behind what was written
    for (size_t s = 0; s < sets.size(); ++s) {
      for (size_t f = 0; f < sets[s].files.size(); ++f) {
        if ((sets[s].files[f].step >= 0) != earlier) continue;
        index[s][f] = std::ssize(skeleton.files);
        skeleton.files.push_back(sets[s].files[f]);
      }
    }
    for (size_t s = 0; s < sets.size(); ++s) {
      for (ShardEntry& shard : sets[s].shards) {
        if (shard.file < 0 || shard.file >= std::ssize(sets[s].files))
          return invalid(fmt::format("a shard of file {}, its set has {}", shard.file, sets[s].files.size()));
        const auto file = static_cast<size_t>(shard.file);
        if ((sets[s].files[file].step >= 0) != earlier) continue;
        skeleton.shards.push_back(std::move(shard));
        skeleton.shards.back().file = index[s][file];
      }
    }
  }
  return skeleton;
}

Result<CommitReport> commit_step(IoBackend& io, WorkFolder& work, Manifest skeleton, std::span<PartSet> sets,
                                 bool replaces, const CommitOptions& options) {
  Result<Manifest> manifest = join_parts(std::move(skeleton), sets);
  if (!manifest.ok()) return work.abandon(std::move(manifest).error());
  const Result<ManifestFiles> files = encode_manifest_files(manifest.value());
  if (!files.ok()) return work.abandon(files.error());
  return commit_manifest(io, work, std::move(manifest).value(), files.value(), replaces, options);
}

Result<CommitReport> commit_manifest(IoBackend& io, WorkFolder& work, Manifest manifest, const ManifestFiles& files,
                                     bool replaces, const CommitOptions& options) {
  CommitReport report;
  report.dir = work.path().parent_path() / step_dir_name(work.step());
  report.replaced = replaces;
  const auto describe = [&]() -> Status {
    RT_TRY(write_file(io, work.path() / kTableName, files.table));
    RT_TRY(write_file(io, work.path() / kManifestName, files.json));
    return io.sync_dir(work.path());
  };
  if (Status described = describe(); !described.ok()) return work.abandon(std::move(described).error());

  if (const std::vector<FileEntry> earlier = referred(manifest); !earlier.empty()) {  // B2 of retention/references.h
    Result<bool> there = all_there(io, work.path(), earlier);
    if (!there.ok()) return work.abandon(std::move(there).error());
    if (!there.value()) {
      RT_TRY(remove_tree(io, work.path()));
      report.references_gone = true;
      report.manifest = std::move(manifest);
      return report;
    }
  }
  if (options.check_folder) {
    if (Status meant = options.check_folder(); !meant.ok()) return work.abandon(std::move(meant).error());
  }
  Replacement replacement;
  if (report.replaced) {
    replacement = replace_step(io, work.path(), options.must_exchange);
  } else {
    replacement.status = io.rename(work.path(), report.dir);
  }
  Status& published = replacement.status;
  if (!published.ok() && replacement.cut_off)
    return std::move(published).error().with(fmt::format("step {} was not saved", work.step()));
  if (!published.ok() && report.replaced && published.error().os_errno == ENOENT) {
    report.replaced = false;  // meanwhile removed, by the retention of another save in flight
    published = io.rename(work.path(), report.dir);
  }
  if (const int why = published.ok() ? 0 : published.error().os_errno;
      !options.replace_existing && (why == ENOTEMPTY || why == EEXIST)) {
    return work.abandon(invalid(
        fmt::format("{}: step {} was put there meanwhile by another process", report.dir.string(), work.step())));
  }
  if (!published.ok()) return work.abandon(std::move(published).error());
  if (Status synced = io.sync_dir(report.dir.parent_path()); !synced.ok()) {
    // Complete, but its name may not outlive a power loss; what it replaced stays where it is for the same reason.
    return std::move(synced).error().with(
        fmt::format("step {} is written and visible, but may be gone after a power loss", work.step()));
  }
  report.manifest = std::move(manifest);
  if (report.replaced) {
    const auto start = std::chrono::steady_clock::now();
    const fs::path& old = replacement.old;
    if (Status removed = remove_tree(io, old); !removed.ok()) report.leftover = old.filename().string();
    report.remove_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return report;
}

}  // namespace cairn::ckpt
