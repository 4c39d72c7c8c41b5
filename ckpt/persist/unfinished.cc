#include "ckpt/persist/unfinished.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <string_view>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/persist/read_pipeline.h"

namespace cairn::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kNoteSuffix = ".done";
constexpr std::string_view kMagic = "cairn-finished-file 2";
constexpr int64_t kMaxNoteBytes = int64_t{1} << 31;

/// Words of a text that spaces and newlines part.
class Words {
 public:
  explicit Words(std::string_view text) : text_(text) {}
  std::string_view next() {
    const size_t begin = text_.find_first_not_of(" \n", at_);
    if (begin == std::string_view::npos) return {};
    at_ = std::min(text_.find_first_of(" \n", begin), text_.size());
    return text_.substr(begin, at_ - begin);
  }
  std::optional<int64_t> number() {
    const std::string_view word = next();
    int64_t value = 0;
    const auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (word.empty() || failed != std::errc() || end != word.data() + word.size() || value < 0) return std::nullopt;
    return value;
  }
  std::optional<uint64_t> hash() { return hash_from_hex(next()); }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

// magic, key; name, size, rest hash; then for each shard offset, bytes, chunk size, codec, number of hashes, hashes,
// and of a coded one offset, bytes and filter mask of each stored chunk; at last the hash of all that.
std::string encode(uint64_t key, const FinishedFile& finished) {
  std::string out = fmt::format("{}\n{}\n{} {} {} {}\n", kMagic, hash_to_hex(key), finished.file.name,
                                finished.file.size_bytes, hash_to_hex(finished.file.rest_hash), finished.shards.size());
  for (const ShardEntry& shard : finished.shards) {
    out += fmt::format("{} {} {} {} {}", shard.offset, shard.bytes, shard.chunk_bytes, static_cast<int>(shard.codec),
                       shard.hashes.size());
    for (const uint64_t hash : shard.hashes) {
      out += ' ';
      out += hash_to_hex(hash);
    }
    for (const StoredChunk& chunk : shard.stored)
      out += fmt::format(" {} {} {}", chunk.offset, chunk.bytes, chunk.filter_mask);
    out += '\n';
  }
  out += hash_to_hex(hash_bytes(out));
  return out;
}

std::optional<FinishedFile> decode(std::string_view text, uint64_t key) {
  constexpr size_t kHashDigits = 16;
  if (text.size() < kHashDigits || !text.starts_with(kMagic)) return std::nullopt;
  const std::string_view body = text.substr(0, text.size() - kHashDigits);
  if (hash_from_hex(text.substr(body.size())) != hash_bytes(body)) return std::nullopt;
  Words words(body.substr(kMagic.size()));
  if (words.hash() != key) return std::nullopt;
  FinishedFile out;
  out.file.name = words.next();
  const auto size = words.number();
  const auto rest = words.hash();
  const auto shards = words.number();
  if (!size || !rest || !shards || *shards > kMaxShards) return std::nullopt;
  out.file.size_bytes = *size;
  out.file.rest_hash = *rest;
  for (int64_t s = 0; s < *shards; ++s) {
    const auto offset = words.number(), bytes = words.number(), chunk = words.number(), codec = words.number(),
               count = words.number();
    if (!offset || !bytes || !chunk || !codec || !count || *chunk < 1 || *bytes < 1 || *bytes > kMaxTensorBytes ||
        *codec > static_cast<int64_t>(Codec::kShuffleZstd) || *count != (*bytes - 1) / *chunk + 1)
      return std::nullopt;
    ShardEntry shard{.offset = *offset, .bytes = *bytes, .chunk_bytes = *chunk, .codec = static_cast<Codec>(*codec)};
    if (shard.codec == Codec::kRaw && (*bytes > *size || *offset > *size - *bytes)) return std::nullopt;
    for (int64_t i = 0; i < *count; ++i) {
      const auto hash = words.hash();
      if (!hash) return std::nullopt;
      shard.hashes.push_back(*hash);
    }
    for (int64_t i = 0; i < *count && shard.codec != Codec::kRaw; ++i) {
      const auto at = words.number(), stored = words.number(), mask = words.number();
      if (!at || !stored || !mask || *stored > *size || *at > *size - *stored || *mask > 3) return std::nullopt;
      shard.stored.push_back({*at, *stored, static_cast<uint32_t>(*mask)});
    }
    out.shards.push_back(std::move(shard));
  }
  return out;
}

struct HashedBytes {
  int64_t offset = 0, bytes = 0;
  uint64_t hash = 0;
};

/// Of all shards, as they lie in the file, in its order.
std::vector<HashedBytes> chunks_of(const FinishedFile& finished) {
  std::vector<HashedBytes> out;
  for (const ShardEntry& shard : finished.shards) {
    for (size_t i = 0; i < shard.hashes.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) * shard.chunk_bytes;
      if (shard.codec == Codec::kRaw) {
        out.push_back({shard.offset + at, std::min(shard.chunk_bytes, shard.bytes - at), shard.hashes[i]});
      } else {
        out.push_back({shard.stored[i].offset, shard.stored[i].bytes, shard.hashes[i]});
      }
    }
  }
  std::sort(out.begin(), out.end(), [](const HashedBytes& a, const HashedBytes& b) { return a.offset < b.offset; });
  return out;
}

}  // namespace

