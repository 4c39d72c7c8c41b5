#include "ckpt/format/shard_table.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

namespace cairn::ckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "shards.bin is little endian and is copied as it lies");

constexpr char kMagic[8] = {'C', 'A', 'I', 'R', 'N', 'T', 'B', 'L'};
constexpr uint32_t kTableVersion = 1;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t zero0;
  uint64_t shards, bounds, chunks, stored;
  uint64_t file_bytes;
  uint64_t zero1;
};
static_assert(sizeof(Header) == kTableHeaderBytes);

struct Record {
  uint32_t tensor, file;
  uint64_t offset, bytes;
  uint32_t chunk_bytes;
  uint8_t dims, codec;
  uint16_t zero;
};
static_assert(sizeof(Record) == kShardRecordBytes);

struct Stored {
  uint64_t offset;
  uint32_t bytes, filter_mask;
};
static_assert(sizeof(Stored) == kStoredRecordBytes);

template <typename... Args>
Error corrupt_at(int64_t at, fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kCorrupt,
               fmt::format("shards.bin: byte {}: {}", at, fmt::format(format, std::forward<Args>(args)...))};
}

template <typename T>
void put(std::string& out, size_t& at, const T* values, size_t count) {
  if (count > 0) std::memcpy(out.data() + at, values, count * sizeof(T));
  at += count * sizeof(T);
}

// Where the sections begin. Sums cannot overflow: counts are below 2^32 when this is asked.
struct Sections {
  int64_t bounds, hashes, stored, end;
};

Sections sections_of(int64_t shards, int64_t bounds, int64_t chunks, int64_t stored) {
  Sections s{};
  s.bounds = kTableHeaderBytes + shards * kShardRecordBytes;
  s.hashes = s.bounds + bounds * 8;
  s.stored = s.hashes + chunks * 8;
  s.end = s.stored + stored * kStoredRecordBytes;
  return s;
}

}  // namespace

std::string encode_shard_table(const Manifest& manifest) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kTableVersion;
  header.shards = manifest.shards.size();
  for (const ShardEntry& shard : manifest.shards) {
    header.bounds += 2 * shard.box.lo.size();
    header.chunks += shard.hashes.size();
    header.stored += shard.stored.size();
  }
  const Sections sections = sections_of(static_cast<int64_t>(header.shards), static_cast<int64_t>(header.bounds),
                                        static_cast<int64_t>(header.chunks), static_cast<int64_t>(header.stored));
  header.file_bytes = static_cast<uint64_t>(sections.end);

  std::string out(static_cast<size_t>(sections.end), '\0');
  size_t record_at = 0, bounds_at = static_cast<size_t>(sections.bounds);
  auto hashes_at = static_cast<size_t>(sections.hashes), stored_at = static_cast<size_t>(sections.stored);
  put(out, record_at, &header, 1);
  for (const ShardEntry& shard : manifest.shards) {
    const Record record{static_cast<uint32_t>(shard.tensor),      static_cast<uint32_t>(shard.file),
                        static_cast<uint64_t>(shard.offset),      static_cast<uint64_t>(shard.bytes),
                        static_cast<uint32_t>(shard.chunk_bytes), static_cast<uint8_t>(shard.box.lo.size()),
                        static_cast<uint8_t>(shard.codec),        0};
    put(out, record_at, &record, 1);
    put(out, bounds_at, shard.box.lo.data(), shard.box.lo.size());
    put(out, bounds_at, shard.box.hi.data(), shard.box.hi.size());
    put(out, hashes_at, shard.hashes.data(), shard.hashes.size());
    for (const StoredChunk& chunk : shard.stored) {
      const Stored stored{static_cast<uint64_t>(chunk.offset), static_cast<uint32_t>(chunk.bytes), chunk.filter_mask};
      put(out, stored_at, &stored, 1);
    }
  }
  return out;
}

