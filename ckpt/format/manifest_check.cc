// validate_manifest: ranges, boxes, file extents, and the exact tiling of every tensor.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <unordered_set>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"
#include "ckpt/format/shard_table.h"

namespace cairn::ckpt {
namespace {

template <typename... Args>
Error corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kCorrupt, fmt::format(format, std::forward<Args>(args)...)};
}

// Names end in messages, HDF5 paths and file paths: keep them to characters that are safe in all three.
bool safe_name(std::string_view name) {
  if (name.empty() || static_cast<int64_t>(name.size()) > kMaxNameBytes || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), is_name_character);
}

bool safe_kind(std::string_view kind) {
  if (kind.empty() || kind.size() > 32) return false;
  return std::all_of(kind.begin(), kind.end(),
                     [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; });
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 80)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

Status check_tensor(const TensorEntry& tensor, size_t index) {
  if (!safe_name(tensor.name)) {
    return corrupt("$.tensors[{}].name: found \"{}\", expected 1 to {} characters of [A-Za-z0-9_.-]", index,
                   printable(tensor.name), kMaxNameBytes);
  }
  if (!safe_kind(tensor.kind)) {
    return corrupt("$.tensors[{}].kind: found \"{}\", expected 1 to 32 characters of [a-z0-9_]", index,
                   printable(tensor.kind));
  }
  if (static_cast<int64_t>(tensor.shape.size()) > kMaxDims) {
    return corrupt("$.tensors[{}].shape: found {} dims, expected at most {}", index, tensor.shape.size(), kMaxDims);
  }
  int64_t bytes = dtype_size_bytes(tensor.dtype);
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    if (tensor.shape[d] < 1)
      return corrupt("$.tensors[{}].shape[{}]: found {}, expected at least 1", index, d, tensor.shape[d]);
    if (__builtin_mul_overflow(bytes, tensor.shape[d], &bytes) || bytes > kMaxTensorBytes) {
      return corrupt("$.tensors[{}].shape: {} is more than {} bytes", index, to_string(tensor.shape), kMaxTensorBytes);
    }
  }
  return {};
}

// By sorting numbers: a save validates twice, and a set of a hundred thousand strings would take most of that time.
Status check_names_differ(const std::vector<TensorEntry>& tensors) {
  struct Name {
    uint64_t hash;
    size_t tensor;
  };
  std::vector<Name> names(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) names[i] = {hash_bytes(tensors[i].name) + hash_bytes(tensors[i].kind), i};
  const auto text = [&](const Name& n) { return std::tie(tensors[n.tensor].name, tensors[n.tensor].kind); };
  std::sort(names.begin(), names.end(),
            [&](const Name& a, const Name& b) { return a.hash != b.hash ? a.hash < b.hash : text(a) < text(b); });
  for (size_t i = 1; i < names.size(); ++i) {
    if (names[i - 1].hash != names[i].hash || text(names[i - 1]) != text(names[i])) continue;
    const size_t twice = std::max(names[i - 1].tensor, names[i].tensor);
    return corrupt("$.tensors[{}]: {} \"{}\" is there twice", twice, tensors[twice].kind, tensors[twice].name);
  }
  return {};
}

// An error at a place of shards.bin.
template <typename... Args>
Error bad_shard(const Manifest& m, size_t index, int64_t ShardPlace::*part, int64_t within,
                fmt::format_string<Args...> format, Args&&... args) {
  return corrupt("shards.bin: byte {}: shard {}: {}", shard_place(m.shards, index).*part + within, index,
                 fmt::format(format, std::forward<Args>(args)...));
}

