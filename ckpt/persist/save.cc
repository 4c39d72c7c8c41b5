// The commit protocol. A reader believes a directory named step-N whose manifest's checksum holds; each step below must
// be durable before the next one begins, and each one's result is checked.
//
//   1. Check that skeleton and parts tile every tensor, and that the disk has room. Nothing is written before.
//   2. Make .tmp-step-N.<writer> and in it, for each part, one file:
//      a. its HDF5 structure is laid out in memory (layout.h); the file is created with its space reserved, or a spare
//         one taken (retention/spare_files.h), which opens as HDF5 as little as a new one;
//      b. payload goes chunk by chunk to the offsets HDF5 gave, each hashed while it is on its way;
//      c. the chunk hashes are filled into the structure, whose pages are written, all but the first; of a spare file
//         also zeros wherever a new one would have them;
//      d. fsync; then the page with the superblock; the file is cut to its size; fsync.
//   3. Write shards.bin, fsync; write manifest.json, which has its hash, fsync.
//   4. fsync the temporary directory: its entries are durable.
//   5. rename to step-N, or exchange with an existing step-N; where the file system cannot, that is moved away first
//      (retention/replace.h).
//   6. fsync the parent: until here a crash may bring the old name back.
//   7. Remove what was replaced.
//
// The disk is never left waiting: requests of all files share one queue, and up to kOpenFiles files go through 2d
// together when all of theirs are done, the manifest being made meanwhile. Payload is copied into buffers of kRunBytes
// in huge pages, shard behind shard with the zeros between them: a request from 4 KiB pages reaches three quarters of
// the disk's speed and pinning its pages costs as much CPU as the copy. Large shards whose memory is in huge pages are
// written from where they lie. What shares a page with HDF5's own structure waits for 2c.
//
// After a failed fsync the whole temporary directory is thrown away, never synced again.
#include "ckpt/persist/save.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "ckpt/format/checksum.h"
#include "ckpt/persist/checksum_bytes.h"
#include "ckpt/persist/coded_file.h"
#include "ckpt/persist/incremental.h"
#include "ckpt/persist/layout.h"
#include "ckpt/persist/stream_copy.h"
#include "ckpt/persist/unfinished.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/replace.h"
#include "ckpt/retention/spare_files.h"
#include "runtime/core/finite.h"
#include "runtime/core/process.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

constexpr int64_t kDirectBytes = int64_t{512} << 10;  // smaller shards: a copy costs less than a request of their own
constexpr int64_t kRunBytes = int64_t{4} << 20;       // of packed shards, and of structure
constexpr int64_t kRuns = 15;                         // below 60 MiB the disk's queue is not always full
constexpr int64_t kPassBytes = int64_t{128} << 10;    // hashed, summed and packed while the cache of a core holds them

constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }
constexpr int64_t round_up(int64_t n) { return round_down(n + kIoAlign - 1); }

Status check_sums(const WriterPart& part, const Manifest& manifest, const ShardData& data, uint64_t found) {
  if (!data.word_sums || found == *data.word_sums) return {};
  const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(data.tensor)];
  return Error{ErrorCode::kCorrupt,
               fmt::format("{} {} {} of {} has changed in memory since it was updated: checksum {}, expected {}",
                           tensor.kind, tensor.name, to_string(Box{data.lo, data.hi}), part.file_name,
                           hash_to_hex(found), hash_to_hex(*data.word_sums))};
}

int64_t not_finite_in(const ShardData& data, std::span<const std::byte> bytes) {
  if (!data.finite) return 0;
  return count_not_finite({reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)});
}

Status check_finite(const WriterPart& part, const Manifest& manifest, const ShardData& data, int64_t not_finite) {
  if (not_finite == 0) return {};
  const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(data.tensor)];
  return Error{ErrorCode::kGuard,
               fmt::format("{} {} {} of {} is ruined: {} of its {} values are not finite", tensor.kind, tensor.name,
                           to_string(Box{data.lo, data.hi}), part.file_name, not_finite, data.bytes / 4)};
}

/// A pass of its own, for saves that look at the bytes in another order.
Status check_all_sums(std::span<const WriterPart> parts, const Manifest& manifest) {
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) {
      if (data.data == nullptr) continue;
      if (data.word_sums) RT_TRY(check_sums(part, manifest, data, word_sums(data.data, data.bytes / 4)));
      RT_TRY(check_finite(part, manifest, data,
                          not_finite_in(data, std::span(data.data, static_cast<size_t>(data.bytes)))));
    }
  }
  return {};
}

// Spreads the payload over time, and notices a wish to stop.
class Pace {
 public:
  explicit Pace(const SaveOptions& options) : options_(options) {}
  Status before(int64_t bytes) {
    while (true) {
      if (options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed))
        return Error{ErrorCode::kStopped, "the save was cancelled"};
      if (options_.max_bytes_per_s <= 0) break;
      const double due_s = static_cast<double>(done_) / static_cast<double>(options_.max_bytes_per_s);
      const double wait_s = due_s - seconds_since(start_);
      if (wait_s <= 0) break;
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(wait_s, 0.05)));
    }
    done_ += bytes;
    return {};
  }

 private:
  const SaveOptions& options_;
  Clock::time_point start_ = Clock::now();
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

int64_t elem_bytes_of(const Manifest& manifest, const ShardData& data) {
  const auto tensor = static_cast<size_t>(data.tensor);
  if (tensor >= manifest.tensors.size()) return 1;  // told by the check of the manifest
  return dtype_size_bytes(manifest.tensors[tensor].dtype);
}

