#include "ckpt/slot_source.h"

#include <cstddef>

#include "ckpt/format/names.h"
#include "ckpt/persist/checksum_bytes.h"

namespace cairn::ckpt {

std::span<const WriterPart> SlotSource::parts(int64_t slot, std::span<const RankSnapshot> ranks) {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const std::byte* const from = arena_.payload(ranks_[p], slot_).data();
    const std::byte* const to = arena_.payload(ranks_[p], slot).data();
    for (size_t i = 0; i < parts_[p].shards.size(); ++i) {
      ShardData& shard = parts_[p].shards[i];
      shard.data = to + (shard.data - from);
      shard.word_sums = ranks.empty() ? std::nullopt : std::optional(ranks[ranks_[p] - arena_.ranks().first].sums[i]);
    }
  }
  slot_ = slot;
  return parts_;
}

Status SlotSource::read_directory() {
  if (skeleton_) return {};
  parts_.clear();
  ranks_.clear();
  checksum_bytes_.reset();
  slot_ = 0;
  RT_TRY_SET(Manifest manifest, decode_manifest(arena_.directory()));
  const std::vector<int64_t> rank_of_file = arena_.rank_of_file();
  if (rank_of_file.size() != manifest.files.size())
    return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit"};
  std::vector<WriterPart*> part_of_file(manifest.files.size());
  parts_.reserve(manifest.files.size());
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    if (!arena_.ranks().contains(rank_of_file[f])) continue;
    part_of_file[f] = &parts_.emplace_back(manifest.files[f].name);
    ranks_.push_back(rank_of_file[f]);
  }
  if (!arena_.has_world()) checksum_bytes_.emplace(arena_.chunk_bytes());
  for (const ShardEntry& shard : manifest.shards) {  // per file in the order of the slot
    if (checksum_bytes_)
      checksum_bytes_->count(shard.box.lo, shard.box.hi, dtype_size_bytes(manifest.tensors[shard.tensor].dtype));
    WriterPart* const part = part_of_file[shard.file];
    if (part == nullptr) continue;
    const auto payload = arena_.payload(rank_of_file[shard.file], slot_);
    const auto extents = arena_.shards(rank_of_file[shard.file]);
    const size_t place = part->shards.size();
    if (shard.offset + shard.bytes > static_cast<int64_t>(payload.size()) || place >= extents.size() ||
        extents[place].offset != shard.offset || extents[place].bytes != shard.bytes) {
      return Error{ErrorCode::kCorrupt, "the snapshot's directory does not fit its slots"};
    }
    part->shards.push_back({.tensor = shard.tensor,
                            .lo = shard.box.lo,
                            .hi = shard.box.hi,
                            .data = payload.data() + shard.offset,
                            .bytes = shard.bytes,
                            .finite = manifest.tensors[shard.tensor].kind == kWeightKind});
  }
  manifest.files.clear();
  manifest.shards.clear();
  skeleton_ = std::move(manifest);
  return {};
}

}  // namespace cairn::ckpt
