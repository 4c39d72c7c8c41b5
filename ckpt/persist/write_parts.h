#pragma once
// The half of a save that each process does for its own ranks: their files, written into the folder of a step under way
// and durable there, and all that the manifest has to say of them. commit.h is the other half, which one process does.
// The caller gives boxes of tensors per file; who owns which box is decided elsewhere.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/checksum_bytes.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class SaveCache;   // layout.h
class SpareFiles;  // ckpt/retention/spare_files.h

/// Puts bytes [offset, offset + target.size()) of a shard into `target`.
using FillShard = std::function<Status(int64_t offset, std::span<std::byte> target)>;

/// One box of a tensor, row-major and contiguous: in memory, or made on the way to the disk by `fill`. `data` stays
/// untouched until the write returns.
struct ShardData {
  int64_t tensor = 0;  // index into Manifest::tensors
  std::vector<int64_t> lo, hi;
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  std::vector<uint64_t> hashes;  // XXH3_64 per checksum (checksum_bytes.h), when the snapshot has them; else empty
  FillShard fill;  // when `data` is null; called once a write request, in the order of the save (WriteOptions::order)
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

struct WriteOptions {
  int64_t chunk_bytes = int64_t{4} << 20;  // of a request and of a checksum (less: checksum_bytes.h); of 4096
  int64_t fill_bytes = int64_t{64} << 20;  // memory for payload on its way; at least two chunks when filled
  /// Counted over the boxes of the whole step, where `parts` are some of them; none: they are all.
  std::optional<ChecksumBytes> checksum_bytes;
  int64_t max_bytes_per_s = 0;                // payload throttle; 0: as fast as it goes
  const std::atomic<bool>* cancel = nullptr;  // looked at before each chunk; when true the save ends with kStopped
  bool huge_pages = false;    // `data` lies in huge pages, 4096-aligned: large shards are written from where they are
  Codec codec = Codec::kRaw;  // kShuffleZstd: smaller files, slower ("Cold storage" in docs); small shards stay raw
  int64_t codec_threads = 0;  // 0: as many as the process may run on, at most 4
  // Going on after a kill (unfinished.h). A save with a key notes each file that is durable, and a stop keeps them.
  uint64_t resume_key = 0;   // of all that decides the bytes of the files; 0: no notes
  int64_t commit_bytes = 0;  // files are made durable once so much has been written; 0: by their number alone
  /// In which order payload is written; empty: part by part. At most kOpenFiles parts may be begun and not ended. Not
  /// for coded files.
  std::vector<WriteStep> order;
  SaveCache* cache = nullptr;  // kept between the saves of a run: HDF5 structures and buffers; makes small shards fast
  SpareFiles* spares = nullptr;  // to be written over, before space is taken that is free; not by coded files
};

struct WriteStats {
  int64_t payload_bytes = 0, file_bytes = 0;
  double layout_seconds = 0, sync_seconds = 0;
  int64_t taken_files = 0, taken_bytes = 0;  // payload that a dead save had left
  int64_t reused_files = 0;                  // written over spare files
};

/// Files of one step and what lies in them: what one process has written, for commit_step().
struct PartSet {
  int64_t step = 0;
  std::vector<FileEntry> files;    // in the order of the parts; those of earlier steps that it refers to come last
  std::vector<ShardEntry> shards;  // theirs, file by file; ShardEntry::file is an index into `files`
  WriteStats stats;
};

/// Counted over all shards of `parts`: of a whole step, for WriteOptions::checksum_bytes.
ChecksumBytes checksum_bytes_of(const Manifest& skeleton, std::span<const WriterPart> parts, int64_t chunk_bytes);

/// Files and shards of `parts` with their sizes, in `set`; offsets and hashes come while they are written. To check
/// them before, shards get made-up offsets one behind the other. What stands in `set` of the same parts, from the save
/// before, stays: with many shards, going on from that is faster. Returns whether it did. Errors: kInvalidInput.
Result<bool> plan_parts(const Manifest& skeleton, std::span<const WriterPart> parts, const WriteOptions& options,
                        PartSet& set);

/// Writes the files of `parts` into `work`, a folder that is there, and makes them durable; their names are durable
/// once `work` is synced (by the caller, or by commit_step()). `skeleton` is of the whole step: its step and tensors
/// count here, and the same parts give the same bytes whichever call writes them. On error `work` holds whatever was
/// written so far; who made it removes it. Errors: kInvalidInput (skeleton or parts do not fit together), kNoSpace,
/// kIo, kStopped (cancel), kCorrupt (word sums), kGuard; those of `fill`. Threads: HDF5 calls are serialised inside;
/// the backend is used by this thread only.
Result<PartSet> write_parts(IoBackend& io, const std::filesystem::path& work, const Manifest& skeleton,
                            std::span<const WriterPart> parts, const WriteOptions& options = {});

/// The same for whoever has planned and checked the set, and has something to do meanwhile.
struct WriteHooks {
  std::map<size_t, FinishedFile> taken;  // by part: files that a dead save has left in `work`
  std::function<void()> noted;           // files with notes lie in `work` from now on; may be empty
  /// The set is what it will be, and its last requests are on their way. May be empty.
  std::function<Status()> meanwhile;
};
Status write_planned(IoBackend& io, const std::filesystem::path& work, const Manifest& skeleton,
                     std::span<const WriterPart> parts, const WriteOptions& options, const WriteHooks& hooks,
                     PartSet& set);

/// Lays out, into options.cache, the files of a save that will come: the first save of a run then costs no more than
/// the others. Hashes and bytes of `parts` are not looked at. Errors: those of write_parts's own check.
Status prepare_layouts(const Manifest& skeleton, std::span<const WriterPart> parts, const WriteOptions& options);

/// Takes into options.cache, touched, the buffers that such a save will pass its payload through.
Status prepare_buffers(std::span<const WriterPart> parts, const WriteOptions& options);

}  // namespace cairn::ckpt
