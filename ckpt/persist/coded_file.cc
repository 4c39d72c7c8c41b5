#include "ckpt/persist/coded_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "ckpt/format/checksum.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kSmallestCodedBytes = int64_t{16} << 10;
constexpr int64_t kTargetBytes = int64_t{1} << 20;    // planes of whole zstd blocks (128 KiB); read whole for any part
constexpr int64_t kLargestBytes = int64_t{16} << 20;  // where extents leave no better cut
constexpr int64_t kSmallestChunkBytes = int64_t{32} << 10;
constexpr int64_t kCopies = 4;  // of a chunk at work: as filled, padded, in planes, as stored

constexpr int64_t round_down(int64_t n) { return n / kIoAlign * kIoAlign; }
constexpr int64_t round_up(int64_t n) { return round_down(n + kIoAlign - 1); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest divisor of n up to `most`, and the smallest beyond it.
std::pair<int64_t, int64_t> divisors_around(int64_t n, int64_t most) {
  int64_t below = 1, above = n;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    for (const int64_t divisor : {d, n / d}) {
      if (divisor <= most) below = std::max(below, divisor);
      if (divisor > most) above = std::min(above, divisor);
    }
  }
  return {below, above};
}

}  // namespace

std::vector<int64_t> coded_chunk_extents(const std::vector<int64_t>& extents, int64_t elem_bytes,
                                         int64_t target_bytes) {
  int64_t bytes = elem_bytes;
  for (const int64_t extent : extents) bytes *= extent;
  if (extents.empty() || bytes < kSmallestCodedBytes) return {};
  if (bytes <= target_bytes) return extents;
  int64_t inner = elem_bytes;  // bytes of one index in dim d
  size_t d = extents.size() - 1;
  while (d > 0 && inner * extents[d] <= target_bytes) inner *= extents[d--];
  int64_t outer = 1;
  for (size_t i = 0; i < d; ++i) outer *= extents[i];
  const int64_t most = std::max<int64_t>(1, target_bytes / inner);
  int64_t cut = 0;
  if (outer == 1) {
    cut = ceil_div(extents[d], ceil_div(extents[d], most));  // of equal size: little of the last one is outside
  } else {
    // A last chunk that is not full would leave a hole in the middle of the order.
    const auto [below, above] = divisors_around(extents[d], most);
    cut = below * inner >= target_bytes / 8 || above * inner > kLargestBytes ? below : above;
  }
  if (cut * inner < kSmallestChunkBytes && cut * inner < bytes) return {};
  if (cut * inner > kLargestBytes) return {};
  std::vector<int64_t> chunk(extents.size(), 1);
  chunk[d] = cut;
  std::copy(extents.begin() + static_cast<std::ptrdiff_t>(d) + 1, extents.end(),
            chunk.begin() + static_cast<std::ptrdiff_t>(d) + 1);
  return chunk;
}

uint64_t hash_rest(Hdf5Image& image, std::vector<std::pair<int64_t, int64_t>> taken) {
  std::sort(taken.begin(), taken.end());
  StreamingHash hash;
  std::vector<std::byte> buffer(64 << 10);
  int64_t at = 0;
  const auto add_until = [&](int64_t end) {
    while (at < end) {
      const auto n = static_cast<size_t>(std::min<int64_t>(end - at, static_cast<int64_t>(buffer.size())));
      RT_CHECK(image.get(at, std::span(buffer).first(n)).ok(), "an image being written does not read");
      hash.update(std::span(buffer).first(n));
      at += static_cast<int64_t>(n);
    }
  };
  for (const auto& [offset, bytes] : taken) {
    add_until(offset);
    at = offset + bytes;
  }
  add_until(image.eoa);
  return hash.digest();
}

