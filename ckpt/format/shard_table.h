#pragma once
// shards.bin: the shards and chunk hashes of a manifest as fixed-size little-endian records (docs/format.md has the
// tables). No I/O, no threads.

#include <string>
#include <string_view>

#include "ckpt/format/manifest.h"

namespace cairn::ckpt {

inline constexpr int64_t kTableHeaderBytes = 64;
inline constexpr int64_t kShardRecordBytes = 32;
inline constexpr int64_t kStoredRecordBytes = 16;

/// Takes a manifest that validate_manifest has passed.
std::string encode_shard_table(const Manifest& manifest);

/// Fills in `shards`. Checks all that concerns the bytes; validate_manifest checks what they mean.
/// Errors: kCorrupt or kUnsupported, "shards.bin: byte N: ...".
Status decode_shard_table(std::string_view bytes, std::vector<ShardEntry>& shards);

/// Byte offset in shards.bin of the record, the bounds and the hashes of a shard: for messages.
struct ShardPlace {
  int64_t record = 0, bounds = 0, hashes = 0, stored = 0;
};
ShardPlace shard_place(const std::vector<ShardEntry>& shards, size_t index);

}  // namespace cairn::ckpt
