// validate_manifest: ranges, boxes, file extents, and the exact tiling of every tensor.

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "ckpt/format/checksum.h"
#include "ckpt/format/manifest.h"

namespace cairn::ckpt {
namespace {

template <typename... Args>
Error corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Error{ErrorCode::kCorrupt, fmt::format(format, std::forward<Args>(args)...)};
}

// Names end in messages, HDF5 paths and file paths: keep them to characters that are safe in all three.
bool safe_name(std::string_view name) {
  if (name.empty() || static_cast<int64_t>(name.size()) > kMaxNameBytes || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  });
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

Status check_shard(const Manifest& m, size_t index) {
  const ShardEntry& shard = m.shards[index];
  if (shard.tensor < 0 || shard.tensor >= static_cast<int64_t>(m.tensors.size()))
    return corrupt("$.shards[{}].tensor: found {}, expected 0 to {}", index, shard.tensor,
                   static_cast<int64_t>(m.tensors.size()) - 1);
  if (shard.file < 0 || shard.file >= static_cast<int64_t>(m.files.size()))
    return corrupt("$.shards[{}].file: found {}, expected 0 to {}", index, shard.file,
                   static_cast<int64_t>(m.files.size()) - 1);
  const TensorEntry& tensor = m.tensors[static_cast<size_t>(shard.tensor)];
  if (shard.box.lo.size() != tensor.shape.size() || shard.box.hi.size() != tensor.shape.size())
    return corrupt("$.shards[{}]: lo has {} dims and hi {}, expected {} as in tensor {} \"{}\"", index,
                   shard.box.lo.size(), shard.box.hi.size(), tensor.shape.size(), shard.tensor, tensor.name);
  int64_t bytes = dtype_size_bytes(tensor.dtype);
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    const int64_t lo = shard.box.lo[d], hi = shard.box.hi[d];
    if (lo < 0 || lo >= hi || hi > tensor.shape[d])
      return corrupt("$.shards[{}]: dim {} is {}:{}, expected a part of 0:{} (tensor {} \"{}\")", index, d, lo, hi,
                     tensor.shape[d], shard.tensor, tensor.name);
    bytes *= hi - lo;  // at most the tensor's bytes, which were checked
  }
  if (shard.bytes != bytes)
    return corrupt("$.shards[{}].bytes: found {}, expected {} ({} of {})", index, shard.bytes, bytes,
                   to_string(shard.box), dtype_name(tensor.dtype));
  const FileEntry& file = m.files[static_cast<size_t>(shard.file)];
  if (shard.offset < 0 || shard.offset > file.size_bytes || shard.bytes > file.size_bytes - shard.offset)
    return corrupt("$.shards[{}]: {} bytes at offset {} leave file \"{}\" of {} bytes", index, shard.bytes,
                   shard.offset, file.name, file.size_bytes);
  if (shard.chunk_bytes < kMinChunkBytes || shard.chunk_bytes > kMaxChunkBytes ||
      shard.chunk_bytes % kMinChunkBytes != 0)
    return corrupt("$.shards[{}].chunk_bytes: found {}, expected a multiple of {} up to {}", index, shard.chunk_bytes,
                   kMinChunkBytes, kMaxChunkBytes);
  const int64_t chunks = (shard.bytes + shard.chunk_bytes - 1) / shard.chunk_bytes;
  if (static_cast<int64_t>(shard.hashes.size()) != chunks)
    return corrupt("$.shards[{}].hashes: found {}, expected {} ({} bytes in chunks of {})", index, shard.hashes.size(),
                   chunks, shard.bytes, shard.chunk_bytes);
  return {};
}

Status check_extents(const Manifest& m) {
  std::vector<size_t> order(m.shards.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const ShardEntry &x = m.shards[a], &y = m.shards[b];
    return x.file != y.file ? x.file < y.file : x.offset < y.offset;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const ShardEntry &before = m.shards[order[i - 1]], &after = m.shards[order[i]];
    if (before.file == after.file && before.offset + before.bytes > after.offset)
      return corrupt("$.shards[{}] and $.shards[{}] overlap in file \"{}\": bytes {}:{} and {}:{}", order[i - 1],
                     order[i], m.files[static_cast<size_t>(before.file)].name, before.offset,
                     before.offset + before.bytes, after.offset, after.offset + after.bytes);
  }
  return {};
}

// Boxes tile the whole exactly when the indicator functions add up to that of the whole; mixed differencing turns an
// indicator into signed points at the box's 2^d corners and is injective, so the tiling holds exactly when the signed
// corners of all boxes minus those of the whole cancel. O(n 2^d log): no pairwise comparison. Own derivation.
struct Corner {
  unsigned __int128 key = 0;  // row-major index among the (shape + 1) corner positions
  int64_t sign = 0;
};

void add_corners(const Box& box, const Shape& shape, int64_t sign, std::vector<Corner>& out) {
  const size_t dims = shape.size();
  for (unsigned mask = 0; mask < (1u << dims); ++mask) {
    Corner corner{0, sign};
    for (size_t d = 0; d < dims; ++d) {
      const bool high = (mask >> d & 1u) != 0;
      corner.key = corner.key * static_cast<unsigned __int128>(shape[d] + 1) +
                   static_cast<unsigned __int128>(high ? box.hi[d] : box.lo[d]);
      if (high) corner.sign = -corner.sign;
    }
    out.push_back(corner);
  }
}