Result<std::unique_ptr<CodedFile>> CodedFile::create(const Manifest& manifest, std::span<const ShardEntry> shards,
                                                     const WriteOptions& options, WorkPool& pool) {
  std::unique_ptr<CodedFile> out(new CodedFile(options, pool));
  RT_TRY_SET(out->writer_, Hdf5Writer::create(manifest.step, static_cast<int64_t>(shards.size())));
  const int64_t slots = 2 * pool.threads() + 1;
  const int64_t target =
      std::clamp(round_down(options.fill_bytes / (slots * kCopies)), kSmallestChunkBytes, kTargetBytes);
  out->reserve_bytes_ = int64_t{1} << 20;
  for (const ShardEntry& shard : shards) {
    const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(shard.tensor)];
    const int64_t elem = dtype_size_bytes(tensor.dtype);
    out->box_extents_.push_back(shard.box.extents());
    out->chunk_extents_.push_back(coded_chunk_extents(out->box_extents_.back(), elem, target));
    int64_t chunk = shard.bytes;
    if (!out->chunk_extents_.back().empty()) chunk = elem * count_elems(out->chunk_extents_.back());
    out->reserve_bytes_ += ceil_div(shard.bytes, chunk) * (round_up(chunk) + 64) + 4096;
  }
  out->reserve_bytes_ = round_up(out->reserve_bytes_);
  out->encoders_.resize(static_cast<size_t>(pool.threads()));
  return out;
}

// Whole pages go to the disk, a ragged end into the image: what else HDF5 has in that page is written with it.
Status CodedFile::put(int64_t offset, std::span<const std::byte> bytes, const PutPages& put_pages) {
  const auto whole =
      offset % kIoAlign == 0 ? static_cast<size_t>(round_down(static_cast<int64_t>(bytes.size()))) : size_t{0};
  if (whole > 0) RT_TRY(put_pages(offset, bytes.first(whole)));
  image().put(offset + static_cast<int64_t>(whole), bytes.subspan(whole));
  return {};
}

Status CodedFile::write_raw(const ShardData& data, ShardEntry& shard, int64_t offset, const Before& before,
                            const PutPages& put_pages) {
  RT_CHECK(shard.bytes < kIoAlign || offset % kIoAlign == 0, "HDF5 put {} bytes at offset {}", shard.bytes, offset);
  shard.offset = offset;
  std::vector<std::byte> filled;
  for (int64_t at = 0, chunk = 0; at < shard.bytes; at += shard.chunk_bytes, ++chunk) {
    const auto bytes = static_cast<size_t>(std::min(shard.chunk_bytes, shard.bytes - at));
    RT_TRY(before(static_cast<int64_t>(bytes)));
    std::span<const std::byte> payload;
    if (data.data != nullptr) {
      payload = std::span(data.data + at, bytes);
    } else {
      filled.resize(bytes);
      RT_TRY(data.fill(at, filled));
      payload = filled;
    }
    shard.hashes[static_cast<size_t>(chunk)] = hash_bytes(payload);
    RT_TRY(put(offset + at, payload, put_pages));
  }
  return {};
}

Status CodedFile::retire(Slot& slot, std::span<ShardEntry> shards, const PutPages& put_pages) {
  RT_TRY(slot.done.get());
  ShardEntry& shard = shards[static_cast<size_t>(slot.shard)];
  const std::vector<int64_t>& box = box_extents_[static_cast<size_t>(slot.shard)];
  const std::vector<int64_t>& chunk = chunk_extents_[static_cast<size_t>(slot.shard)];
  int64_t element = slot.chunk * count_elems(chunk);
  std::vector<int64_t> corner(box.size());
  for (size_t d = box.size(); d-- > 0;) {
    corner[d] = element % box[d];
    element /= box[d];
  }
  const CodedChunk& coded = slot.coded;
  RT_TRY_SET(const int64_t offset, writer_->place_chunk(slot.shard, corner, coded.bytes, coded.filter_mask));
  const auto bytes = static_cast<int64_t>(coded.bytes.size());
  RT_CHECK(bytes < kIoAlign || offset % kIoAlign == 0, "HDF5 put a chunk of {} bytes at offset {}", bytes, offset);
  shard.stored[static_cast<size_t>(slot.chunk)] = {offset, bytes, coded.filter_mask};
  shard.hashes[static_cast<size_t>(slot.chunk)] = slot.hash;
  return put(offset, coded.bytes, put_pages);
}

