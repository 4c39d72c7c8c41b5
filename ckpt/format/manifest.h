#pragma once
// The manifest of a checkpoint: plain structs <-> bytes. No I/O, no threads.
//
// On disk it is two lines (docs/format.md has the tables):
//   {"format":"cairn-checkpoint","version":1,"body_bytes":N,"body_xxh3_64":"<16 hex>"}\n
//   <N bytes of canonical JSON: keys sorted, no spaces>\n
// A decoded manifest is whole: every tensor is tiled exactly by its shards, every shard lies inside its file, no two
// overlap. Readers may index with its numbers without checking again.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

inline constexpr std::string_view kFormatName = "cairn-checkpoint";
inline constexpr int64_t kFormatVersion = 1;

// Limits of version 1; decode refuses what is beyond them before it allocates for it.
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 28;
inline constexpr int64_t kMaxDims = 8;
inline constexpr int64_t kMaxTensors = int64_t{1} << 22;
inline constexpr int64_t kMaxShards = int64_t{1} << 22;
inline constexpr int64_t kMaxFiles = int64_t{1} << 20;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 60;
inline constexpr int64_t kMaxNameBytes = 255;
inline constexpr int64_t kMinChunkBytes = 4096;  // chunk sizes are multiples of this
inline constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;
inline constexpr int64_t kMaxJsonDepth = 64;

struct RunInfo {
  std::string name;
  std::string id;                    // unique per run
  std::vector<std::string> parents;  // ids of the runs this one continues, oldest first
  bool operator==(const RunInfo&) const = default;
};

/// The layout that wrote the checkpoint: recorded for people; nothing is computed from it when loading.
struct MeshInfo {
  int64_t tp = 1, pp = 1, dp = 1, zero = 0, world = 1;
  std::string precision = "fp32";
  bool operator==(const MeshInfo&) const = default;
};

struct TensorEntry {
  std::string name;  // logical name, [A-Za-z0-9_.-], e.g. "layers.3.attn.q.weight"
  std::string kind;  // "weight", "exp_avg", "exp_avg_sq" or another [a-z0-9_]+; (kind, name) is unique
  DType dtype = DType::kF32;
  Shape shape;  // no dims: one element; every dim >= 1
  bool operator==(const TensorEntry&) const = default;
};

struct FileEntry {
  std::string name;  // inside the checkpoint's directory, [A-Za-z0-9_.-], ends in ".h5"
  int64_t size_bytes = 0;
  uint64_t rest_hash = 0;  // XXH3_64 over all bytes that belong to no shard, in file order (HDF5's own structure)
  bool operator==(const FileEntry&) const = default;
};

/// One box of one tensor, row-major and contiguous at [offset, offset + bytes) of a file.
struct ShardEntry {
  int64_t tensor = 0;  // index into tensors
  int64_t file = 0;    // index into files
  Box box;
  int64_t offset = 0, bytes = 0;
  int64_t chunk_bytes = 0;       // bytes each hash covers; the last chunk may be shorter
  std::vector<uint64_t> hashes;  // XXH3_64 of each chunk
  bool operator==(const ShardEntry&) const = default;
};

struct Manifest {
  int64_t step = 0;     // optimizer steps done
  int64_t samples = 0;  // samples consumed
  int64_t tokens = 0;   // tokens consumed
  int64_t created_unix_ms = 0;
  RunInfo run;
  std::string recipe;       // the resolved recipe's canonical JSON, byte for byte (embedded as a JSON string)
  std::string recipe_hash;  // as the recipe's own code computes it; opaque here
  MeshInfo mesh;
  std::string state = "{}";  // JSON object of the trainer (sampler, lr, seed, ...), embedded as JSON
  std::vector<TensorEntry> tensors;
  std::vector<FileEntry> files;
  std::vector<ShardEntry> shards;
  bool operator==(const Manifest&) const = default;
};

/// Bytes of `manifest.json`. Errors: kInvalidInput for whatever decode_manifest would refuse (a name with a slash,
/// `state` that is no JSON object, shards that do not tile a tensor ...), so nothing unreadable is ever written.
Result<std::string> encode_manifest(const Manifest& manifest);

/// Reads and validates everything. encode_manifest(decode_manifest(x)) == x for each accepted x.
/// Errors: kCorrupt with the byte offset or the JSON path, what was found and what was expected; kUnsupported for a
/// newer version. Whatever the bytes, it never crashes; memory stays within some 20 times bytes.size().
Result<Manifest> decode_manifest(std::string_view bytes);

/// The checks of decode_manifest on a struct. Cost: O(n log n) in shards (100k shards: about 0.1 s).
Status validate_manifest(const Manifest& manifest);

/// "weight layers.3.attn.q.weight [0:64, 0:128]": how errors name a shard.
std::string describe_shard(const Manifest& manifest, const ShardEntry& shard);

/// Bytes of all shards together.
int64_t payload_bytes(const Manifest& manifest);

}  // namespace cairn::ckpt