ChecksumBytes checksum_bytes_of(const Manifest& manifest, std::span<const WriterPart> parts, int64_t chunk_bytes) {
  ChecksumBytes out(chunk_bytes);
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) out.count(data.lo, data.hi, elem_bytes_of(manifest, data));
  }
  return out;
}

// Whether the skeleton has the files and shards of these parts already, from the save before.
bool is_planned(const Manifest& manifest, std::span<const WriterPart> parts, const SaveOptions& options,
                const ChecksumBytes& checksum_bytes) {
  if (options.codec != Codec::kRaw || manifest.files.size() != parts.size()) return false;
  size_t index = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    if (manifest.files[p].name != parts[p].file_name || manifest.files[p].step >= 0) return false;
    for (const ShardData& data : parts[p].shards) {
      if (index == manifest.shards.size()) return false;
      const ShardEntry& shard = manifest.shards[index++];
      if (shard.tensor != data.tensor || shard.file != static_cast<int64_t>(p) || shard.box.lo != data.lo ||
          shard.box.hi != data.hi || shard.bytes != data.bytes ||
          shard.chunk_bytes != checksum_bytes.of(data.lo, data.hi, elem_bytes_of(manifest, data)) ||
          shard.codec != Codec::kRaw || !data.hashes.empty() || (data.data == nullptr && !data.fill))
        return false;
    }
  }
  return index == manifest.shards.size();
}

// Step 1: files and shards of the manifest with their sizes; offsets and hashes come while writing. To check the tiling
// before, shards get made-up offsets one behind the other.
// What is unchanged comes behind what is written.
Status plan_shards(Manifest& manifest, std::span<const WriterPart> parts, const SaveOptions& options,
                   const Unchanged& unchanged = {}) {
  const ChecksumBytes checksum_bytes = checksum_bytes_of(manifest, parts, options.chunk_bytes);
  if (unchanged.shards.empty() && is_planned(manifest, parts, options, checksum_bytes))
    return {};  // checked then, and when encoded
  manifest.files.clear();
  manifest.shards.clear();
  for (const WriterPart& part : parts) {
    FileEntry file{part.file_name};
    const auto file_index = static_cast<int64_t>(manifest.files.size());
    for (const ShardData& data : part.shards) {
      ShardEntry shard;
      shard.tensor = data.tensor;
      shard.file = file_index;
      shard.box = Box{data.lo, data.hi};
      shard.offset = file.size_bytes;
      shard.bytes = data.bytes;
      shard.chunk_bytes = checksum_bytes.of(data.lo, data.hi, elem_bytes_of(manifest, data));
      if (data.bytes < 1 || data.bytes > kMaxTensorBytes || options.chunk_bytes < kMinChunkBytes)
        return invalid(fmt::format("{}: shard {} has {} bytes in chunks of {}", part.file_name, manifest.shards.size(),
                                   data.bytes, options.chunk_bytes));
      if (data.data == nullptr && !data.fill)
        return invalid(fmt::format("{}: shard {} has no bytes", part.file_name, manifest.shards.size()));
      const int64_t chunks = (data.bytes + shard.chunk_bytes - 1) / shard.chunk_bytes;
      if (!data.hashes.empty() && static_cast<int64_t>(data.hashes.size()) != chunks)
        return invalid(fmt::format("{}: shard {} comes with {} hashes, expected {}", part.file_name,
                                   manifest.shards.size(), data.hashes.size(), chunks));
      shard.hashes = data.hashes.empty() ? std::vector<uint64_t>(static_cast<size_t>(chunks)) : data.hashes;
      file.size_bytes += data.bytes;
      manifest.shards.push_back(std::move(shard));
    }
    manifest.files.push_back(std::move(file));
  }
  const auto own_files = static_cast<int64_t>(manifest.files.size());
  manifest.files.insert(manifest.files.end(), unchanged.files.begin(), unchanged.files.end());
  for (ShardEntry shard : unchanged.shards) {
    shard.file += own_files;
    manifest.shards.push_back(std::move(shard));
  }
  Status valid = validate_manifest(manifest);
  if (valid.ok()) return {};
  return invalid("state to save: " + valid.error().message);
}

// One file on its way.
class PartWriter {
 public:
  PartWriter(const WriterPart& part, std::span<ShardEntry> shards, std::unique_ptr<FileLayout> layout,
             std::unique_ptr<CodedFile> coded, std::unique_ptr<IoFile> file, bool was_spare, BufferPool& runs)
      : part_(part),
        shards_(shards),
        layout_(std::move(layout)),
        coded_(std::move(coded)),
        file_(std::move(file)),
        was_spare_(was_spare),
        runs_(runs) {}
  // Left early on an error: the file waits for its requests while the pools still hold what they write from.
  ~PartWriter() {
    if (file_) {
      ignore(file_->finish(), "an earlier error is being told");
      runs_.release(*file_);
    }
  }

