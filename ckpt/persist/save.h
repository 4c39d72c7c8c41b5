#pragma once
// Saving a checkpoint: bytes in memory -> a committed directory. What one process writes of a step is write_parts.h,
// and what makes the files of all a checkpoint is commit.h; here one process does both.
//
// The commit protocol. A reader believes a directory named step-N whose manifest's checksum holds; each step below must
// be durable before the next one begins, and each one's result is checked.
//
//   1. Check that skeleton and parts tile every tensor, and that the disk has room. Nothing is written before.
//   2. Make .tmp-step-N.<writer> and in it, for each part, one file (write_parts):
//      a. its HDF5 structure is laid out in memory (layout.h); the file is created with its space reserved, or a spare
//         one taken (retention/spare_files.h), which opens as HDF5 as little as a new one;
//      b. payload goes chunk by chunk to the offsets HDF5 gave, each hashed while it is on its way;
//      c. the chunk hashes are filled into the structure, whose pages are written, all but the first; of a spare file
//         also zeros wherever a new one would have them;
//      d. fsync; then the page with the superblock; the file is cut to its size; fsync.
//   3. Write shards.bin, fsync; write manifest.json, which has its hash, fsync (this and the rest: commit_step).
//   4. fsync the temporary directory: its entries are durable.
//   5. rename to step-N, or exchange with an existing step-N; where the file system cannot, that is moved away first
//      (retention/replace.h).
//   6. fsync the parent: until here a crash may bring the old name back.
//   7. Remove what was replaced.
//
// The disk is never left waiting: requests of all files share one queue, and up to kOpenFiles files go through 2d
// together when all of theirs are done, the manifest being made meanwhile.
//
// After a failed fsync the whole temporary directory is thrown away, never synced again.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/commit.h"
#include "ckpt/persist/write_parts.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

struct SaveOptions : WriteOptions, CommitOptions {
  std::optional<WriterId> writer;  // default: this process (this_writer())
  /// An earlier checkpoint of the same folder, as its manifest was read or written: shards in memory that have not
  /// changed since become references to its files. What is there no longer is written instead. Not for filled shards.
  const Manifest* base = nullptr;
  double base_min_share =
      0.05;                 // of the payload: what would save less is written, for it would keep a whole step alive
  std::string resume_from;  // work directory in checkpoints_dir that a dead save of this resume_key has left
};

struct SaveReport {
  std::filesystem::path dir;                    // the committed directory
  Manifest manifest;                            // as written
  int64_t payload_bytes = 0, file_bytes = 0;    // written now
  int64_t referenced_bytes = 0;                 // payload that lies in files of earlier steps
  double seconds = 0;                           // until the checkpoint was committed
  double layout_seconds = 0, sync_seconds = 0;  // parts of them
  double remove_seconds = 0;                    // after them, for what it replaced
  int64_t taken_files = 0, taken_bytes = 0;     // payload that resume_from had
  int64_t reused_files = 0;                     // written over spare files
  bool replaced = false;                        // a committed step of this number was there before
  std::string leftover;  // name of a directory that could not be removed (the replaced one), else empty
};

/// This process: host name, pid, start time, and a number that counts up with each call.
WriterId this_writer();

/// Names this program and the writer's host, where the manifest names none.
void put_writer(const WriterId& writer, Manifest& manifest);

/// Writes `step-N` below `checkpoints_dir` (made when missing).
///
/// `skeleton` has everything but files and shards, which are filled in here (those of the save before, SaveReport's
/// manifest, may stand there: with many shards, going on from them is faster than making them anew); `parts` together
/// must tile every tensor of it. Steps of the commit, each checked: see above. On error nothing committed
/// has changed, what was written so far is removed (or left under a name that begins with kTmpPrefix, and the error
/// says so). One exception: when only the last step (sync of `checkpoints_dir`) fails, the new checkpoint is complete
/// and visible but may be gone after a power loss; the error says that. A committed step of the same number is replaced
/// by an atomic exchange of the two names, or refused (replace_existing = false): at no moment is there neither, but on
/// file systems that cannot exchange (must_exchange). An error of `fill` ends the save like one of the disk. Errors:
/// kInvalidInput (skeleton or parts do not fit together), kNoSpace (noticed before writing where the file system
/// tells), kIo, kStopped (cancel), kCorrupt (word sums). Threads: HDF5 calls are serialised inside; the backend is used
/// by this thread only.
Result<SaveReport> save_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, Manifest skeleton,
                                   std::span<const WriterPart> parts, const SaveOptions& options = {});

}  // namespace cairn::ckpt
