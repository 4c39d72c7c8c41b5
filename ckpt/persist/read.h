#pragma once
// Reading a committed checkpoint: manifest, then byte ranges. Offsets come from the manifest alone; HDF5 is not needed.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/buffer.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

/// `rows` times `bytes` bytes of a file, the first at `offset`, to dst and on. All must lie inside one shard of the
/// manifest. Of a coded shard the offset counts from the address that the manifest gives it; its chunks are read where
/// they are stored, and undone.
struct ReadRange {
  int64_t file = 0;  // index into Manifest::files
  int64_t offset = 0, bytes = 0;
  std::byte* dst = nullptr;
  int64_t rows = 1;
  int64_t source_stride = 0, target_stride = 0;  // from a row to the next, at least `bytes`; unused where there is one

  /// Bytes from the first row's first to the last row's last.
  int64_t span_bytes() const { return (rows - 1) * source_stride + bytes; }
};

inline constexpr int64_t kOpenReadFiles = 128;  // more than a disk has requests under way

struct ReadOptions {
  bool verify = true;                   // check each touched chunk's hash
  int64_t window_bytes = kBounceBytes;  // reads in flight, which is also the bounce memory
  int64_t codec_threads = 0;            // for coded shards; 0: as many as may run, at most 4
  bool huge_pages = false;              // dst lies in huge pages: whole chunks are read to where they belong
  BufferStore* buffers = nullptr;       // bounce memory, kept from reader to reader; null: the reader's own
  /// Files held open at once, at least 1, some with two descriptors: for one more the one whose use is the longest ago
  /// is closed, behind its reads.
  int64_t open_files = kOpenReadFiles;
};

/// What read_ranges has done so far.
struct ReadStats {
  int64_t wanted_bytes = 0;  // of the ranges given
  int64_t read_bytes = 0;  // asked of the disk, before rounding to pages: more than wanted where a chunk is read whole
                           // to verify a part of it, or where reading a gap is faster than leaving it out
  int64_t gap_bytes = 0;   // of them, between ranges that lie so close together that one request is faster
  int64_t requests = 0;
};

/// Reads and checks `dir/manifest.json` and `dir/shards.bin`. Errors name the path.
Result<Manifest> read_manifest(IoBackend& io, const std::filesystem::path& dir);

/// Whether this build can read the payload of all shards. Errors: kUnsupported, naming shard and codec.
Status check_codecs(const Manifest& manifest);

/// "shard-00000-of-00001.h5: weight w [0:4, 0:8]: chunk 2 of 9 (file bytes 8192:12288)": how errors name a chunk.
std::string describe_chunk(const Manifest& manifest, const ShardEntry& shard, int64_t chunk);

class CheckpointReader {
 public:
  /// Reads the manifest and checks that each file is there with its size. Files are opened when first read.
  static Result<CheckpointReader> open(IoBackend& io, const std::filesystem::path& dir,
                                       const ReadOptions& options = {});
  CheckpointReader(CheckpointReader&&) noexcept;
  CheckpointReader& operator=(CheckpointReader&&) noexcept;
  ~CheckpointReader();

  const Manifest& manifest() const;
  const ReadStats& stats() const;

  /// Reads all ranges (any order, overlaps allowed). With verify, complete chunks are read and their checksums
  /// compared, even where a range wants a part of one. A chunk is read once per call, however many ranges want it: give
  /// all ranges of all readers in one call, and replicas are read once and spread. Everything passes through bounce
  /// memory in huge pages, which is faster than reading into 4 KiB pages; with huge_pages complete chunks are read in
  /// place, adjacent ones in one request.
  /// On error the contents of all dst are unspecified.
  /// With verify it costs memory by the chunks that the ranges touch, not by their rows.
  /// Errors: kCorrupt names file, tensor, box, chunk and byte range with both checksums; kInvalidInput for a range
  /// outside every shard, or whose rows overlap.
  Status read_ranges(std::span<const ReadRange> ranges);

  /// One whole shard (index into Manifest::shards).
  Status read_shard(int64_t shard, std::span<std::byte> dst);

 private:
  struct Impl;
  explicit CheckpointReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::ckpt