  /// Step 2b from where the last call ended up to byte `end` of shard `last` (behind the last shard: all of it).
  /// Returns when that is on its way.
  Status write_payload(int64_t last, int64_t end, const SaveOptions& options, Pace& pace, BufferPool& fills,
                       SaveReport& report) {
    if (coded_) {
      RT_CHECK(last == std::ssize(shards_), "a coded file is written at once");
      shard_ = last;
      return write_coded(pace, report);
    }
    while (shard_ < std::ssize(shards_) && (shard_ < last || (shard_ == last && at_ < end))) {
      ShardEntry& shard = shards_[static_cast<size_t>(shard_)];
      const ShardData& data = part_.shards[static_cast<size_t>(shard_)];
      shard.offset = layout_->offsets()[static_cast<size_t>(shard_)];
      const int64_t stop = shard_ < last ? shard.bytes : std::min(end, shard.bytes);
      while (at_ < stop) {
        const int64_t bytes = std::min(options.chunk_bytes, stop - at_);
        RT_TRY(pace.before(bytes));
        RT_TRY(write_piece(shard, data, bytes, options, fills));
        at_ += bytes;
      }
      if (at_ < shard.bytes) break;
      RT_TRY(check_sums(part_, report.manifest, data, sums_));
      RT_TRY(check_finite(part_, report.manifest, data, not_finite_));
      report.payload_bytes += shard.bytes;
      ++shard_;
      at_ = 0;
      sums_ = 0;
      not_finite_ = 0;
    }
    return flush_run();
  }
  /// All payload is on its way.
  bool wrote_all() const { return shard_ == std::ssize(shards_); }

  /// Steps 2c and 2d up to the superblock: the structure is on its way.
  Status write_structure(const Manifest& manifest, FileEntry& entry, SaveReport& report) {
    const auto layout_start = Clock::now();
    if (coded_) {
      RT_TRY(coded_->finish(shards_, entry));
    } else {
      RT_TRY(layout_->fill_in(manifest, shards_));
      std::vector<std::pair<int64_t, int64_t>> taken;
      for (const ShardEntry& shard : shards_) taken.emplace_back(shard.offset, shard.bytes);
      entry.size_bytes = layout_->size_bytes();
      entry.rest_hash = hash_rest(layout_->image(), std::move(taken));
    }
    report.layout_seconds += seconds_since(layout_start);
    Hdf5Image& image = this->image();
    report.file_bytes += entry.size_bytes;
    for (const Late& late : late_) image.put(late.offset, late.bytes);
    late_.clear();
    const auto& pages = image.pages();
    std::span<std::byte> room;  // several runs share a buffer: with one each, small ones would use up all
    for (auto it = pages.upper_bound(0); it != pages.end();) {
      const int64_t first = it->first;
      if (room.empty()) {
        RT_TRY_SET(room, runs_.next());
      }
      size_t used = 0;
      for (; it != pages.end() && used < room.size() && it->first == first + static_cast<int64_t>(used) / kIoAlign;
           ++it) {
        std::memcpy(room.data() + used, it->second->data(), kIoAlign);
        used += kIoAlign;
      }
      RT_TRY_SET(const IoTicket ticket, file_->submit_write(first * kIoAlign, room.data(), static_cast<int64_t>(used)));
      runs_.writing(*file_, ticket);
      room = room.subspan(used);
    }
    return was_spare_ ? clear_gaps() : Status();
  }

  // The rest of step 2d, in pieces, so that several files wait for the disk together.
  Status finish_writes() {
    RT_TRY(file_->finish());
    runs_.release(*file_);
    return {};
  }
  Status start_sync() {
    RT_TRY_SET(ticket_, file_->submit_sync());
    return {};
  }
  Status start_superblock(std::span<std::byte> page) {
    std::memcpy(page.data(), image().pages().at(0)->data(), kIoAlign);
    RT_TRY_SET(ticket_, file_->submit_write(0, page.data(), kIoAlign));
    return {};
  }
  Status cut() { return file_->truncate(image().eoa); }
  Status wait() { return file_->wait(ticket_); }
  Status close() { return file_->close(); }

  void keep_layout(SaveCache& cache) {
    if (layout_) cache.put_back(part_.file_name, std::move(layout_));
  }
  IoFile& file() { return *file_; }

 private:
  struct Late {
    int64_t offset;
    std::vector<std::byte> bytes;
  };

  Hdf5Image& image() { return coded_ ? coded_->image() : layout_->image(); }

  /// Zeros into the pages that neither a shard nor the structure fills.
  Status clear_gaps() {
    std::vector<std::pair<int64_t, int64_t>> filled;  // begin and end
    for (const ShardEntry& shard : shards_)
      filled.emplace_back(round_down(shard.offset), round_up(shard.offset + shard.bytes));
    for (const auto& [number, page] : image().pages()) filled.emplace_back(number * kIoAlign, (number + 1) * kIoAlign);
    const int64_t size = round_up(image().eoa);
    filled.emplace_back(size, size);
    std::sort(filled.begin(), filled.end());
    int64_t at = 0;
    for (const auto& [begin, end] : filled) {
      while (at < begin) {
        RT_TRY_SET(const std::span<std::byte> run, runs_.next());
        const int64_t n = std::min(begin - at, static_cast<int64_t>(run.size()));
        std::memset(run.data(), 0, static_cast<size_t>(n));
        RT_TRY_SET(const IoTicket ticket, file_->submit_write(at, run.data(), n));
        runs_.writing(*file_, ticket);
        at += n;
      }
      at = std::max(at, end);
    }
    return {};
  }

