#pragma once
// What need not be written: shards whose bytes an earlier step of the same folder already holds.

#include <filesystem>
#include <span>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/save.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct Unchanged {
  std::vector<FileEntry> files;    // of earlier steps, each named directly
  std::vector<ShardEntry> shards;  // `file` is an index into `files`, `tensor` into the skeleton's tensors
  std::vector<WriterPart> rest;    // the parts without these shards; a part without any is gone
  int64_t bytes = 0;               // payload that is not written
};

/// Compares the hashes of chunks with those of options.base; a shard that has changed costs one chunk, nearly always.
/// Chunks of a coded shard are coded anew and compared as they are stored. Empty (`shards`) when there is no base, when
/// it is no earlier step, or when less than options.base_min_share of the payload is unchanged. Pure but for time.
/// Errors: those of coding.
Result<Unchanged> find_unchanged(const Manifest& skeleton, std::span<const WriterPart> parts,
                                 const SaveOptions& options);

/// Whether these files are there, with their sizes. A folder that cannot be looked at is an error.
Result<bool> all_there(IoBackend& io, const std::filesystem::path& dir, std::span<const FileEntry> files);

}  // namespace cairn::ckpt
