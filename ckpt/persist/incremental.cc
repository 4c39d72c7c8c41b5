#include "ckpt/persist/incremental.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>

#include "ckpt/codec/codec.h"
#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"

namespace cairn::ckpt {
namespace {

std::string key_of(const TensorEntry& tensor, const std::vector<int64_t>& lo, const std::vector<int64_t>& hi) {
  return fmt::format("{} {} {} {} {} {}", tensor.kind, tensor.name, dtype_name(tensor.dtype), to_string(tensor.shape),
                     fmt::join(lo, ","), fmt::join(hi, ","));
}

Result<bool> same_bytes(const ShardData& data, const ShardEntry& saved, int64_t elem_bytes, ChunkEncoder& encoder,
                        CodedChunk& coded) {
  if (data.data == nullptr || data.bytes != saved.bytes) return false;
  for (size_t chunk = 0; chunk < saved.hashes.size(); ++chunk) {
    const int64_t at = static_cast<int64_t>(chunk) * saved.chunk_bytes;
    std::span<const std::byte> bytes(data.data + at,
                                     static_cast<size_t>(std::min(saved.chunk_bytes, saved.bytes - at)));
    if (saved.codec != Codec::kRaw) {
      RT_TRY(encoder.encode(bytes, elem_bytes, saved.chunk_bytes, coded));
      if (coded.filter_mask != saved.stored[chunk].filter_mask) return false;
      bytes = coded.bytes;
    }
    if (hash_bytes(bytes) != saved.hashes[chunk]) return false;
  }
  return true;
}

}  // namespace

Result<Unchanged> find_unchanged(const Manifest& skeleton, std::span<const WriterPart> parts,
                                 const SaveOptions& options) {
  Unchanged out;
  if (options.base == nullptr || options.base->step >= skeleton.step) return out;
  const Manifest& base = *options.base;
  std::map<std::string, const ShardEntry*> saved;
  for (const ShardEntry& shard : base.shards)
    saved.emplace(key_of(base.tensors[static_cast<size_t>(shard.tensor)], shard.box.lo, shard.box.hi), &shard);
  std::map<int64_t, int64_t> file_of;  // base's file -> ours
  ChunkEncoder encoder;
  CodedChunk coded;
  int64_t all_bytes = 0;
  for (const WriterPart& part : parts) {
    WriterPart rest{part.file_name, {}};
    for (const ShardData& data : part.shards) {
      all_bytes += data.bytes;
      if (data.tensor < 0 || data.tensor >= static_cast<int64_t>(skeleton.tensors.size()))
        return Unchanged();  // told later
      const TensorEntry& tensor = skeleton.tensors[static_cast<size_t>(data.tensor)];
      const auto found = saved.find(key_of(tensor, data.lo, data.hi));
      bool same = false;
      if (found != saved.end()) {
        RT_TRY_SET(same, same_bytes(data, *found->second, dtype_size_bytes(tensor.dtype), encoder, coded));
      }
      if (!same) {
        rest.shards.push_back(data);
        continue;
      }
      ShardEntry shard = *found->second;
      const auto [file, added] = file_of.emplace(shard.file, static_cast<int64_t>(out.files.size()));
      if (added) {
        out.files.push_back(base.files[static_cast<size_t>(shard.file)]);
        if (out.files.back().step < 0) out.files.back().step = base.step;
      }
      shard.file = file->second;
      shard.tensor = data.tensor;
      out.bytes += shard.bytes;
      out.shards.push_back(std::move(shard));
    }
    if (!rest.shards.empty()) out.rest.push_back(std::move(rest));
  }
  if (static_cast<double>(out.bytes) < options.base_min_share * static_cast<double>(all_bytes)) return Unchanged();
  return out;
}

Result<bool> all_there(IoBackend& io, const std::filesystem::path& dir, std::span<const FileEntry> files) {
  for (const FileEntry& file : files) {
    const Result<FileStat> stat = io.stat(checkpoint_file_path(dir, file.step, file.name));
    if (!stat.ok() && !is_not_found(stat.error())) return stat.error();
    if (!stat.ok() || stat.value().size_bytes != file.size_bytes) return false;
  }
  return true;
}

}  // namespace cairn::ckpt
