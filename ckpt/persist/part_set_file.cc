#include "ckpt/persist/part_set_file.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/json/json.h"

namespace cairn::ckpt {
namespace {

using nlohmann::json;

constexpr size_t kHashDigits = 16;

std::string hash_of(std::string_view text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

json encoded(const ShardEntry& shard) {
  json stored = json::array();
  for (const StoredChunk& chunk : shard.stored) stored.push_back({chunk.offset, chunk.bytes, chunk.filter_mask});
  return {shard.tensor,
          shard.file,
          shard.box.lo,
          shard.box.hi,
          shard.offset,
          shard.bytes,
          shard.chunk_bytes,
          shard.hashes,
          static_cast<int>(shard.codec),
          stored};
}

/// Throws what the library throws.
ShardEntry decoded(const json& from) {
  ShardEntry out{.tensor = from.at(0),
                 .file = from.at(1),
                 .box = {from.at(2), from.at(3)},
                 .offset = from.at(4),
                 .bytes = from.at(5),
                 .chunk_bytes = from.at(6),
                 .hashes = from.at(7),
                 .codec = static_cast<Codec>(from.at(8).get<int>())};
  for (const json& chunk : from.at(9)) out.stored.push_back({chunk.at(0), chunk.at(1), chunk.at(2)});
  return out;
}

}  // namespace

std::string part_set_name(int64_t host) { return fmt::format("parts-{}.json", host); }

Status write_part_set(IoBackend& io, const std::filesystem::path& work, int64_t host, const PartSet& set) {
  json files = json::array(), shards = json::array();
  for (const FileEntry& file : set.files) files.push_back({file.name, file.size_bytes, file.rest_hash, file.step});
  for (const ShardEntry& shard : set.shards) shards.push_back(encoded(shard));
  const std::string text = json_text(json{{"step", set.step},
                                          {"files", std::move(files)},
                                          {"shards", std::move(shards)},
                                          {"payload_bytes", set.stats.payload_bytes},
                                          {"file_bytes", set.stats.file_bytes}});
  return write_file(io, work / part_set_name(host), hash_of(text) + text);
}

Result<PartSet> read_part_set(IoBackend& io, const std::filesystem::path& work, int64_t host) {
  const std::filesystem::path path = work / part_set_name(host);
  RT_TRY_SET(const std::string bytes, read_file(io, path, kMaxTableBytes));
  const auto damaged = [&](std::string_view why) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}: {}", path.string(), why)};
  };
  if (bytes.size() < kHashDigits) return damaged(fmt::format("{} bytes", bytes.size()));
  const std::string_view text = std::string_view(bytes).substr(kHashDigits);
  if (hash_of(text) != std::string_view(bytes).substr(0, kHashDigits)) return damaged("its checksum does not hold");
  RT_TRY_SET(const json from, parse_json(text).with(path.string()));
  try {
    PartSet out{.step = from.at("step"), .files = {}, .shards = {}, .stats = {}};
    for (const json& file : from.at("files")) out.files.push_back({file.at(0), file.at(1), file.at(2), file.at(3)});
    for (const json& shard : from.at("shards")) out.shards.push_back(decoded(shard));
    out.stats.payload_bytes = from.at("payload_bytes");
    out.stats.file_bytes = from.at("file_bytes");
    return out;
  } catch (const json::exception& error) {
    return damaged(error.what());
  }
}

}  // namespace cairn::ckpt
