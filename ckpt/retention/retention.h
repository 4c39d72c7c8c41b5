#pragma once
// Which checkpoints live, and crash-safe removal: first the name is taken away (rename to .trash-..., parent synced),
// then the data. A crash in between leaves rubbish that is recognised by its name, never half a checkpoint.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/format/names.h"
#include "ckpt/retention/policy.h"
#include "ckpt/retention/spare_files.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct RetentionReport {
  std::vector<int64_t> removed;       // steps, ascending
  std::vector<int64_t> needed;        // that no rule keeps, but others or a save at work refer to; they go later
  std::vector<std::string> problems;  // what could not be removed and why; it is tried again next time
};

/// Removes what the policy does not keep (plan_retention). Does nothing while no checkpoint is complete. `writer` names
/// the trash; `spares` takes what it has room for. A failure to remove data is a problem in the report, a failure to
/// read the folder or to sync it is an error.
Result<RetentionReport> apply_retention(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                        const RetentionPolicy& policy, const WriterId& writer,
                                        CatalogCache* cache = nullptr, SpareFiles* spares = nullptr);

/// Removes these steps (ascending), what needs others before them, as apply_retention does.
Result<RetentionReport> remove_steps(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                     const std::vector<int64_t>& steps, const WriterId& writer,
                                     SpareFiles* spares = nullptr);

/// Fates that apply_retention would not carry out now: a step stays where another one that stays refers to it, also one
/// that cannot be read, or a save at work does. Says which; where that cannot be known, all stay.
void spare_referenced(IoBackend& io, const std::filesystem::path& checkpoints_dir, std::vector<Fate>& fates);

/// Removes one checkpoint, complete or damaged.
Status remove_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                         const WriterId& writer, SpareFiles* spares = nullptr);

struct CleanReport {
  std::vector<std::string> put_back;  // sentences: steps whose replacement was cut off (replace.h)
  std::vector<std::string> removed;
  std::vector<std::string> left;  // "name: why": its writer lives, is on another host, or it could not be removed
};

/// Whether this host's name is that of the writer's.
bool is_of_this_host(const WriterId& writer);
/// Whether the process that `writer` names may still be writing: true for a living process with the same start time on
/// this host, and for every process of another host, which cannot be asked.
bool may_be_alive(const WriterId& writer);

/// Why clean_leftovers() leaves this one of Names::leftovers alone; empty when it takes it.
std::string why_left(const std::string& name, const std::function<bool(const WriterId&)>& alive = may_be_alive);

/// Completes replacements that were cut off. Removes what dead saves and half-done removals have left, and spare files
/// of any owner. Called at the start of a run, before the first save. Holding the folder's lock does not prove that
/// writers of other hosts are gone. flock stays within a host on NFS with nolock or local_lock, on Lustre without -o
/// flock, and on most of FUSE. And a host that the server has lost sight of loses its lock and keeps writing.
Result<CleanReport> clean_leftovers(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                    const std::function<bool(const WriterId&)>& alive = may_be_alive);

/// Takes the names of all saves at work away, durably: whoever is at one cannot commit it any more, however late it
/// comes back, for a commit is a rename of that very name. For a new leader of a run, before it looks which steps there
/// are; nobody else may save into the folder. Replacements that were cut off are ended first. What is left is rubbish
/// of kSparePrefix, which clean_leftovers() removes.
Status fence_saves(IoBackend& io, const std::filesystem::path& checkpoints_dir);

}  // namespace cairn::ckpt