Status check_stored(const Manifest& m, size_t index, int64_t chunks) {
  const ShardEntry& shard = m.shards[index];
  const FileEntry& file = m.files[static_cast<size_t>(shard.file)];
  if (shard.codec == Codec::kRaw) {
    if (!shard.stored.empty())
      return bad_shard(m, index, &ShardPlace::record, 29, "a raw shard with {} stored chunks", shard.stored.size());
    return {};
  }
  if (shard.codec != Codec::kShuffleZstd)
    return bad_shard(m, index, &ShardPlace::record, 29, "codec {}, expected 0 or 1", static_cast<int>(shard.codec));
  if (static_cast<int64_t>(shard.stored.size()) != chunks)
    return bad_shard(m, index, &ShardPlace::stored, 0, "{} stored chunks, expected {}", shard.stored.size(), chunks);
  // Larger than zstd's bound no chunk need be: a filter that makes it so is left out (filter_mask).
  const int64_t most = shard.chunk_bytes + shard.chunk_bytes / 128 + 128;
  for (size_t c = 0; c < shard.stored.size(); ++c) {
    const StoredChunk& chunk = shard.stored[c];
    const auto at = static_cast<int64_t>(c) * kStoredRecordBytes;
    if (chunk.bytes < 1 || chunk.bytes > most)
      return bad_shard(m, index, &ShardPlace::stored, at + 8, "stored chunk {} has {} bytes, expected 1 to {}", c,
                       chunk.bytes, most);
    if (chunk.offset < 0 || chunk.offset > file.size_bytes || chunk.bytes > file.size_bytes - chunk.offset)
      return bad_shard(m, index, &ShardPlace::stored, at,
                       "stored chunk {}: {} bytes at offset {} leave file \"{}\" of {} bytes", c, chunk.bytes,
                       chunk.offset, file.name, file.size_bytes);
    if (chunk.filter_mask > 3)
      return bad_shard(m, index, &ShardPlace::stored, at + 12, "stored chunk {}: filter mask {}, expected 0 to 3", c,
                       chunk.filter_mask);
  }
  return {};
}

Status check_shard(const Manifest& m, size_t index) {
  const ShardEntry& shard = m.shards[index];
  const auto bad = [&]<typename... Args>(int64_t within, fmt::format_string<Args...> format, Args&&... args) {
    return bad_shard(m, index, &ShardPlace::record, within, format, std::forward<Args>(args)...);
  };
  if (shard.tensor < 0 || shard.tensor >= static_cast<int64_t>(m.tensors.size()))
    return bad(0, "tensor: found {}, expected 0 to {}", shard.tensor, static_cast<int64_t>(m.tensors.size()) - 1);
  if (shard.file < 0 || shard.file >= static_cast<int64_t>(m.files.size()))
    return bad(4, "file: found {}, expected 0 to {}", shard.file, static_cast<int64_t>(m.files.size()) - 1);
  const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
  if (shard.box.lo.size() != tensor.shape.size() || shard.box.hi.size() != tensor.shape.size())
    return bad(28, "lo has {} dims and hi {}, expected {} as in tensor {} \"{}\"", shard.box.lo.size(),
               shard.box.hi.size(), tensor.shape.size(), shard.tensor, tensor.name);
  int64_t bytes = dtype_size_bytes(tensor.dtype);
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    const int64_t lo = shard.box.lo[d], hi = shard.box.hi[d];
    if (lo < 0 || lo >= hi || hi > tensor.shape[d])
      return bad_shard(m, index, &ShardPlace::bounds, static_cast<int64_t>(d) * 8,
                       "dim {} is {}:{}, expected a part of 0:{} (tensor {} \"{}\")", d, lo, hi, tensor.shape[d],
                       shard.tensor, tensor.name);
    bytes *= hi - lo;  // at most the tensor's bytes, which were checked
  }
  if (shard.bytes != bytes)
    return bad(16, "bytes: found {}, expected {} ({} of {})", shard.bytes, bytes, to_string(shard.box),
               dtype_name(tensor.dtype));
  const FileEntry& file = m.files[static_cast<size_t>(shard.file)];
  if (shard.codec == Codec::kRaw) {
    if (shard.offset < 0 || shard.offset > file.size_bytes || shard.bytes > file.size_bytes - shard.offset)
      return bad(8, "{} bytes at offset {} leave file \"{}\" of {} bytes", shard.bytes, shard.offset, file.name,
                 file.size_bytes);
    if (shard.chunk_bytes < kMinChunkBytes || shard.chunk_bytes > kMaxChunkBytes ||
        shard.chunk_bytes % kMinChunkBytes != 0)
      return bad(24, "chunk_bytes: found {}, expected a multiple of {} up to {}", shard.chunk_bytes, kMinChunkBytes,
                 kMaxChunkBytes);
  } else {
    if (shard.offset < file.size_bytes || shard.offset > kMaxOffset)
      return bad(8, "found address {} for a coded shard, expected {} (the size of \"{}\") to {}", shard.offset,
                 file.size_bytes, file.name, kMaxOffset);
    if (shard.chunk_bytes < 1 || shard.chunk_bytes > kMaxChunkBytes ||
        shard.chunk_bytes % dtype_size_bytes(tensor.dtype) != 0)
      return bad(24, "chunk_bytes: found {}, expected a multiple of {} (an element) up to {}", shard.chunk_bytes,
                 dtype_size_bytes(tensor.dtype), kMaxChunkBytes);
  }
  const int64_t chunks = (shard.bytes + shard.chunk_bytes - 1) / shard.chunk_bytes;
  if (static_cast<int64_t>(shard.hashes.size()) != chunks)
    return bad_shard(m, index, &ShardPlace::hashes, 0, "{} hashes, expected {} ({} bytes in chunks of {})",
                     shard.hashes.size(), chunks, shard.bytes, shard.chunk_bytes);
  return check_stored(m, index, chunks);
}