  // `bytes` of a shard from at_ on.
  Status write_piece(ShardEntry& shard, const ShardData& data, int64_t bytes, const SaveOptions& options,
                     BufferPool& fills) {
    const bool hashed = data.hashes.empty();
    std::span<const std::byte> payload;
    if (data.data != nullptr) {
      payload = std::span(data.data + at_, static_cast<size_t>(bytes));
    } else {
      RT_TRY_SET(const std::span<std::byte> room, fills.next());
      RT_TRY(data.fill(at_, room.first(static_cast<size_t>(bytes))));
      payload = room.first(static_cast<size_t>(bytes));
    }
    // First to the disk, then hashed: the disk works meanwhile. What is packed the other way round: the copy finds
    // it in the cache. Sums and hash are taken in one pass over the memory.
    const bool in_place = data.data == nullptr || options.huge_pages;
    const int64_t direct = in_place && shard.bytes >= kDirectBytes ? round_down(bytes) : 0;
    if (direct > 0) {
      RT_TRY(flush_run());
      RT_TRY_SET(const IoTicket ticket, file_->submit_write(shard.offset + at_, payload.data(), direct));
      if (data.data == nullptr) fills.writing(*file_, ticket);  // for the others finish() waits
    }
    for (int64_t from = 0, n = 0; from < bytes; from += n) {
      const int64_t chunk = (at_ + from) / shard.chunk_bytes, in_chunk = (at_ + from) % shard.chunk_bytes;
      n = std::min({kPassBytes, bytes - from, shard.chunk_bytes - in_chunk});
      const std::span<const std::byte> pass = payload.subspan(from, n);
      const bool ends = in_chunk + n == shard.chunk_bytes || at_ + from + n == shard.bytes;
      if (hashed && in_chunk == 0 && ends) {
        shard.hashes[static_cast<size_t>(chunk)] = hash_bytes(pass);
      } else if (hashed) {
        if (!hash_) hash_.emplace();
        hash_->update(pass);
        if (ends) shard.hashes[static_cast<size_t>(chunk)] = std::exchange(hash_, std::nullopt)->digest();
      }
      if (data.word_sums) sums_ = add_word_sums(sums_, word_sums(pass.data(), n / 4, (at_ + from) / 4));
      not_finite_ += not_finite_in(data, pass);
      ahead_ = next_pass(at_ + from + n);
      const int64_t packed = std::clamp<int64_t>(direct - from, 0, n);  // from here on
      RT_TRY(pack(shard.offset + at_ + from + packed, pass.subspan(packed)));
    }
    return {};
  }

  Status write_coded(Pace& pace, SaveReport& report) {
    const auto before = [&](int64_t bytes) -> Status {
      report.payload_bytes += bytes;
      return pace.before(bytes);
    };
    const auto put_pages = [&](int64_t offset, std::span<const std::byte> pages) -> Status {
      while (!pages.empty()) {
        RT_TRY_SET(const std::span<std::byte> run, runs_.next());
        const size_t n = std::min(pages.size(), run.size());
        std::memcpy(run.data(), pages.data(), n);
        RT_TRY_SET(const IoTicket ticket, file_->submit_write(offset, run.data(), static_cast<int64_t>(n)));
        runs_.writing(*file_, ticket);
        pages = pages.subspan(n);
        offset += static_cast<int64_t>(n);
      }
      return {};
    };
    return coded_->write(report.manifest, part_, shards_, before, put_pages);
  }

  /// What is looked at after this shard up to `at`.
  std::span<const std::byte> next_pass(int64_t at) const {
    auto i = static_cast<size_t>(shard_);
    if (at >= shards_[i].bytes) {
      if (++i == shards_.size()) return {};
      at = 0;
    }
    const std::byte* const next = part_.shards[i].data;
    if (next == nullptr) return {};
    return std::span(next + at, static_cast<size_t>(std::min(shards_[i].bytes - at, kPassBytes)));
  }

  // Payload of a small shard, or the ragged end of a large one.
  Status pack(int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (layout_->has_page(offset / kIoAlign)) {  // shares its page with HDF5's structure, which is not known yet
        const size_t n = std::min(bytes.size(), static_cast<size_t>(kIoAlign - offset % kIoAlign));
        late_.push_back({offset, {bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n)}});
        bytes = bytes.subspan(n);
        offset += static_cast<int64_t>(n);
        continue;
      }
      const int64_t run_end = run_begin_ + run_used_;
      if (!run_.empty() && offset != run_end) {
        if (offset == round_up(run_end) && offset < run_begin_ + static_cast<int64_t>(run_.size())) {
          pad_run();
        } else {
          RT_TRY(flush_run());
        }
      }
      if (run_.empty()) {
        RT_CHECK(offset % kIoAlign == 0, "payload at offset {} begins in a page that nothing else fills", offset);
        RT_TRY_SET(run_, runs_.next());
        run_begin_ = offset;
        run_used_ = 0;
      }
      // Up to the next page that is not ours, or the end of the run.
      int64_t n = std::min(static_cast<int64_t>(bytes.size()), static_cast<int64_t>(run_.size()) - run_used_);
      n = std::min(n, layout_->next_page(offset / kIoAlign + 1) * kIoAlign - offset);
      stream_copy(run_.data() + run_used_, bytes.first(static_cast<size_t>(n)), ahead_);
      stream_fence();
      run_used_ += n;
      bytes = bytes.subspan(static_cast<size_t>(n));
      offset += n;
      if (run_used_ == static_cast<int64_t>(run_.size())) RT_TRY(flush_run());
    }
    return {};
  }

  void pad_run() {
    const int64_t padded = round_up(run_used_);
    std::memset(run_.data() + run_used_, 0, static_cast<size_t>(padded - run_used_));
    run_used_ = padded;
  }

  Status flush_run() {
    if (run_.empty()) return {};
    pad_run();
    const std::span<std::byte> run = std::exchange(run_, {});
    RT_TRY_SET(const IoTicket ticket, file_->submit_write(run_begin_, run.data(), run_used_));
    runs_.writing(*file_, ticket);
    return {};
  }

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