Status decode_shard_table(std::string_view bytes, std::vector<ShardEntry>& shards) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kTableHeaderBytes)
    return corrupt_at(size, "the file ends, its header alone has {} bytes", kTableHeaderBytes);
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0)
    return corrupt_at(0, "this is no shard table: expected \"{}\"", std::string_view(kMagic, sizeof(kMagic)));
  if (header.version != kTableVersion) {
    Error error = corrupt_at(8, "table version {}, this build reads {}; read it with a newer build", header.version,
                             kTableVersion);
    if (header.version > kTableVersion) error.code = ErrorCode::kUnsupported;
    return error;
  }
  if (header.zero0 != 0) return corrupt_at(12, "found {}, expected 0", header.zero0);
  if (header.zero1 != 0) return corrupt_at(56, "found {}, expected 0", header.zero1);
  if (header.shards > static_cast<uint64_t>(kMaxShards))
    return corrupt_at(16, "found {} shards, expected at most {}", header.shards, kMaxShards);
  constexpr uint64_t kMaxChunks = static_cast<uint64_t>(kMaxTableBytes) / 8;
  if (header.bounds > header.shards * 2 * kMaxDims)
    return corrupt_at(24, "found {} bounds, expected at most {}", header.bounds, header.shards * 2 * kMaxDims);
  if (header.chunks > kMaxChunks)
    return corrupt_at(32, "found {} chunks, expected at most {}", header.chunks, kMaxChunks);
  if (header.stored > header.chunks)
    return corrupt_at(40, "found {} stored chunks, expected at most {}", header.stored, header.chunks);
  const Sections sections = sections_of(static_cast<int64_t>(header.shards), static_cast<int64_t>(header.bounds),
                                        static_cast<int64_t>(header.chunks), static_cast<int64_t>(header.stored));
  if (header.file_bytes != static_cast<uint64_t>(sections.end))
    return corrupt_at(48, "found a size of {} bytes, expected {} for {} shards, {} bounds, {} chunks, {} stored chunks",
                      header.file_bytes, sections.end, header.shards, header.bounds, header.chunks, header.stored);
  if (size != sections.end)
    return corrupt_at(std::min(size, sections.end), "the file has {} bytes, expected {}", size, sections.end);

  shards.clear();
  shards.resize(header.shards);
  int64_t record_at = kTableHeaderBytes, bounds_at = sections.bounds, hashes_at = sections.hashes;
  int64_t stored_at = sections.stored;
  const char* const data = bytes.data();
  for (ShardEntry& shard : shards) {
    Record record;
    std::memcpy(&record, data + record_at, sizeof(record));
    constexpr auto kMaxNumber = static_cast<uint64_t>(INT64_MAX);
    if (record.offset > kMaxNumber)
      return corrupt_at(record_at + 8, "found offset {}, expected at most {}", record.offset, kMaxNumber);
    if (record.bytes < 1 || record.bytes > static_cast<uint64_t>(kMaxTensorBytes))
      return corrupt_at(record_at + 16, "found {} bytes, expected 1 to {}", record.bytes, kMaxTensorBytes);
    if (record.chunk_bytes < 1 || record.chunk_bytes > kMaxChunkBytes)
      return corrupt_at(record_at + 24, "found chunks of {} bytes, expected 1 to {}", record.chunk_bytes,
                        kMaxChunkBytes);
    if (record.dims > kMaxDims)
      return corrupt_at(record_at + 28, "found {} dims, expected at most {}", record.dims, kMaxDims);
    if (record.codec > static_cast<uint8_t>(Codec::kShuffleZstd)) {
      Error error =
          corrupt_at(record_at + 29, "codec {}, this build reads 0 and 1; read it with a newer build", record.codec);
      error.code = ErrorCode::kUnsupported;
      return error;
    }
    if (record.zero != 0) return corrupt_at(record_at + 30, "found {}, expected 0", record.zero);
    const auto dims = static_cast<int64_t>(record.dims);
    if (sections.hashes - bounds_at < 2 * dims * 8)
      return corrupt_at(record_at + 28, "found {} dims, but only {} of {} bounds are left", dims,
                        (sections.hashes - bounds_at) / 8, header.bounds);
    const auto chunks = static_cast<int64_t>((record.bytes + record.chunk_bytes - 1) / record.chunk_bytes);
    if ((sections.stored - hashes_at) / 8 < chunks)
      return corrupt_at(record_at + 16, "{} bytes in chunks of {} need {} hashes, but only {} of {} are left",
                        record.bytes, record.chunk_bytes, chunks, (sections.stored - hashes_at) / 8, header.chunks);
    shard.tensor = record.tensor;
    shard.file = record.file;
    shard.offset = static_cast<int64_t>(record.offset);
    shard.bytes = static_cast<int64_t>(record.bytes);
    shard.chunk_bytes = record.chunk_bytes;
    shard.codec = static_cast<Codec>(record.codec);
    if (dims > 0) {
      // The bytes need not be aligned in memory; vectors of int64 are filled by memcpy.
      shard.box.lo.resize(static_cast<size_t>(dims));
      shard.box.hi.resize(static_cast<size_t>(dims));
      std::memcpy(shard.box.lo.data(), data + bounds_at, static_cast<size_t>(dims) * 8);
      std::memcpy(shard.box.hi.data(), data + bounds_at + dims * 8, static_cast<size_t>(dims) * 8);
    }
    shard.hashes.resize(static_cast<size_t>(chunks));
    std::memcpy(shard.hashes.data(), data + hashes_at, static_cast<size_t>(chunks) * 8);
    if (shard.codec != Codec::kRaw) {
      if ((sections.end - stored_at) / kStoredRecordBytes < chunks)
        return corrupt_at(record_at + 29, "{} coded chunks, but only {} of {} stored chunks are left", chunks,
                          (sections.end - stored_at) / kStoredRecordBytes, header.stored);
      shard.stored.resize(static_cast<size_t>(chunks));
      for (StoredChunk& chunk : shard.stored) {
        Stored stored;
        std::memcpy(&stored, data + stored_at, sizeof(stored));
        if (stored.offset > kMaxNumber)
          return corrupt_at(stored_at, "found offset {}, expected at most {}", stored.offset, kMaxNumber);
        chunk = {static_cast<int64_t>(stored.offset), stored.bytes, stored.filter_mask};
        stored_at += kStoredRecordBytes;
      }
    }
    record_at += kShardRecordBytes;
    bounds_at += 2 * dims * 8;
    hashes_at += chunks * 8;
  }
  if (bounds_at != sections.hashes)
    return corrupt_at(24, "found {} bounds, the shards have {}", header.bounds, (bounds_at - sections.bounds) / 8);
  if (hashes_at != sections.stored)
    return corrupt_at(32, "found {} chunks, the shards have {}", header.chunks, (hashes_at - sections.hashes) / 8);
  if (stored_at != sections.end)
    return corrupt_at(40, "found {} stored chunks, the coded shards have {}", header.stored,
                      (stored_at - sections.stored) / kStoredRecordBytes);
  return {};
}

ShardPlace shard_place(const std::vector<ShardEntry>& shards, size_t index) {
  int64_t bounds = 0, chunks = 0, stored = 0;
  ShardPlace place;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (i == index) {
      place.bounds = bounds * 8;
      place.hashes = chunks * 8;
      place.stored = stored * kStoredRecordBytes;
    }
    bounds += 2 * static_cast<int64_t>(shards[i].box.lo.size());
    chunks += static_cast<int64_t>(shards[i].hashes.size());
    stored += static_cast<int64_t>(shards[i].stored.size());
  }
  const Sections sections = sections_of(static_cast<int64_t>(shards.size()), bounds, chunks, stored);
  place.record = kTableHeaderBytes + static_cast<int64_t>(index) * kShardRecordBytes;
  place.bounds += sections.bounds;
  place.hashes += sections.hashes;
  place.stored += sections.stored;
  return place;
}

}  // namespace cairn::ckpt