// No two payload ranges of a file share a byte: neither in the addresses (where coded shards lie behind the file's end)
// nor, for coded chunks, in the file itself.
struct Range {
  int64_t file, begin, end;
  uint32_t shard;
};

Status check_no_overlap(const Manifest& m, std::vector<Range>& ranges) {
  const auto before = [](const Range& a, const Range& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  for (size_t i = 1; i < ranges.size(); ++i) {
    const Range &a = ranges[i - 1], &b = ranges[i];
    if (a.file == b.file && a.end > b.begin)
      return bad_shard(m, b.shard, &ShardPlace::record, 8,
                       "it and shard {} overlap in file \"{}\": bytes {}:{} and {}:{}", a.shard,
                       m.files[static_cast<size_t>(a.file)].name, a.begin, a.end, b.begin, b.end);
  }
  return {};
}

Status check_extents(const Manifest& m) {
  std::vector<Range> ranges;
  ranges.reserve(m.shards.size());
  bool coded = false;
  for (size_t i = 0; i < m.shards.size(); ++i) {
    const ShardEntry& shard = m.shards[i];
    ranges.push_back({shard.file, shard.offset, shard.offset + shard.bytes, static_cast<uint32_t>(i)});
    coded = coded || shard.codec != Codec::kRaw;
  }
  RT_TRY(check_no_overlap(m, ranges));
  if (!coded) return {};
  ranges.clear();
  for (size_t i = 0; i < m.shards.size(); ++i) {
    const ShardEntry& shard = m.shards[i];
    const auto index = static_cast<uint32_t>(i);
    if (shard.codec == Codec::kRaw) ranges.push_back({shard.file, shard.offset, shard.offset + shard.bytes, index});
    for (const StoredChunk& chunk : shard.stored)
      ranges.push_back({shard.file, chunk.offset, chunk.offset + chunk.bytes, index});
  }
  return check_no_overlap(m, ranges);
}

// Boxes tile the whole exactly when the indicator functions add up to that of the whole; mixed differencing turns an
// indicator into signed points at the box's 2^d corners and is injective, so the tiling holds exactly when the signed
// corners of all boxes minus those of the whole cancel. O(n 2^d log): no pairwise comparison. Own derivation.
//
// A corner is one number: its row-major index among the shape + 1 positions of each dim, times two, plus one when its
// sign is positive. Sorting plain numbers is most of the cost of opening a large manifest.
template <typename Key>
void add_corners(const Box& box, const Shape& shape, bool positive, std::vector<Key>& out) {
  const size_t dims = shape.size();
  for (unsigned mask = 0; mask < (1u << dims); ++mask) {
    Key key = 0;
    bool sign = positive;
    for (size_t d = 0; d < dims; ++d) {
      const bool high = (mask >> d & 1u) != 0;
      key = key * static_cast<Key>(shape[d] + 1) + static_cast<Key>(high ? box.hi[d] : box.lo[d]);
      sign ^= high;
    }
    out.push_back(key * 2 + (sign ? 1 : 0));
  }
}

// Corners of a tensor of more than four dims: what a table says must not cost many times its own size in memory.
constexpr int64_t kMaxCorners = int64_t{1} << 24;

// The shards of one tensor. An index where their corners do not cancel, or nothing when they tile it.
template <typename Key>
std::optional<std::vector<int64_t>> find_gap(const Manifest& m, const Shape& shape, std::span<const uint32_t> shards,
                                             std::vector<Key>& corners) {
  corners.clear();
  for (const uint32_t s : shards) add_corners(m.shards[s].box, shape, true, corners);
  add_corners(Box::whole(shape), shape, false, corners);
  std::sort(corners.begin(), corners.end());
  for (size_t i = 0; i < corners.size();) {
    int64_t sum = 0;
    Key key = corners[i] / 2;
    for (; i < corners.size() && corners[i] / 2 == key; ++i) sum += corners[i] % 2 == 1 ? 1 : -1;
    if (sum == 0) continue;
    std::vector<int64_t> at(shape.size());
    for (size_t d = at.size(); d-- > 0;) {
      at[d] = static_cast<int64_t>(key % static_cast<Key>(shape[d] + 1));
      key /= static_cast<Key>(shape[d] + 1);
    }
    return at;
  }
  return std::nullopt;
}

Status check_tiling(const Manifest& m) {
  // Shards by tensor: a counting sort.
  std::vector<size_t> first(m.tensors.size() + 1);
  for (const ShardEntry& shard : m.shards) ++first[static_cast<size_t>(shard.tensor) + 1];
  for (size_t t = 0; t < m.tensors.size(); ++t) first[t + 1] += first[t];
  std::vector<uint32_t> by_tensor(m.shards.size());
  std::vector<size_t> next(first.begin(), first.end() - 1);
  for (size_t i = 0; i < m.shards.size(); ++i)
    by_tensor[next[static_cast<size_t>(m.shards[i].tensor)]++] = static_cast<uint32_t>(i);
  std::vector<uint64_t> corners;
  std::vector<unsigned __int128> wide_corners;
  for (size_t t = 0; t < m.tensors.size(); ++t) {
    const TensorEntry& tensor = m.tensors[t];
    const auto shards = std::span(by_tensor).subspan(first[t], first[t + 1] - first[t]);
    if (shards.size() == 1 && m.shards[shards.front()].box.is_whole(tensor.shape)) continue;
    if (tensor.shape.size() > 4 && std::ssize(shards) > kMaxCorners >> tensor.shape.size())
      return corrupt("$.tensors[{}]: {} shards of {} dims, expected at most {}", t, shards.size(), tensor.shape.size(),
                     kMaxCorners >> tensor.shape.size());
    unsigned __int128 positions = 1;  // up to 2^60 elements in 8 dims: at most 2^68
    for (const int64_t extent : tensor.shape) positions *= static_cast<unsigned __int128>(extent + 1);
    const auto gap = positions < static_cast<unsigned __int128>(1) << 63
                         ? find_gap(m, tensor.shape, shards, corners)
                         : find_gap(m, tensor.shape, shards, wide_corners);
    if (!gap) continue;
    int64_t covered = 0;
    for (const uint32_t s : shards) {
      if (__builtin_add_overflow(covered, m.shards[s].box.count_elems(), &covered)) covered = INT64_MAX;
    }
    return corrupt(
        "$.tensors[{}]: the {} shards of {} \"{}\" do not tile its shape {}: they hold {} of {} elements, first gap or "
        "overlap at index {}",
        t, shards.size(), tensor.kind, tensor.name, to_string(tensor.shape), covered, count_elems(tensor.shape),
        to_string(*gap));
  }
  return {};
}

}  // namespace

