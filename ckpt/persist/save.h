#pragma once
// Saving a checkpoint: bytes in memory -> a committed directory. The caller gives boxes of tensors per file; who owns
// which box is decided elsewhere.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class SaveCache;   // layout.h
class SpareFiles;  // ckpt/retention/spare_files.h

/// Puts bytes [offset, offset + target.size()) of a shard into `target`.
using FillShard = std::function<Status(int64_t offset, std::span<std::byte> target)>;

/// One box of a tensor, row-major and contiguous: in memory, or made on the way to the disk by `fill`. `data` stays
/// untouched until save_checkpoint returns.
struct ShardData {
  int64_t tensor = 0;  // index into Manifest::tensors
  std::vector<int64_t> lo, hi;
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  std::vector<uint64_t> hashes;  // XXH3_64 per checksum (checksum_bytes.h), when the snapshot has them; else empty
  FillShard fill;  // when `data` is null; called once a write request, in the order of the save (SaveOptions::order)
  /// Of the bytes (whole words), as whoever made them has left it: compared on the way to the disk, and a difference
  /// ends the save with kCorrupt, naming the shard. For `data`.
  std::optional<uint64_t> word_sums;
  /// The bytes are floats that must be numbers: one that is not ends the save with kGuard, naming the shard. For
  /// `data`.
  bool finite = false;
};

/// One HDF5 file. Shards are written in this order, so that `fill` can work ahead.
struct WriterPart {
  std::string file_name;  // shard_file_name(i, n)
  std::vector<ShardData> shards;
};

/// Files that are open at once at the most, and become durable together: a sync while others write waits for them, and
/// they for it.
inline constexpr size_t kOpenFiles = 16;

/// Payload of a part from where the step before has left it up to byte `end` of its shard `shard`; all of it where that
/// is the number of its shards. Ends within a shard are multiples of 4096.
struct WriteStep {
  int64_t part = 0, shard = 0, end = 0;
};

struct SaveOptions {
  int64_t chunk_bytes = int64_t{4} << 20;  // of a request and of a checksum (less: checksum_bytes.h); of 4096
  int64_t fill_bytes = int64_t{64} << 20;  // memory for payload on its way; at least two chunks when filled
  int64_t max_bytes_per_s = 0;             // payload throttle; 0: as fast as it goes
  /// That the folder of the checkpoints is the one that is meant: asked before anything is written, once what is
  /// written lies in it, and before that gets its name. Empty: it is made when it is missing.
  std::function<Status()> check_folder;
  bool replace_existing = true;  // false: a committed step of this number is an error
  /// Also where other steps of the folder refer to the replaced one. A run that reaches this step again has abandoned
  /// those steps; its own save wins.
  bool replace_referred = false;
  /// Refuses (kUnsupported) to replace a step where two names cannot be exchanged: its bytes are nowhere else.
  bool must_exchange = false;
  const std::atomic<bool>* cancel = nullptr;  // looked at before each chunk; when true the save ends with kStopped
  std::optional<WriterId> writer;             // default: this process (this_writer())
  bool huge_pages = false;    // `data` lies in huge pages, 4096-aligned: large shards are written from where they are
  Codec codec = Codec::kRaw;  // kShuffleZstd: smaller files, slower ("Cold storage" in docs); small shards stay raw
  int64_t codec_threads = 0;  // 0: as many as the process may run on, at most 4
  /// An earlier checkpoint of the same folder, as its manifest was read or written: shards in memory that have not
  /// changed since become references to its files. What is there no longer is written instead. Not for filled shards.
  const Manifest* base = nullptr;
  double base_min_share =
      0.05;  // of the payload: what would save less is written, for it would keep a whole step alive
  // Going on after a kill (unfinished.h). A save with a key notes each file that is durable, and a stop keeps them.
  uint64_t resume_key = 0;   // of all that decides the bytes of the files; 0: no notes
  std::string resume_from;   // work directory in checkpoints_dir that a dead save of this key has left
  int64_t commit_bytes = 0;  // files are made durable once so much has been written; 0: by their number alone
  /// In which order payload is written; empty: part by part. At most kOpenFiles parts may be begun and not ended. Not
  /// for coded files.
  std::vector<WriteStep> order;
  SaveCache* cache = nullptr;  // kept between the saves of a run: HDF5 structures and buffers; makes small shards fast
  SpareFiles* spares = nullptr;  // to be written over, before space is taken that is free; not by coded files
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

/// Lays out, into options.cache, the files of a save that will come: the first save of a run then costs no more than
/// the others. Hashes and bytes of `parts` are not looked at. Errors: those of save_checkpoint's own check.
Status prepare_layouts(const Manifest& skeleton, std::span<const WriterPart> parts, const SaveOptions& options);

/// Takes into options.cache, touched, the buffers that such a save will pass its payload through.
Status prepare_buffers(std::span<const WriterPart> parts, const SaveOptions& options);

/// This process: host name, pid, start time, and a number that counts up with each call.
WriterId this_writer();

/// Writes `step-N` below `checkpoints_dir` (made when missing).
///
/// `skeleton` has everything but files and shards, which are filled in here (those of the save before, SaveReport's
/// manifest, may stand there: with many shards, going on from them is faster than making them anew); `parts` together
/// must tile every tensor of it. Steps of the commit, each checked: see the head of save.cc. On error nothing committed
/// has changed, what was written so far is removed (or left under a name that begins with kTmpPrefix, and the error
/// says so). One exception: when only the last step (sync of `checkpoints_dir`) fails, the new checkpoint is whole and
/// visible but may be gone after a power loss; the error says that. A committed step of the same number is replaced by
/// an atomic exchange of the two names, or refused (replace_existing = false): at no moment is there neither, but on
/// file systems that cannot exchange (must_exchange). An error of `fill` ends the save like one of the disk. Errors:
/// kInvalidInput (skeleton or parts do not fit together), kNoSpace (noticed before writing where the file system
/// tells), kIo, kStopped (cancel), kCorrupt (word sums). Threads: HDF5 calls are serialised inside; the backend is used
/// by this thread only.
Result<SaveReport> save_checkpoint(IoBackend& io, const std::filesystem::path& checkpoints_dir, Manifest skeleton,
                                   std::span<const WriterPart> parts, const SaveOptions& options = {});

}  // namespace cairn::ckpt