bool is_note_name(std::string_view name) { return name.ends_with(kNoteSuffix); }
std::string note_name(const std::string& file_name) { return file_name + std::string(kNoteSuffix); }

Status write_note(IoBackend& io, const fs::path& work, uint64_t key, const FinishedFile& finished) {
  return write_file(io, work / note_name(finished.file.name), encode(key, finished));
}

Result<std::map<std::string, FinishedFile>> read_notes(IoBackend& io, const fs::path& work, uint64_t key) {
  std::map<std::string, FinishedFile> out;
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(work));
  for (const DirEntry& entry : entries) {
    if (entry.is_dir || !is_note_name(entry.name)) continue;
    RT_TRY_SET(const std::string text, read_file(io, work / entry.name, kMaxNoteBytes));
    std::optional<FinishedFile> note = decode(text, key);
    if (note && note_name(note->file.name) == entry.name) out.emplace(note->file.name, std::move(*note));
  }
  return out;
}

Status check_finished(IoBackend& io, const fs::path& work, const FinishedFile& finished) {
  constexpr int64_t kWindowBytes = int64_t{16} << 20, kPieceBytes = int64_t{1} << 20;
  const fs::path path = work / finished.file.name;
  RT_TRY_SET(const std::unique_ptr<IoFile> file, io.open(path));
  RT_TRY_SET(const int64_t size, file->size());
  const auto differs = [&](int64_t offset) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{}: byte {}: not what was noted when it was written", path.string(), offset)};
  };
  if (size != finished.file.size_bytes) return differs(std::min(size, finished.file.size_bytes));
  const std::vector<HashedBytes> chunks = chunks_of(finished);
  StreamingHash rest;
  ReadPipeline pipeline(kWindowBytes);
  int64_t at = 0;
  const auto rest_until = [&](int64_t end) -> Status {
    while (at < end) {
      const int64_t bytes = std::min(kPieceBytes, end - at);
      RT_TRY(
          pipeline.submit(*file, size, at, bytes, nullptr, [&](Status read, std::span<const std::byte> data) -> Status {
            RT_TRY(std::move(read));
            rest.update(data);
            return {};
          }));
      at += bytes;
    }
    return {};
  };
  for (const HashedBytes& chunk : chunks) {
    if (chunk.offset < at) return differs(chunk.offset);  // a note of files that nobody writes
    RT_TRY(rest_until(chunk.offset));
    RT_TRY(pipeline.submit(*file, size, chunk.offset, chunk.bytes, nullptr,
                           [&](Status read, std::span<const std::byte> data) -> Status {
                             RT_TRY(std::move(read));
                             return hash_bytes(data) == chunk.hash ? Status() : Status(differs(chunk.offset));
                           }));
    at = chunk.offset + chunk.bytes;
  }
  RT_TRY(rest_until(size));
  RT_TRY(pipeline.drain());
  return rest.digest() == finished.file.rest_hash ? Status() : Status(differs(0));
}

Result<std::string> find_unfinished(IoBackend& io, const fs::path& dir, int64_t step, uint64_t key,
                                    const std::function<bool(const WriterId&)>& alive,
                                    std::vector<std::string>* cleaned) {
  Result<std::vector<DirEntry>> entries = io.list(dir);
  if (!entries.ok()) return is_not_found(entries.error()) ? Result<std::string>("") : std::move(entries).error();
  std::string best;
  size_t best_files = 0;
  std::vector<std::string> dead;
  for (const DirEntry& entry : entries.value()) {
    const auto work = parse_work_dir_name(kTmpPrefix, entry.name);
    if (!entry.is_dir || !work || work->step != step || alive(work->writer)) continue;
    dead.push_back(entry.name);
    const auto notes = read_notes(io, dir / entry.name, key);
    if (!notes.ok() || notes.value().size() <= best_files) continue;
    best_files = notes.value().size();
    best = entry.name;
  }
  // One may be what an exchange has replaced: the new name must be durable before the old data goes.
  if (dead.size() > (best.empty() ? 0 : 1)) RT_TRY(io.sync_dir(dir));
  for (const std::string& name : dead) {
    if (name == best) continue;
    RT_TRY(remove_tree(io, dir / name));
    cleaned->push_back(name);
  }
  return best;
}

Status remove_notes(IoBackend& io, const fs::path& work) {
  RT_TRY_SET(const std::vector<DirEntry> entries, io.list(work));
  for (const DirEntry& entry : entries) {
    if (!entry.is_dir && is_note_name(entry.name)) RT_TRY(io.remove_file(work / entry.name));
  }
  return {};
}

}  // namespace cairn::ckpt