Status validate_parts(const Manifest& m) {
  const auto check_count = [](const char* path, int64_t value) -> Status {
    if (value < 0) return corrupt("{}: found {}, expected at least 0", path, value);
    return {};
  };
  RT_TRY(check_count("$.step", m.step));
  RT_TRY(check_count("$.samples", m.samples));
  RT_TRY(check_count("$.tokens", m.tokens));
  RT_TRY(check_count("$.created_unix_ms", m.created_unix_ms));
  if (m.step > kMaxStep) return corrupt("$.step: found {}, expected fewer than 16 digits", m.step);
  RT_TRY(check_count("$.mesh.zero", m.mesh.zero));
  for (const auto& [path, value] : {std::pair{"$.mesh.tp", m.mesh.tp},
                                    {"$.mesh.pp", m.mesh.pp},
                                    {"$.mesh.dp", m.mesh.dp},
                                    {"$.mesh.world", m.mesh.world},
                                    {"$.mesh.virtual_stages", m.mesh.virtual_stages},
                                    {"$.mesh.ep", m.mesh.ep},
                                    {"$.mesh.cp", m.mesh.cp}}) {
    if (value < 1) return corrupt("{}: found {}, expected at least 1", path, value);
  }
  if (static_cast<int64_t>(m.tensors.size()) > kMaxTensors || static_cast<int64_t>(m.files.size()) > kMaxFiles ||
      static_cast<int64_t>(m.shards.size()) > kMaxShards) {
    return corrupt("{} tensors, {} files, {} shards: more than {}, {} or {}", m.tensors.size(), m.files.size(),
                   m.shards.size(), kMaxTensors, kMaxFiles, kMaxShards);
  }
  for (const auto& [name, value] : m.metrics) {
    if (!safe_name(name)) return corrupt("$.metrics: found \"{}\", expected names of [A-Za-z0-9_.-]", printable(name));
    if (!std::isfinite(value)) return corrupt("$.metrics.{}: found {}, expected a finite number", name, value);
  }
  for (size_t i = 0; i < m.tensors.size(); ++i) RT_TRY(check_tensor(m.tensors[i], i));
  RT_TRY(check_names_differ(m.tensors));
  std::unordered_set<std::string> seen;
  int64_t all_bytes = 0;
  for (size_t i = 0; i < m.files.size(); ++i) {
    const FileEntry& file = m.files[i];
    if (!safe_name(file.name) || file.name.front() == '.' || !file.name.ends_with(".h5"))
      return corrupt("$.files[{}].name: found \"{}\", expected [A-Za-z0-9_.-], not beginning with a dot, ending in .h5",
                     i, printable(file.name));
    if (file.step < -1 || file.step >= m.step)
      return corrupt("$.files[{}].step: found {}, expected a step before {}", i, file.step, m.step);
    if (!seen.insert(fmt::format("{}/{}", file.step, file.name)).second)
      return corrupt("$.files[{}].name: \"{}\" is there twice", i, file.name);
    if (file.size_bytes < 0 || file.size_bytes > kMaxTensorBytes)
      return corrupt("$.files[{}].size_bytes: found {}, expected 0 to {}", i, file.size_bytes, kMaxTensorBytes);
    if (file.size_bytes > kMaxOffset - all_bytes)
      return corrupt("$.files[{}].size_bytes: found {}, which is with those before more than {}", i, file.size_bytes,
                     kMaxOffset);
    all_bytes += file.size_bytes;
  }
  for (size_t i = 0; i < m.shards.size(); ++i) RT_TRY(check_shard(m, i));
  return check_extents(m);
}

Status validate_manifest(const Manifest& m) {
  RT_TRY(validate_parts(m));
  return check_tiling(m);
}

std::string_view codec_name(Codec codec) {
  switch (codec) {
    case Codec::kRaw:
      return "raw";
    case Codec::kShuffleZstd:
      return "shuffle+zstd";
  }
  return "?";
}

std::string describe_shard(const Manifest& m, const ShardEntry& shard) {
  const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
  return fmt::format("{} {} {}", tensor.kind, tensor.name, to_string(shard.box));
}

int64_t payload_bytes(const Manifest& m) {
  int64_t total = 0;
  for (const ShardEntry& shard : m.shards) total += shard.bytes;
  return total;
}

std::vector<int64_t> needed_steps(std::span<const FileEntry> files) {
  std::set<int64_t> steps;
  for (const FileEntry& file : files) {
    if (file.step >= 0) steps.insert(file.step);
  }
  return {steps.begin(), steps.end()};
}

}  // namespace cairn::ckpt