/// What spare files hold is given up where the disk has no room for the new file.
Result<std::unique_ptr<IoFile>> create_file(IoBackend& io, const fs::path& path, int64_t size_bytes,
                                            SpareFiles* spares) {
  Result<std::unique_ptr<IoFile>> file = io.create(path, size_bytes);
  const bool full = !file.ok() && file.error().code == ErrorCode::kNoSpace;
  if (full && spares != nullptr && spares->clear(io)) return io.create(path, size_bytes);
  return file;
}

/// Files of a dead save's work directory that hold what `parts` would hold: each read and compared with its note.
Result<std::map<size_t, FinishedFile>> finished_parts(IoBackend& io, const fs::path& work, const Manifest& manifest,
                                                      std::span<const WriterPart> parts, uint64_t key) {
  std::map<size_t, FinishedFile> out;
  RT_TRY_SET(auto notes, read_notes(io, work, key));
  size_t first = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::span<const ShardEntry> shards = std::span(manifest.shards).subspan(first, parts[p].shards.size());
    first += shards.size();
    const auto note = notes.find(parts[p].file_name);
    if (note == notes.end()) continue;
    // The key stands for all that decides the bytes; how a coded shard is cut is known only once it is coded.
    const bool same =
        std::equal(shards.begin(), shards.end(), note->second.shards.begin(), note->second.shards.end(),
                   [](const ShardEntry& a, const ShardEntry& b) {
                     return a.bytes == b.bytes && (b.codec != Codec::kRaw || a.chunk_bytes == b.chunk_bytes);
                   });
    if (same && check_finished(io, work, note->second).ok()) out.emplace(p, std::move(note->second));
  }
  return out;
}

/// Takes the directory over: its name says from now on that this process is at work in it.
Status take_over(IoBackend& io, const fs::path& left, const fs::path& work,
                 const std::map<size_t, FinishedFile>& taken) {
  RT_TRY(io.rename(left, work));
  std::set<std::string> keep;
  for (const auto& [part, finished] : taken) {
    keep.insert(finished.file.name);
    keep.insert(note_name(finished.file.name));
  }
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(work));
  for (const DirEntry& entry : entries) {
    if (!entry.is_dir && !keep.contains(entry.name)) RT_TRY(io.remove_file(work / entry.name));
  }
  return {};
}

// Buffers for payload on its way.
struct Budget {
  int64_t run_bytes = 0, runs = 0, fills = 0;
};

Budget budget_of(std::span<const WriterPart> parts, const SaveOptions& options) {
  bool filled = false;
  for (const WriterPart& part : parts)
    filled = filled || std::any_of(part.shards.begin(), part.shards.end(), [](const ShardData& s) { return s.fill; });
  int64_t run_budget = options.fill_bytes / 4;
  if (!filled) {
    run_budget = options.cache != nullptr ? options.cache->buffer_bytes(options.fill_bytes)
                                          : options.fill_bytes - options.fill_bytes / 16;
  }
  Budget out;
  out.run_bytes = std::clamp(round_down(run_budget / 4), 16 * kIoAlign, kRunBytes);
  out.runs = std::min(run_budget / out.run_bytes, kRuns);
  out.fills = std::min<int64_t>((options.fill_bytes - run_budget) / options.chunk_bytes, 64);
  return out;
}

/// What is written so far goes when an exception ends the save: whoever tries again makes a directory of its own.
class RemoveOnThrow {
 public:
  RemoveOnThrow(IoBackend& io, const fs::path& work) : io_(io), work_(work) {}
  RemoveOnThrow(const RemoveOnThrow&) = delete;
  ~RemoveOnThrow() {
    if (std::uncaught_exceptions() == before_) return;
    try {
      ignore(remove_tree(io_, work_), "the next start removes it");
    } catch (const std::exception&) {  // out of memory still
    }
  }

 private:
  IoBackend& io_;
  const fs::path& work_;
  int before_ = std::uncaught_exceptions();
};

/// A file that resume_from had.
void take_part(const FinishedFile& there, std::span<ShardEntry> shards, FileEntry& file, SaveReport& report) {
  for (size_t i = 0; i < shards.size(); ++i) {
    const ShardEntry& done = there.shards[i];
    shards[i].offset = done.offset;
    shards[i].chunk_bytes = done.chunk_bytes;
    shards[i].codec = done.codec;
    shards[i].hashes = done.hashes;
    shards[i].stored = done.stored;
    report.taken_bytes += shards[i].bytes;
    report.payload_bytes += shards[i].bytes;
  }
  file = there.file;
  report.file_bytes += there.file.size_bytes;
  ++report.taken_files;
}

