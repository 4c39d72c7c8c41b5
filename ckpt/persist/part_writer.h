#pragma once
// One shard file on its way to the disk: steps 2a to 2d of the commit protocol (save.h), in pieces, so that the files
// of a save share one queue and become durable together.
//
// Payload is copied into buffers of kRunBytes in huge pages, shard behind shard with the zeros between them: a request
// from 4 KiB pages reaches three quarters of the disk's speed and pinning its pages costs as much CPU as the copy.
// Large shards whose memory is in huge pages are written from where they lie. What shares a page with HDF5's own
// structure waits for 2c.
//
// Threads: that of the write alone.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"
#include "ckpt/persist/buffer.h"
#include "ckpt/persist/coded_file.h"
#include "ckpt/persist/layout.h"
#include "ckpt/persist/write_parts.h"
#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

inline constexpr int64_t kRunBytes = int64_t{4} << 20;  // of packed shards, and of structure
inline constexpr int64_t kRuns = 15;                    // below 60 MiB the disk's queue is not always full

/// What a shard's bytes must hold on the way to the disk (ShardData::word_sums, ::finite), in a pass of its own: for
/// saves that look at the bytes in another order. Errors: kCorrupt and kGuard, naming the shard.
Status check_all_sums(std::span<const WriterPart> parts, const Manifest& skeleton);

// Spreads the payload over time, and notices a wish to stop.
class Pace {
 public:
  explicit Pace(const WriteOptions& options) : options_(options) {}
  Status before(int64_t bytes);

 private:
  const WriteOptions& options_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int64_t done_ = 0;
};

// Memory on its way to the disk, used in turn. The files that write from it live longer than it is asked for.
class BufferPool {
 public:
  /// `kept`: where buffers come from and go to; may be null.
  BufferPool(int64_t buffer_bytes, int64_t count, BufferStore* kept)
      : buffer_bytes_(buffer_bytes), kept_(kept), slots_(static_cast<size_t>(std::max<int64_t>(2, count))) {}
  BufferPool(const BufferPool&) = delete;
  ~BufferPool() {
    for (Slot& slot : slots_) {
      if (kept_ != nullptr) kept_->put_back(std::move(slot.buffer));
    }
  }

  /// The buffer used longest ago, when its writes are done.
  Result<std::span<std::byte>> next() {
    at_ = (at_ + 1) % slots_.size();
    Slot& slot = slots_[at_];
    if (!slot.buffer) {
      RT_TRY_SET(slot.buffer, kept_ != nullptr ? kept_->take(buffer_bytes_) : Buffer::allocate(buffer_bytes_));
    }
    for (; !slot.writes.empty(); slot.writes.pop_back())
      RT_TRY(slot.writes.back().file->wait(slot.writes.back().ticket));
    return slot.buffer.bytes();
  }
  /// What next() gave last, or a part of it, is being written.
  void writing(IoFile& file, IoTicket ticket) { slots_[at_].writes.push_back({&file, ticket}); }
  /// This file has finished all its writes.
  void release(const IoFile& file) {
    for (Slot& slot : slots_) std::erase_if(slot.writes, [&](const Write& write) { return write.file == &file; });
  }

 private:
  struct Write {
    IoFile* file;
    IoTicket ticket;
  };
  struct Slot {
    Buffer buffer;
    std::vector<Write> writes;
  };
  int64_t buffer_bytes_;
  BufferStore* kept_;
  std::vector<Slot> slots_;
  size_t at_ = 0;
};

// One file on its way.
class PartWriter {
 public:
  /// All that is referred to outlives the writer; `skeleton` is looked at for its tensors and step.
  PartWriter(const Manifest& skeleton, const WriterPart& part, std::span<ShardEntry> shards,
             std::unique_ptr<FileLayout> layout, std::unique_ptr<CodedFile> coded, std::unique_ptr<IoFile> file,
             bool was_spare, BufferPool& runs);
  // Left early on an error: the file waits for its requests while the pools still hold what they write from.
  ~PartWriter();

  /// Step 2b from where the last call ended up to byte `end` of shard `last` (behind the last shard: all of it).
  /// Returns when that is on its way.
  Status write_payload(int64_t last, int64_t end, const WriteOptions& options, Pace& pace, BufferPool& fills,
                       WriteStats& stats);
  /// All payload is on its way.
  bool wrote_all() const { return shard_ == std::ssize(shards_); }

  /// Steps 2c and 2d up to the superblock: the structure is on its way.
  Status write_structure(FileEntry& entry, WriteStats& stats);

  // The rest of step 2d, in pieces, so that several files wait for the disk together.
  Status finish_writes();
  Status start_sync();
  Status start_superblock(std::span<std::byte> page);
  Status cut() { return file_->truncate(image().eoa); }
  Status wait() { return file_->wait(ticket_); }
  Status close() { return file_->close(); }

  void keep_layout(SaveCache& cache);
  IoFile& file() { return *file_; }

 private:
  struct Late {
    int64_t offset;
    std::vector<std::byte> bytes;
  };

  Hdf5Image& image() { return coded_ ? coded_->image() : layout_->image(); }
  Status clear_gaps();
  Status write_piece(ShardEntry& shard, const ShardData& data, int64_t bytes, const WriteOptions& options,
                     BufferPool& fills);
  Status write_coded(Pace& pace, WriteStats& stats);
  std::span<const std::byte> next_pass(int64_t at) const;
  Status pack(int64_t offset, std::span<const std::byte> bytes);
  void pad_run();
  Status flush_run();

  const Manifest& skeleton_;
  const WriterPart& part_;
  std::span<ShardEntry> shards_;
  std::unique_ptr<FileLayout> layout_;  // of a raw file
  std::unique_ptr<CodedFile> coded_;    // of a coded one
  std::unique_ptr<IoFile> file_;
  bool was_spare_;  // what is not written is not zero
  BufferPool& runs_;
  IoTicket ticket_ = 0;
  int64_t shard_ = 0, at_ = 0;         // how far the payload has been written
  uint64_t sums_ = 0;                  // of this shard up to there
  int64_t not_finite_ = 0;             // the same
  std::optional<StreamingHash> hash_;  // of the chunk there, when it is looked at in several passes
  std::vector<Late> late_;
  std::span<std::byte> run_;          // what is being packed; empty: nothing
  std::span<const std::byte> ahead_;  // of what is hashed next, what has not been asked for yet
  int64_t run_begin_ = 0, run_used_ = 0;
};

}  // namespace cairn::ckpt
