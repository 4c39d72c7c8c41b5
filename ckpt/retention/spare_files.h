#pragma once
// Files of removed checkpoints, for the next save to write over. Blocks that a file has are written faster than new
// ones, which a disk must find, note and often make first (docs/benchmarks.md). They take no
// more room than the next save, which needs that room anyway; a save that meets a full disk gives them up.
//
// When a checkpoint's name is gone for good (retention.cc), its files go to .spare-step-N.<writer>. Those stay that
// IoBackend::reopen() gives, so nobody else has them. Their first pages are zeroed for good before anything else
// happens: a file that holds parts of two checkpoints never opens as HDF5. A process removes its spare files when it
// ends; the next start of the run removes those of a killed one, on any host. Nothing in them is ever read, and a
// process that finds its own gone makes new files.
//
// Threads: any, each with a backend of its own.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class SpareFiles {
 public:
  SpareFiles() = default;
  SpareFiles(const SpareFiles&) = delete;

  /// How many bytes are kept at the most, from the next take_in() on; at first none.
  void limit(int64_t bytes);
  int64_t bytes() const;

  /// Removes `trash`, a directory named by work_dir_name(): all of it, or all but files to be written over.
  Status take_in(IoBackend& io, const std::filesystem::path& trash);

  /// One of them as the new file `path` of the same folder, `size_bytes` long and that much space reserved: the first
  /// page zero, the rest anything. Null when none serves; then nothing lies at `path`.
  std::unique_ptr<IoFile> reuse(IoBackend& io, const std::filesystem::path& path, int64_t size_bytes);

  /// Removes all; false when there were none.
  bool clear(IoBackend& io);

 private:
  struct Spare {
    std::filesystem::path path;
    int64_t bytes = 0;
  };
  int64_t kept_bytes() const;
  void trim(IoBackend& io);                                         // to the limit, which may have come down
  void leave(IoBackend& io, const std::filesystem::path& folder);   // which goes when nothing is in it
  void forget(IoBackend& io, const std::filesystem::path& folder);  // with all that is in it

  std::mutex upkeep_;         // take_in() and clear() are one at a time
  mutable std::mutex mutex_;  // guards what follows
  int64_t limit_ = 0;
  std::vector<Spare> spares_;
  std::set<std::filesystem::path> folders_;  // that they lie in, or that could not be removed
};

}  // namespace cairn::ckpt