Status write_all(IoBackend& io, const fs::path& dir, std::span<const WriterPart> parts, const SaveOptions& options,
                 const std::map<size_t, FinishedFile>& taken, bool* noted, SaveReport& report) {
  Manifest& manifest = report.manifest;
  Pace pace(options);
  const Budget budget = budget_of(parts, options);
  BufferPool runs(budget.run_bytes, budget.runs, options.cache != nullptr ? &options.cache->buffers() : nullptr);
  BufferPool fills(options.chunk_bytes, budget.fills, nullptr);
  std::optional<WorkPool> coders;
  if (options.codec != Codec::kRaw) coders.emplace(options.codec_threads);
  std::deque<PartWriter> open;  // after the pools: it waits for its writes when it goes
  const auto for_each = [&](Status (PartWriter::*step)()) -> Status {
    for (PartWriter& writer : open) RT_TRY((writer.*step)());
    return {};
  };
  std::vector<std::pair<size_t, std::span<ShardEntry>>> open_parts;  // of `open`
  const auto commit_open = [&](bool last) -> Status {
    RT_TRY(for_each(&PartWriter::finish_writes));
    const auto sync = [&]() -> Status {
      const auto start = Clock::now();
      RT_TRY(for_each(&PartWriter::start_sync));
      RT_TRY(for_each(&PartWriter::wait));
      report.sync_seconds += seconds_since(start);
      return {};
    };
    RT_TRY(sync());  // all but the superblocks is durable
    RT_TRY_SET(const std::span<std::byte> pages, runs.next());
    RT_CHECK(pages.size() >= open.size() * kIoAlign, "{} files open at once", open.size());
    for (size_t i = 0; i < open.size(); ++i) RT_TRY(open[i].start_superblock(pages.subspan(i * kIoAlign, kIoAlign)));
    RT_TRY(for_each(&PartWriter::wait));
    RT_TRY(for_each(&PartWriter::cut));
    RT_TRY(sync());
    RT_TRY(for_each(&PartWriter::close));
    for (PartWriter& writer : open) {
      fills.release(writer.file());
      if (options.cache != nullptr) writer.keep_layout(*options.cache);
    }
    open.clear();
    if (options.resume_key != 0 && !last) {
      for (const auto& [part, shards] : open_parts) {
        RT_TRY(write_note(io, dir, options.resume_key,
                          {manifest.files[part], std::vector<ShardEntry>(shards.begin(), shards.end())}));
      }
      RT_TRY(io.sync_dir(dir));
      *noted = true;
    }
    open_parts.clear();
    return {};
  };
  const auto open_file = [&](size_t p, std::span<ShardEntry> shards) -> Status {
    RT_CHECK(open.size() < kOpenFiles, "{} files open at once", open.size() + 1);
    if (coders) {
      RT_TRY_SET(std::unique_ptr<CodedFile> coded, CodedFile::create(manifest, shards, options, *coders));
      RT_TRY_SET(std::unique_ptr<IoFile> file,
                 create_file(io, dir / parts[p].file_name, coded->reserve_bytes(), options.spares));
      open.emplace_back(parts[p], shards, nullptr, std::move(coded), std::move(file), false, runs);
      return {};
    }
    const auto layout_start = Clock::now();
    Result<std::unique_ptr<FileLayout>> layout = options.cache != nullptr
                                                     ? options.cache->take(manifest, parts[p].file_name, shards)
                                                     : FileLayout::make(manifest, shards);
    if (!layout.ok()) return std::move(layout).error();
    report.layout_seconds += seconds_since(layout_start);
    // Whole pages, so that no write makes the file longer; the commit cuts it.
    const int64_t size = round_up(layout.value()->size_bytes());
    const fs::path path = dir / parts[p].file_name;
    std::unique_ptr<IoFile> file;
    if (options.spares != nullptr) file = options.spares->reuse(io, path, size);
    const bool was_spare = file != nullptr;
    report.reused_files += was_spare;
    if (!was_spare) {
      RT_TRY_SET(file, create_file(io, path, size, options.spares));
    }
    open.emplace_back(parts[p], shards, std::move(layout).value(), nullptr, std::move(file), was_spare, runs);
    return {};
  };

  std::vector<std::span<ShardEntry>> shards_of;
  size_t first = 0, left = 0;  // left: parts that are not written yet
  for (size_t p = 0; p < parts.size(); ++p) {
    shards_of.push_back(std::span(manifest.shards).subspan(first, parts[p].shards.size()));
    first += parts[p].shards.size();
    if (const auto there = taken.find(p); there != taken.end()) {
      take_part(there->second, shards_of[p], manifest.files[p], report);
    } else {
      ++left;
    }
  }
  std::vector<WriteStep> one_by_one;
  for (size_t p = 0; p < parts.size() && options.order.empty(); ++p)
    one_by_one.push_back({static_cast<int64_t>(p), std::ssize(parts[p].shards), 0});
  const std::vector<WriteStep>& order = options.order.empty() ? one_by_one : options.order;
  // Files that will be open together when the order goes on from this step.
  const auto files_from = [&](size_t step) {
    std::set<int64_t> begun;
    size_t files = 0;
    for (; step < order.size() && (files == 0 || !begun.empty()); ++step) {
      const WriteStep& next = order[step];
      if (taken.contains(static_cast<size_t>(next.part))) continue;
      if (begun.insert(next.part).second) ++files;
      if (next.shard == std::ssize(parts[static_cast<size_t>(next.part)].shards)) begun.erase(next.part);
    }
    return files;
  };
  std::vector<PartWriter*> writers(parts.size());  // of `open`
  int64_t open_bytes = 0, unfinished = 0;          // of `open`; those with payload to come
  for (size_t i = 0; i < order.size(); ++i) {
    const WriteStep& step = order[i];
    const auto p = static_cast<size_t>(step.part);
    if (taken.contains(p)) continue;
    if (writers[p] == nullptr) {
      RT_TRY(open_file(p, shards_of[p]));
      writers[p] = &open.back();
      ++unfinished;
    }
    RT_TRY(writers[p]->write_payload(step.shard, step.end, options, pace, fills, report));
    if (!writers[p]->wrote_all()) continue;
    RT_TRY(writers[p]->write_structure(manifest, manifest.files[p], report));
    open_parts.emplace_back(p, shards_of[p]);
    open_bytes += manifest.files[p].size_bytes;
    --left;
    if (--unfinished > 0 || left == 0) continue;
    const bool fits = open.size() + files_from(i + 1) <= kOpenFiles;
    if (fits && (options.commit_bytes <= 0 || open_bytes < options.commit_bytes)) continue;
    RT_TRY(commit_open(false));
    open_bytes = 0;
  }
  RT_CHECK(left == 0, "{} files are not written to their end", left);
  RT_TRY_SET(const ManifestFiles files, encode_manifest_files(manifest));  // while the last requests are on their way
  RT_TRY(commit_open(true));
  if (options.resume_key != 0) RT_TRY(remove_notes(io, dir));
  RT_TRY(write_file(io, dir / kTableName, files.table));
  RT_TRY(write_file(io, dir / kManifestName, files.json));
  return io.sync_dir(dir);
}

}  // namespace

