#pragma once
// The manifest of a checkpoint: plain structs <-> bytes. No I/O, no threads.
//
// On disk it is two files (docs/format.md has the tables). manifest.json is for people too, two lines:
//   {"format":"cairn-checkpoint","version":1,"body_bytes":N,"body_xxh3_64":"<16 hex>"}\n
//   <N bytes of canonical JSON: keys sorted, no spaces>\n
// shards.bin is for machines: where each shard lies and the hash of each chunk, in fixed-size records, so that a
// million chunks open in milliseconds. The body holds its size and hash, so the first line's hash covers both files. A
// decoded manifest is whole: every tensor is tiled exactly by its shards, every shard lies inside its file, no two
// overlap. Readers may index with its numbers without checking again.

#include <cstdint>
#include <map>
#include <span>
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
inline constexpr int64_t kMaxManifestBytes = int64_t{1} << 28;  // of manifest.json
inline constexpr int64_t kMaxTableBytes = int64_t{1} << 31;     // of shards.bin
inline constexpr int64_t kMaxDims = 8;
inline constexpr int64_t kMaxTensors = int64_t{1} << 22;
inline constexpr int64_t kMaxShards = int64_t{1} << 25;
inline constexpr int64_t kMaxFiles = int64_t{1} << 20;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 60;
inline constexpr int64_t kMaxOffset = int64_t{1} << 62;
inline constexpr int64_t kMaxStep = 999'999'999'999'999;
inline constexpr int64_t kMaxNameBytes = 255;
inline constexpr int64_t kMinChunkBytes = 4096;  // chunk sizes of raw shards are multiples of this
inline constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;

/// Of the names of tensors, files and metrics: [A-Za-z0-9_.-].
constexpr bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
}

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
  int64_t virtual_stages = 1, ep = 1, cp = 1;
  bool operator==(const MeshInfo&) const = default;
};

/// Who wrote the files: for people.
struct WriterInfo {
  std::string program;  // "cairn 0.1.0"
  std::string host;
  bool operator==(const WriterInfo&) const = default;
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
  /// -1: the file lies in this checkpoint's directory. Else it belongs to that earlier step of the same checkpoints
  /// folder (tensors that have not changed since), and size and rest hash are as in that step's manifest.
  int64_t step = -1;
  bool operator==(const FileEntry&) const = default;
};

/// How a shard's bytes lie in its file. Numbers are those of the format.
enum class Codec : uint8_t {
  kRaw = 0,          // as they are
  kShuffleZstd = 1,  // each chunk: byte planes split (HDF5's shuffle), then a zstd frame (HDF5 filter 32015)
};
std::string_view codec_name(Codec codec);

/// Where a chunk of a coded shard lies in its file.
struct StoredChunk {
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t filter_mask = 0;  // HDF5's: bit i says that filter i of the pipeline was not applied to this chunk
  bool operator==(const StoredChunk&) const = default;
};

/// One box of one tensor, row-major and contiguous: raw at [offset, offset + bytes) of a file, or coded chunk by chunk.
struct ShardEntry {
  int64_t tensor = 0;  // index into tensors
  int64_t file = 0;    // index into files
  Box box;
  /// Raw: where the payload begins in the file. Coded: an address behind the file's end, so that each byte of payload,
  /// raw or coded, has one address in its file and no two share one.
  int64_t offset = 0;
  int64_t bytes = 0;             // of the box
  int64_t chunk_bytes = 0;       // payload bytes of a chunk; the last one may be shorter
  std::vector<uint64_t> hashes;  // XXH3_64 of each chunk as it lies in the file (coded: of the stored bytes)
  Codec codec = Codec::kRaw;
  std::vector<StoredChunk> stored;  // coded: one a chunk; raw: empty
  bool operator==(const ShardEntry&) const = default;
};

/// A metric's name (runtime/config/metric_name.h) in characters that names of tensors have: '/' becomes '.', any other
/// "_" and two hexadecimal digits.
std::string metric_key(std::string_view name);

struct Manifest {
  int64_t step = 0;     // optimizer steps done
  int64_t samples = 0;  // samples consumed
  int64_t tokens = 0;   // tokens consumed
  int64_t created_unix_ms = 0;
  RunInfo run;
  std::string recipe;       // the resolved recipe's canonical JSON, byte for byte (embedded as a JSON string)
  std::string recipe_hash;  // as the recipe's own code computes it; opaque here
  MeshInfo mesh;
  std::string state = "{}";               // JSON object of the trainer (sampler, lr, seed, ...), embedded as JSON
  std::map<std::string, double> metrics;  // finite numbers at this step, by metric_key()
  WriterInfo writer;
  std::string origin;        // what made it when no training did: "average of ...", "reshard of ..."; else empty
  std::string extra = "{}";  // JSON object; readers may ignore it: room for later versions' additions
  std::vector<TensorEntry> tensors;
  std::vector<FileEntry> files;
  std::vector<ShardEntry> shards;
  bool operator==(const Manifest&) const = default;
};

/// The two files of a manifest.
struct ManifestFiles {
  std::string json;   // kManifestName
  std::string table;  // kTableName
};

/// Errors: kInvalidInput for whatever decode_manifest would refuse (a name with a slash, `state` that is no JSON
/// object, shards that do not tile a tensor ...), so nothing unreadable is ever written.
Result<ManifestFiles> encode_manifest_files(const Manifest& manifest);
/// Both files, one behind the other, as one string: for keeping a manifest in memory.
Result<std::string> encode_manifest(const Manifest& manifest);

/// Reads and validates everything. Encoding what was decoded gives the same bytes, for each accepted input.
/// Errors: kCorrupt with the byte offset or the JSON path, what was found and what was expected; kUnsupported for a
/// newer version or codec. They name the file, below `dir` when it is given. Whatever the bytes, it never crashes;
/// memory stays within some 20 times the input.
Result<Manifest> decode_manifest(std::string_view json, std::string_view table, std::string_view dir = {});
/// What encode_manifest made.
Result<Manifest> decode_manifest(std::string_view bytes);

/// The checks of decode_manifest on a struct. Cost: O(n log n) in shards (100k shards: about 0.1 s).
Status validate_manifest(const Manifest& manifest);
/// The same of some of its files and their shards, which need not tile the tensors.
Status validate_parts(const Manifest& manifest);

/// "weight layers.3.attn.q.weight [0:64, 0:128]": how errors name a shard.
std::string describe_shard(const Manifest& manifest, const ShardEntry& shard);

/// Bytes of all shards together, as they are in memory.
int64_t payload_bytes(const Manifest& manifest);

/// Of the starts of agents that lead to a checkpoint, the one that saved it first: Manifest::extra has them. Empty
/// where no run saved it, or a build that did not know of them.
std::vector<uint64_t> starts_of(const Manifest& manifest);
void put_starts(std::span<const uint64_t> starts, Manifest& manifest);

/// Hash of the line of the run's lineage.jsonl that the checkpoint was saved behind: a copy of it tells its past.
/// Empty: Manifest::extra has none.
std::string lineage_of(const Manifest& manifest);
void put_lineage(const std::string& hash, Manifest& manifest);

/// The earlier steps that these files lie in, ascending: a checkpoint that names them needs those steps. It is the
/// manifest that says so; the note beside it (kReferencesName) has no checksum, and may be lost.
std::vector<int64_t> needed_steps(std::span<const FileEntry> files);

}  // namespace cairn::ckpt
