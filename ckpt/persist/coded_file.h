#pragma once
// One shard file of coded shards. Unlike a raw file its layout is not known before its payload is: where a chunk lies
// depends on how small the ones before it became. So chunks are coded by a pool, HDF5 is told of each in order, and the
// bytes go to where it puts them, past the library; its structure stays in memory until the end.
//
// Threads: belongs to one thread; the pool's threads only code and hash.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ckpt/codec/codec.h"
#include "ckpt/codec/work_pool.h"
#include "ckpt/format/manifest.h"
#include "ckpt/persist/hdf5_file.h"
#include "ckpt/persist/write_parts.h"

namespace cairn::ckpt {

/// Extents of the chunks of a coded box, such that each chunk is a run of the box in row-major order and only the last
/// one has a part outside it: about `target_bytes` each. Empty when the box should stay raw: it is small (a chunk costs
/// some hundred bytes of structure), or no cut of a reasonable size is a run.
std::vector<int64_t> coded_chunk_extents(const std::vector<int64_t>& extents, int64_t elem_bytes, int64_t target_bytes);

/// XXH3_64 over the bytes of a file that is being written which lie in none of `taken` (offset and size), in file
/// order.
uint64_t hash_rest(Hdf5Image& image, std::vector<std::pair<int64_t, int64_t>> taken);

class CodedFile {
 public:
  /// Writes whole pages at a multiple of 4096; the bytes are the caller's again when it returns.
  using PutPages = std::function<Status(int64_t offset, std::span<const std::byte> pages)>;
  /// Called before each chunk with its payload size; an error ends the write.
  using Before = std::function<Status(int64_t payload_bytes)>;

  static Result<std::unique_ptr<CodedFile>> create(const Manifest& manifest, std::span<const ShardEntry> shards,
                                                   const WriteOptions& options, WorkPool& pool);

  /// What the file may grow to, a multiple of 4096.
  int64_t reserve_bytes() const { return reserve_bytes_; }

  /// All payload of `part`, and how it is stored into `shards`.
  Status write(const Manifest& manifest, const WriterPart& part, std::span<ShardEntry> shards, const Before& before,
               const PutPages& put_pages);
  /// Hashes become attributes, HDF5 closes its image; size and rest hash are known, coded shards get their addresses.
  Status finish(std::span<ShardEntry> shards, FileEntry& entry);

  Hdf5Image& image() { return image_ ? *image_ : writer_->image(); }

 private:
  struct Slot {
    int64_t shard = 0, chunk = 0;
    std::vector<std::byte> filled;
    CodedChunk coded;
    uint64_t hash = 0;
    std::future<Status> done;
  };
  CodedFile(const WriteOptions& options, WorkPool& pool) : options_(options), pool_(pool) {}
  Status write_raw(const ShardData& data, ShardEntry& shard, int64_t offset, const Before& before,
                   const PutPages& put_pages);
  Status put(int64_t offset, std::span<const std::byte> bytes, const PutPages& put_pages);
  Status retire(Slot& slot, std::span<ShardEntry> shards, const PutPages& put_pages);

  const WriteOptions& options_;
  WorkPool& pool_;
  std::unique_ptr<Hdf5Writer> writer_;
  std::unique_ptr<Hdf5Image> image_;
  std::vector<std::vector<int64_t>> chunk_extents_, box_extents_;
  std::vector<ChunkEncoder> encoders_;  // one a thread
  int64_t reserve_bytes_ = 0;
};

}  // namespace cairn::ckpt