WriterId this_writer() {
  static std::atomic<int64_t> saves{0};
  WriterId writer;
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) == 0) writer.host = host;
  const ProcessId me = this_process();
  writer.pid = me.pid;
  writer.start = me.start;
  writer.sequence = saves++;
  return writer;
}

Status prepare_layouts(const Manifest& skeleton, std::span<const WriterPart> parts, const SaveOptions& options) {
  if (options.cache == nullptr || options.codec != Codec::kRaw) return {};
  Manifest manifest = skeleton;
  RT_TRY(plan_shards(manifest, parts, options));
  size_t first = 0;
  for (const WriterPart& part : parts) {
    const std::span<ShardEntry> shards = std::span(manifest.shards).subspan(first, part.shards.size());
    first += shards.size();
    RT_TRY_SET(std::unique_ptr<FileLayout> layout, options.cache->take(manifest, part.file_name, shards));
    options.cache->put_back(part.file_name, std::move(layout));
  }
  return {};
}

Status prepare_buffers(std::span<const WriterPart> parts, const SaveOptions& options) {
  if (options.cache == nullptr || options.huge_pages) return {};  // large shards are then written from where they lie
  const Budget budget = budget_of(parts, options);
  int64_t payload = 0;
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) payload += data.bytes;
  }
  BufferStore& kept = options.cache->buffers();
  // Payload, the structure of each file, the superblocks: a small state needs fewer than there may be.
  const int64_t runs = std::min(budget.runs, payload / budget.run_bytes + std::ssize(parts) + 2);
  for (int64_t i = kept.memory_bytes() / budget.run_bytes; i < runs; ++i) {
    RT_TRY_SET(Buffer buffer, Buffer::allocate(budget.run_bytes));
    buffer.touch();
    kept.put_back(std::move(buffer));
  }
  return {};
}

