#include "ckpt/snapshot/snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "ckpt/format/checksum.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt {
namespace {

Error damaged(int64_t rank, int64_t slot, std::string_view what) {
  return Error{ErrorCode::kCorrupt, fmt::format("snapshot of rank {}, slot {}: {}", rank, slot, what)};
}

struct HeadFields {
  uint64_t incarnation;
  int64_t step, position_bytes, shards, pause_ns;
};

uint64_t hash_head(const HeadFields& fields, std::span<const char> position, std::span<const uint64_t> sums) {
  StreamingHash hash;
  hash.update(std::as_bytes(std::span(&fields, 1)));
  hash.update(std::as_bytes(position));
  hash.update(std::as_bytes(sums));
  return hash.digest();
}

/// Odd: nobody sees new content under the old number. The full fence also orders stores past the caches.
template <typename Header>
void mark_begun(Header& header, uint64_t incarnation, int64_t step) {
  header.sequence.store((header.sequence.load(std::memory_order_relaxed) + 1) | 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  header.incarnation.store(incarnation, std::memory_order_relaxed);
  header.step.store(step, std::memory_order_relaxed);
}

/// Even: whole.
template <typename Header>
void mark_whole(Header& header) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  header.sequence.store((header.sequence.load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
}

}  // namespace

void SnapshotWriter::begin(int64_t slot, uint64_t incarnation, int64_t step) {
  mark_begun(arena_.weights_mark(rank_), incarnation, step);
  mark_begun(arena_.slot_header(rank_, slot), incarnation, step);
}

Status SnapshotWriter::publish(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                               std::span<const uint64_t> sums, int64_t pause_ns) {
  RT_TRY(fill_header(slot, incarnation, step, position, sums, pause_ns));
  mark_whole(arena_.slot_header(rank_, slot));
  return {};
}

void SnapshotWriter::weights_whole(uint64_t incarnation, int64_t step) {
  arena::WeightsMark& weights = arena_.weights_mark(rank_);
  weights.incarnation.store(incarnation, std::memory_order_relaxed);
  weights.step.store(step, std::memory_order_relaxed);
  mark_whole(weights);
}

Status SnapshotWriter::fill_header(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                                   std::span<const uint64_t> sums, int64_t pause_ns) {
  const auto area = arena_.sum_area(rank_, slot);
  if (sums.size() != area.size()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("rank {}: checksums of {} boxes, the layout has {}", rank_, sums.size(), area.size())};
  }
  if (static_cast<int64_t>(position.size()) > kPositionCapacity) {
    return Error{ErrorCode::kInvalidInput, fmt::format("the training position has {} bytes, a snapshot holds {}",
                                                       position.size(), kPositionCapacity)};
  }
  arena::SlotHeader& header = arena_.slot_header(rank_, slot);
  const auto text = arena_.position_area(rank_, slot).first(position.size());
  std::memcpy(text.data(), position.data(), position.size());
  std::copy(sums.begin(), sums.end(), area.begin());
  header.incarnation.store(incarnation, std::memory_order_relaxed);
  header.step.store(step, std::memory_order_relaxed);
  header.position_bytes = static_cast<int64_t>(position.size());
  header.shards = static_cast<int64_t>(area.size());
  header.pause_ns = pause_ns;
  header.head_hash = hash_head({incarnation, step, header.position_bytes, header.shards, pause_ns}, text, area);
  return {};
}

Status SnapshotWriter::seal(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position) {
  begin(slot, incarnation, step);  // the weights stay odd: they are not of this step
  std::vector<uint64_t> sums;
  const std::byte* area = arena_.payload(rank_, slot).data();
  for (const arena::ShardExtent& shard : arena_.shards(rank_))
    sums.push_back(word_sums(area + shard.offset, shard.bytes / 4));
  RT_TRY(fill_header(slot, incarnation, step, position, sums, 0));
  mark_whole(arena_.slot_header(rank_, slot));
  return {};
}

Result<RankSnapshot> read_slot(const Arena& arena, int64_t rank, int64_t slot, Check check) {
  const arena::SlotHeader& header = arena.slot_header(rank, slot);
  const uint64_t sequence = header.sequence.load(std::memory_order_acquire);
  if (sequence == 0) return damaged(rank, slot, "empty");
  if (sequence % 2 != 0) return damaged(rank, slot, "half written");
  const HeadFields head{header.incarnation.load(std::memory_order_relaxed), header.step.load(std::memory_order_relaxed),
                        header.position_bytes, header.shards, header.pause_ns};
  if (head.position_bytes < 0 || head.position_bytes > kPositionCapacity) {
    return damaged(rank, slot,
                   fmt::format("position of {} bytes, at most {} fit", head.position_bytes, kPositionCapacity));
  }
  const auto shards = arena.shards(rank);
  if (head.shards != std::ssize(shards)) {
    return damaged(rank, slot, fmt::format("checksums of {} shards, the layout has {}", head.shards, shards.size()));
  }
  RankSnapshot out{head.incarnation,
                   head.step,
                   std::string(arena.position_area(rank, slot).data(), head.position_bytes),
                   {},
                   head.pause_ns};
  const auto stored = arena.sum_area(rank, slot);
  out.sums.assign(stored.begin(), stored.end());
  if (hash_head(head, out.position, out.sums) != header.head_hash) {
    return damaged(rank, slot, "the header's checksum does not hold");
  }
  if (check == Check::kHeaders) return out;
  const auto area = arena.payload(rank, slot);
  for (size_t k = 0; k < shards.size(); ++k) {
    const uint64_t sums = word_sums(area.data() + shards[k].offset, shards[k].bytes / 4);
    if (sums != out.sums[k]) {
      return damaged(
          rank, slot,
          fmt::format("step {}, shard {}, bytes [{}, {}): checksum {}, stored {}", out.step, k, shards[k].offset,
                      shards[k].offset + shards[k].bytes, hash_to_hex(sums), hash_to_hex(out.sums[k])));
    }
  }
  return out;
}

Result<CommonSnapshot> read_common(const Arena& arena, int64_t slot, Check check) {
  CommonSnapshot out{.slot = slot};
  const RankRange ranks = arena.ranks();
  for (int64_t rank = ranks.first; rank < ranks.end; ++rank) {
    RT_TRY_SET(RankSnapshot mine, read_slot(arena, rank, slot, check));
    if (rank == ranks.first) {
      out.incarnation = mine.incarnation;
      out.step = mine.step;
      out.position = mine.position;
    } else if (mine.incarnation != out.incarnation || mine.step != out.step || mine.position != out.position) {
      return damaged(
          rank, slot,
          fmt::format("step {} (incarnation {}), rank {} has step {} (incarnation {}){}", mine.step, mine.incarnation,
                      ranks.first, out.step, out.incarnation, mine.step == out.step ? " or another position" : ""));
    }
    out.ranks.push_back(std::move(mine));
  }
  return out;
}

std::optional<CommonSnapshot> newest_verified(const Arena& arena, Check check, std::vector<std::string>* problems,
                                              std::vector<int64_t>* damaged, const std::vector<WholeSlot>* among) {
  std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; among != nullptr && slot < std::ssize(views); ++slot) {
    const WholeSlot here{slot, views[slot].incarnation, views[slot].step};
    if (std::ranges::find(*among, here) == among->end()) views[slot].whole = false;
  }
  while (const std::optional<int64_t> slot = newest_whole(views)) {
    Result<CommonSnapshot> found = read_common(arena, *slot, check);
    if (found.ok()) return std::move(found).value();
    if (problems != nullptr) problems->push_back(found.error().message);
    if (damaged != nullptr) damaged->push_back(*slot);
    views[*slot].whole = false;
  }
  return std::nullopt;
}

std::vector<WholeSlot> all_verified(const Arena& arena, Check check, std::vector<std::string>* problems,
                                    std::vector<int64_t>* damaged) {
  std::vector<WholeSlot> out;
  const std::vector<SlotView> views = arena.views();
  for (int64_t slot = 0; slot < std::ssize(views); ++slot) {
    if (!views[slot].whole) continue;
    const Result<CommonSnapshot> found = read_common(arena, slot, check);
    if (found.ok()) {
      out.push_back({slot, found.value().incarnation, found.value().step});
    } else {
      if (problems != nullptr) problems->push_back(found.error().message);
      if (damaged != nullptr) damaged->push_back(slot);
    }
  }
  return out;
}

}  // namespace cairn::ckpt