Status CodedFile::write(const Manifest& manifest, const WriterPart& part, std::span<ShardEntry> shards,
                        const Before& before, const PutPages& put_pages) {
  std::deque<Slot> busy;
  std::vector<Slot> idle(static_cast<size_t>(2 * pool_.threads() + 1));
  struct WaitForAll {  // jobs point into the slots, also when an error ends this early
    std::deque<Slot>& busy;
    ~WaitForAll() {
      for (Slot& slot : busy) {
        if (slot.done.valid()) slot.done.wait();
      }
    }
  } const wait_for_all{busy};
  const auto retire_oldest = [&]() -> Status {
    RT_TRY(retire(busy.front(), shards, put_pages));
    idle.push_back(std::move(busy.front()));
    busy.pop_front();
    return {};
  };
  for (size_t i = 0; i < shards.size(); ++i) {
    ShardEntry& shard = shards[i];
    const ShardData& data = part.shards[i];
    const TensorEntry& tensor = manifest.tensors[static_cast<size_t>(shard.tensor)];
    if (chunk_extents_[i].empty()) {
      RT_TRY_SET(const int64_t offset, writer_->place(tensor, shard.box));
      RT_TRY(write_raw(data, shard, offset, before, put_pages));
      continue;
    }
    RT_TRY(writer_->place_coded(tensor, shard.box, chunk_extents_[i]));
    const int64_t elem = dtype_size_bytes(tensor.dtype);
    shard.codec = Codec::kShuffleZstd;
    shard.chunk_bytes = elem * count_elems(chunk_extents_[i]);
    shard.stored.resize(static_cast<size_t>(ceil_div(shard.bytes, shard.chunk_bytes)));
    shard.hashes.assign(shard.stored.size(), 0);
    for (int64_t chunk = 0; chunk < static_cast<int64_t>(shard.stored.size()); ++chunk) {
      if (idle.empty()) RT_TRY(retire_oldest());
      const int64_t at = chunk * shard.chunk_bytes;
      const auto bytes = static_cast<size_t>(std::min(shard.chunk_bytes, shard.bytes - at));
      RT_TRY(before(static_cast<int64_t>(bytes)));
      Slot slot = std::move(idle.back());
      idle.pop_back();
      slot.shard = static_cast<int64_t>(i);
      slot.chunk = chunk;
      std::span<const std::byte> payload;
      if (data.data != nullptr) {
        payload = std::span(data.data + at, bytes);
      } else {
        slot.filled.resize(bytes);
        RT_TRY(data.fill(at, slot.filled));
        payload = slot.filled;
      }
      busy.push_back(std::move(slot));
      Slot& at_work = busy.back();  // a deque does not move its elements
      const int64_t chunk_bytes = shard.chunk_bytes;
      at_work.done = pool_.submit([this, &at_work, payload, elem, chunk_bytes](int64_t thread) -> Status {
        RT_TRY(encoders_[static_cast<size_t>(thread)].encode(payload, elem, chunk_bytes, at_work.coded));
        at_work.hash = hash_bytes(at_work.coded.bytes);
        return {};
      });
    }
  }
  while (!busy.empty()) RT_TRY(retire_oldest());
  return {};
}

Status CodedFile::finish(std::span<ShardEntry> shards, FileEntry& entry) {
  for (size_t i = 0; i < shards.size(); ++i)
    RT_TRY(writer_->set_hashes(static_cast<int64_t>(i), shards[i].chunk_bytes, shards[i].hashes));
  RT_TRY(writer_->finish());
  image_ = writer_->take_image();
  std::vector<std::pair<int64_t, int64_t>> taken;
  int64_t address = round_up(image_->eoa);
  for (ShardEntry& shard : shards) {
    if (shard.codec == Codec::kRaw) {
      taken.emplace_back(shard.offset, shard.bytes);
      continue;
    }
    shard.offset = address;
    address += shard.bytes;
    for (const StoredChunk& chunk : shard.stored) taken.emplace_back(chunk.offset, chunk.bytes);
  }
  entry.size_bytes = image_->eoa;
  entry.rest_hash = hash_rest(*image_, std::move(taken));
  return {};
}

}  // namespace cairn::ckpt