Status check_tiling(const Manifest& m) {
  std::vector<std::vector<int64_t>> shards_of(m.tensors.size());
  for (size_t i = 0; i < m.shards.size(); ++i)
    shards_of[static_cast<size_t>(m.shards[i].tensor)].push_back(static_cast<int64_t>(i));
  std::vector<Corner> corners;
  for (size_t t = 0; t < m.tensors.size(); ++t) {
    const TensorEntry& tensor = m.tensors[t];
    corners.clear();
    int64_t covered = 0;
    for (const int64_t s : shards_of[t]) {
      const ShardEntry& shard = m.shards[static_cast<size_t>(s)];
      add_corners(shard.box, tensor.shape, 1, corners);
      if (__builtin_add_overflow(covered, shard.box.count_elems(), &covered)) covered = INT64_MAX;
    }
    add_corners(Box::whole(tensor.shape), tensor.shape, -1, corners);
    std::sort(corners.begin(), corners.end(), [](const Corner& a, const Corner& b) { return a.key < b.key; });
    for (size_t i = 0; i < corners.size();) {
      int64_t sum = 0;
      const unsigned __int128 key = corners[i].key;
      for (; i < corners.size() && corners[i].key == key; ++i) sum += corners[i].sign;
      if (sum == 0) continue;
      std::vector<int64_t> at(tensor.shape.size());
      unsigned __int128 rest = key;
      for (size_t d = at.size(); d-- > 0;) {
        at[d] = static_cast<int64_t>(rest % static_cast<unsigned __int128>(tensor.shape[d] + 1));
        rest /= static_cast<unsigned __int128>(tensor.shape[d] + 1);
      }
      return corrupt(
          "$.tensors[{}]: the {} shards of {} \"{}\" do not tile its shape {}: they hold {} of {} elements, first "
          "gap or overlap at index {}",
          t, shards_of[t].size(), tensor.kind, tensor.name, to_string(tensor.shape), covered, count_elems(tensor.shape),
          to_string(at));
    }
  }
  return {};
}

}  // namespace

Status validate_manifest(const Manifest& m) {
  const auto check_count = [](const char* path, int64_t value) -> Status {
    if (value < 0) return corrupt("{}: found {}, expected at least 0", path, value);
    return {};
  };
  RT_TRY(check_count("$.step", m.step));
  RT_TRY(check_count("$.samples", m.samples));
  RT_TRY(check_count("$.tokens", m.tokens));
  RT_TRY(check_count("$.created_unix_ms", m.created_unix_ms));
  if (m.step > 999'999'999'999'999) return corrupt("$.step: found {}, expected fewer than 16 digits", m.step);
  RT_TRY(check_count("$.mesh.zero", m.mesh.zero));
  for (const auto& [path, value] : {std::pair{"$.mesh.tp", m.mesh.tp},
                                    {"$.mesh.pp", m.mesh.pp},
                                    {"$.mesh.dp", m.mesh.dp},
                                    {"$.mesh.world", m.mesh.world}}) {
    if (value < 1) return corrupt("{}: found {}, expected at least 1", path, value);
  }
  if (static_cast<int64_t>(m.tensors.size()) > kMaxTensors || static_cast<int64_t>(m.files.size()) > kMaxFiles ||
      static_cast<int64_t>(m.shards.size()) > kMaxShards) {
    return corrupt("{} tensors, {} files, {} shards: more than {}, {} or {}", m.tensors.size(), m.files.size(),
                   m.shards.size(), kMaxTensors, kMaxFiles, kMaxShards);
  }
  std::unordered_set<std::string> seen;
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    RT_TRY(check_tensor(m.tensors[i], i));
    if (!seen.insert(m.tensors[i].kind + "/" + m.tensors[i].name).second)
      return corrupt("$.tensors[{}]: {} \"{}\" is there twice", i, m.tensors[i].kind, m.tensors[i].name);
  }
  seen.clear();
  for (size_t i = 0; i < m.files.size(); ++i) {
    const FileEntry& file = m.files[i];
    if (!safe_name(file.name) || file.name.front() == '.' || !file.name.ends_with(".h5"))
      return corrupt("$.files[{}].name: found \"{}\", expected [A-Za-z0-9_.-], not beginning with a dot, ending in .h5",
                     i, printable(file.name));
    if (!seen.insert(file.name).second) return corrupt("$.files[{}].name: \"{}\" is there twice", i, file.name);
    if (file.size_bytes < 0 || file.size_bytes > kMaxTensorBytes)
      return corrupt("$.files[{}].size_bytes: found {}, expected 0 to {}", i, file.size_bytes, kMaxTensorBytes);
  }
  for (size_t i = 0; i < m.shards.size(); ++i) RT_TRY(check_shard(m, i));
  RT_TRY(check_extents(m));
  return check_tiling(m);
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

}  // namespace cairn::ckpt