Result<SaveReport> save_checkpoint(IoBackend& io, const fs::path& checkpoints_dir, Manifest skeleton,
                                   std::span<const WriterPart> parts, const SaveOptions& options) {
  const auto start = Clock::now();
  SaveReport report;
  report.manifest = std::move(skeleton);
  report.dir = checkpoints_dir / step_dir_name(std::max<int64_t>(0, report.manifest.step));
  const WriterId writer = options.writer ? *options.writer : this_writer();
  if (report.manifest.writer.program.empty()) report.manifest.writer.program = "cairn " CAIRN_VERSION;
  if (report.manifest.writer.host.empty()) report.manifest.writer.host = writer.host;
  const std::span<const WriterPart> all_parts = parts;
  const auto save_all = [&]() {
    Manifest all = report.manifest;
    all.files.clear();
    all.shards.clear();
    SaveOptions without = options;
    without.base = nullptr;
    return save_checkpoint(io, checkpoints_dir, std::move(all), all_parts, without);
  };
  if (options.codec != Codec::kRaw || options.base != nullptr) RT_TRY(check_all_sums(parts, report.manifest));
  RT_TRY_SET(const Unchanged unchanged, find_unchanged(report.manifest, parts, options));
  if (!unchanged.shards.empty()) parts = unchanged.rest;
  RT_TRY(plan_shards(report.manifest, parts, options, unchanged));
  report.referenced_bytes = unchanged.bytes;
  const auto check_folder = [&]() -> Status {
    Status there = options.check_folder ? options.check_folder() : Status();
    return std::move(there).with(fmt::format("step {} was not saved", report.manifest.step));
  };
  RT_TRY(check_folder());
  if (!options.check_folder) RT_TRY(make_dirs(io, checkpoints_dir));

  Result<FileStat> existing = io.stat(report.dir);
  if (!existing.ok() && !is_not_found(existing.error())) return std::move(existing).error();
  if (existing.ok() && !options.replace_existing)
    return invalid(fmt::format("{}: step {} is there already; remove it first, or save with replacing allowed",
                               report.dir.string(), report.manifest.step));
  if (existing.ok() && !options.replace_referred) {
    RT_TRY_SET(const std::vector<int64_t> others, steps_that_need(io, checkpoints_dir, report.manifest.step));
    if (!others.empty())
      return invalid(fmt::format(
          "{}: not replaced, step {} refers to its files; remove what refers to it first, or write to another folder",
          report.dir.string(), fmt::join(others, ", ")));
  }

  const fs::path left = checkpoints_dir / options.resume_from;
  std::map<size_t, FinishedFile> taken;
  if (!options.resume_from.empty()) {
    RT_TRY_SET(taken, finished_parts(io, left, report.manifest, parts, options.resume_key));
    if (taken.empty()) RT_TRY(remove_tree(io, left));  // its space is needed
  }

  constexpr int64_t kSlackBytes = int64_t{1} << 20;  // metadata and rounding, per file
  int64_t needed =
      payload_bytes(report.manifest) - unchanged.bytes + kSlackBytes * static_cast<int64_t>(parts.size() + 1);
  for (const auto& [part, finished] : taken) needed -= std::min(needed, finished.file.size_bytes);
  RT_TRY_SET(int64_t free, io.free_bytes(checkpoints_dir));
  if (options.spares != nullptr) {
    // What is no shard file, directories and manifest, finds no room in spare ones. Where they do not help nobody has
    // them, and who looks for room sees it.
    const int64_t spare = options.spares->bytes();
    const bool tight = free < kSlackBytes * static_cast<int64_t>(parts.size() + 1);
    if (!tight && free + spare >= needed) {
      free += spare;
    } else {
      options.spares->clear(io);
      RT_TRY_SET(free, io.free_bytes(checkpoints_dir));
    }
  }
  if (free < needed)
    return Error{ErrorCode::kNoSpace,
                 fmt::format("{}: {} bytes free, step {} needs {}: {} are missing", checkpoints_dir.string(), free,
                             report.manifest.step, needed, needed - free)};

  const fs::path work = checkpoints_dir / work_dir_name(kTmpPrefix, report.manifest.step, writer);
  bool noted = !taken.empty();
  const auto give_up_spares = [&](const Error& error) {  // for the next try
    if (error.code == ErrorCode::kNoSpace && options.spares != nullptr) options.spares->clear(io);
  };
  const auto abandon = [&](Error error) -> Error {
    give_up_spares(error);
    if (noted && error.code == ErrorCode::kStopped) {
      error.message += fmt::format("; the files that are done stay in {}, the same command resumes from them",
                                   work.filename().string());
    } else if (Status removed = remove_tree(io, work); !removed.ok()) {
      error.message += fmt::format(" (and {} could not be removed: {})", work.string(), removed.error().message);
    }
    return std::move(error).with(fmt::format("step {} was not saved", report.manifest.step));
  };
  const RemoveOnThrow guard(io, work);
  // Steps A, B1 and B2 of ckpt/retention/references.h.
  const auto base_is_there = [&]() { return all_there(io, work, unchanged.files); };
  if (taken.empty()) {
    if (Status made = io.make_dir(work); !made.ok()) {
      give_up_spares(made.error());
      return std::move(made).error();
    }
  } else if (Status moved = take_over(io, left, work, taken); !moved.ok()) {
    return abandon(std::move(moved).error());
  }
  if (Status meant = check_folder(); !meant.ok()) {
    ignore(remove_tree(io, work), "it is empty");
    return std::move(meant).error();
  }
  if (!unchanged.files.empty()) {
    if (Status told = write_file(io, work / kReferencesName, references_text(needed_steps(unchanged.files)));
        !told.ok())
      return abandon(std::move(told).error());
    Result<bool> there = base_is_there();
    if (!there.ok()) return abandon(std::move(there).error());
    if (!there.value()) {
      RT_TRY(remove_tree(io, work));
      return save_all();
    }
  }
  if (Status written = write_all(io, work, parts, options, taken, &noted, report); !written.ok())
    return abandon(std::move(written).error());
  // The first save has found no layouts and has taken more buffers than may lie beside them.
  if (options.cache != nullptr) options.cache->buffers().limit(options.cache->buffer_bytes(options.fill_bytes));

  if (!unchanged.files.empty()) {
    Result<bool> there = base_is_there();
    if (!there.ok()) return abandon(std::move(there).error());
    if (!there.value()) {
      RT_TRY(remove_tree(io, work));
      return save_all();
    }
  }
  if (options.check_folder) {
    if (Status meant = options.check_folder(); !meant.ok()) return abandon(std::move(meant).error());
  }
  report.replaced = existing.ok();
  Replacement replacement;
  if (report.replaced) {
    replacement = replace_step(io, work, options.must_exchange);
  } else {
    replacement.status = io.rename(work, report.dir);
  }
  Status& published = replacement.status;
  if (!published.ok() && replacement.cut_off)
    return std::move(published).error().with(fmt::format("step {} was not saved", report.manifest.step));
  if (!published.ok() && report.replaced && published.error().os_errno == ENOENT) {
    report.replaced = false;  // meanwhile removed, by the retention of another save in flight
    published = io.rename(work, report.dir);
  }
  if (const int why = published.ok() ? 0 : published.error().os_errno;
      !options.replace_existing && (why == ENOTEMPTY || why == EEXIST)) {
    return abandon(invalid(fmt::format("{}: step {} was put there meanwhile by another process", report.dir.string(),
                                       report.manifest.step)));
  }
  if (!published.ok()) return abandon(std::move(published).error());
  if (Status synced = io.sync_dir(checkpoints_dir); !synced.ok()) {
    // Whole, but its name may not outlive a power loss; what it replaced stays where it is for the same reason.
    return std::move(synced).error().with(
        fmt::format("step {} is written and visible, but may be gone after a power loss", report.manifest.step));
  }
  report.seconds = seconds_since(start);
  if (report.replaced) {
    const auto remove_start = Clock::now();
    const fs::path& old = replacement.old;
    if (Status removed = remove_tree(io, old); !removed.ok()) report.leftover = old.filename().string();
    report.remove_seconds = seconds_since(remove_start);
  }
  return report;
}

}  // namespace cairn::ckpt
