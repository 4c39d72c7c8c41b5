#include "ckpt/persist/part_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "ckpt/persist/stream_copy.h"
#include "runtime/core/finite.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr int64_t kDirectBytes = int64_t{512} << 10;  // smaller shards: a copy costs less than a request of their own
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

}  // namespace

Status check_all_sums(std::span<const WriterPart> parts, const Manifest& skeleton) {
  for (const WriterPart& part : parts) {
    for (const ShardData& data : part.shards) {
      if (data.data == nullptr) continue;
      if (data.word_sums) RT_TRY(check_sums(part, skeleton, data, word_sums(data.data, data.bytes / 4)));
      RT_TRY(check_finite(part, skeleton, data,
                          not_finite_in(data, std::span(data.data, static_cast<size_t>(data.bytes)))));
    }
  }
  return {};
}

Status Pace::before(int64_t bytes) {
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

PartWriter::PartWriter(const Manifest& skeleton, const WriterPart& part, std::span<ShardEntry> shards,
                       std::unique_ptr<FileLayout> layout, std::unique_ptr<CodedFile> coded,
                       std::unique_ptr<IoFile> file, bool was_spare, BufferPool& runs)
    : skeleton_(skeleton),
      part_(part),
      shards_(shards),
      layout_(std::move(layout)),
      coded_(std::move(coded)),
      file_(std::move(file)),
      was_spare_(was_spare),
      runs_(runs) {}

PartWriter::~PartWriter() {
  if (file_) {
    ignore(file_->finish(), "an earlier error is being told");
    runs_.release(*file_);
  }
}

Status PartWriter::write_payload(int64_t last, int64_t end, const WriteOptions& options, Pace& pace, BufferPool& fills,
                                 WriteStats& stats) {
  if (coded_) {
    RT_CHECK(last == std::ssize(shards_), "a coded file is written at once");
    shard_ = last;
    return write_coded(pace, stats);
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
    RT_TRY(check_sums(part_, skeleton_, data, sums_));
    RT_TRY(check_finite(part_, skeleton_, data, not_finite_));
    stats.payload_bytes += shard.bytes;
    ++shard_;
    at_ = 0;
    sums_ = 0;
    not_finite_ = 0;
  }
  return flush_run();
}

Status PartWriter::write_structure(FileEntry& entry, WriteStats& stats) {
  const auto layout_start = Clock::now();
  if (coded_) {
    RT_TRY(coded_->finish(shards_, entry));
  } else {
    RT_TRY(layout_->fill_in(skeleton_, shards_));
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (const ShardEntry& shard : shards_) taken.emplace_back(shard.offset, shard.bytes);
    entry.size_bytes = layout_->size_bytes();
    entry.rest_hash = hash_rest(layout_->image(), std::move(taken));
  }
  stats.layout_seconds += seconds_since(layout_start);
  Hdf5Image& image = this->image();
  stats.file_bytes += entry.size_bytes;
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

Status PartWriter::finish_writes() {
  RT_TRY(file_->finish());
  runs_.release(*file_);
  return {};
}

Status PartWriter::start_sync() {
  RT_TRY_SET(ticket_, file_->submit_sync());
  return {};
}

Status PartWriter::start_superblock(std::span<std::byte> page) {
  std::memcpy(page.data(), image().pages().at(0)->data(), kIoAlign);
  RT_TRY_SET(ticket_, file_->submit_write(0, page.data(), kIoAlign));
  return {};
}

void PartWriter::keep_layout(SaveCache& cache) {
  if (layout_) cache.put_back(part_.file_name, std::move(layout_));
}

/// Zeros into the pages that neither a shard nor the structure fills.
Status PartWriter::clear_gaps() {
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
Status PartWriter::write_piece(ShardEntry& shard, const ShardData& data, int64_t bytes, const WriteOptions& options,
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

Status PartWriter::write_coded(Pace& pace, WriteStats& stats) {
  const auto before = [&](int64_t bytes) -> Status {
    stats.payload_bytes += bytes;
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
  return coded_->write(skeleton_, part_, shards_, before, put_pages);
}

/// What is looked at after this shard up to `at`.
std::span<const std::byte> PartWriter::next_pass(int64_t at) const {
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
Status PartWriter::pack(int64_t offset, std::span<const std::byte> bytes) {
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

void PartWriter::pad_run() {
  const int64_t padded = round_up(run_used_);
  std::memset(run_.data() + run_used_, 0, static_cast<size_t>(padded - run_used_));
  run_used_ = padded;
}

Status PartWriter::flush_run() {
  if (run_.empty()) return {};
  pad_run();
  const std::span<std::byte> run = std::exchange(run_, {});
  RT_TRY_SET(const IoTicket ticket, file_->submit_write(run_begin_, run.data(), run_used_));
  runs_.writing(*file_, ticket);
  return {};
}

}  // namespace cairn::ckpt
