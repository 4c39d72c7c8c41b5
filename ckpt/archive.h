#pragma once
// Cold storage in place. Writes a committed checkpoint anew with compressed chunks: the same tensors in the same files
// of the same layout. It takes its own place by one atomic exchange (save_checkpoint's commit). At every instant the
// folder has the complete step, in the old form or in the new one.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct ArchiveReport {
  bool was_archived = false;                  // nothing to do: shards are compressed (small ones never are)
  int64_t bytes_before = 0, bytes_after = 0;  // of its files
};

/// Compares every chunk's checksum on the way. Memory: some 64 MiB, and a chunk for each coding thread. Errors:
/// kUnsupported when it refers to files of other steps (archiving would copy them), or, before anything is read, where
/// the file system cannot exchange two names; kCorrupt naming the damaged chunk, and nothing has changed; those of
/// save_checkpoint. The caller checks that no other step refers to this one (CheckpointInfo::references).
Result<ArchiveReport> archive_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, int64_t step,
                                         const std::function<void(int64_t done, int64_t total)>& progress = {});

/// Of `leftovers` (Catalog) those that a save of one of `steps`, which are complete, has left when it was killed: half
/// an archive, or the old form behind the exchange. Not those that a save goes on from (persist/unfinished.h).
std::vector<std::string> left_by_saves_of(IoBackend& io, const std::filesystem::path& checkpoints_dir,
                                          const std::vector<std::string>& leftovers, const std::vector<int64_t>& steps);

/// What lies in a checkpoint's folder besides what its manifest names: an exchange would take it along.
Result<std::vector<std::string>> unnamed_entries(IoBackend& io, const std::filesystem::path& step_dir);

}  // namespace cairn::ckpt
