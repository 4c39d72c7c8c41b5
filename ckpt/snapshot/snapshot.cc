#include "ckpt/snapshot/snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ckpt/format/checksum.h"

namespace cairn::ckpt {
namespace {

// Copy and hash go block by block, so that the hash reads what the copy left in the second-level cache.
constexpr int64_t kBlockBytes = 128 << 10;

Error damaged(int64_t rank, int64_t slot, std::string_view what) {
  return Error{ErrorCode::kCorrupt, fmt::format("snapshot of rank {}, slot {}: {}", rank, slot, what)};
}

struct HeadFields {
  uint64_t incarnation;
  int64_t step, position_bytes, chunks, copy_ns;
};

uint64_t hash_head(const HeadFields& fields, std::span<const char> position, std::span<const uint64_t> hashes) {
  StreamingHash hash;
  hash.update(std::as_bytes(std::span(&fields, 1)));
  hash.update(std::as_bytes(position));
  hash.update(std::as_bytes(hashes));
  return hash.digest();
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Result<int64_t> SnapshotWriter::write(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position,
                                      std::span<const std::span<const std::byte>> sources) {
  const auto shards = arena_.shards(rank_);
  if (sources.size() != shards.size()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("rank {}: {} boxes to snapshot, the layout has {}", rank_, sources.size(), shards.size())};
  }
  for (size_t k = 0; k < shards.size(); ++k) {
    if (static_cast<int64_t>(sources[k].size()) != shards[k].bytes) {
      return Error{ErrorCode::kInvalidInput, fmt::format("rank {}: box {} has {} bytes, the layout says {}", rank_, k,
                                                         sources[k].size(), shards[k].bytes)};
    }
  }
  if (static_cast<int64_t>(position.size()) > kPositionCapacity) {
    return Error{ErrorCode::kInvalidInput, fmt::format("the training position has {} bytes, a snapshot holds {}",
                                                       position.size(), kPositionCapacity)};
  }

  const int64_t begin_ns = now_ns();
  arena::SlotHeader& header = arena_.slot_header(rank_, slot);
  const uint64_t writing = (header.sequence.load(std::memory_order_relaxed) + 1) | 1;
  header.sequence.store(writing, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // nobody sees new content under the old number
  header.incarnation.store(incarnation, std::memory_order_relaxed);
  header.step.store(step, std::memory_order_relaxed);

  const auto area = arena_.payload(rank_, slot);
  const auto hashes = arena_.hash_area(rank_, slot);
  const int64_t chunk_bytes = arena_.chunk_bytes();
  size_t chunk = 0;
  for (size_t k = 0; k < shards.size(); ++k) {
    const std::byte* source = sources[k].data();
    std::byte* target = area.data() + shards[k].offset;
    for (int64_t at = 0; at < shards[k].bytes; at += chunk_bytes) {
      const int64_t size = std::min(chunk_bytes, shards[k].bytes - at);
      if (size <= kBlockBytes || source == target) {
        if (source != target) std::memcpy(target + at, source + at, size);
        hashes[chunk++] = hash_bytes(std::span<const std::byte>(source + at, size));
        continue;
      }
      StreamingHash hash;
      for (int64_t block = 0; block < size; block += kBlockBytes) {
        const int64_t length = std::min(kBlockBytes, size - block);
        std::memcpy(target + at + block, source + at + block, length);
        hash.update({source + at + block, static_cast<size_t>(length)});
      }
      hashes[chunk++] = hash.digest();
    }
  }
  const auto text = arena_.position_area(rank_, slot).first(position.size());
  std::memcpy(text.data(), position.data(), position.size());
  header.position_bytes = static_cast<int64_t>(position.size());
  header.chunks = static_cast<int64_t>(hashes.size());
  header.copy_ns = now_ns() - begin_ns;
  header.head_hash = hash_head({incarnation, step, header.position_bytes, header.chunks, header.copy_ns}, text, hashes);
  header.sequence.store(writing + 1, std::memory_order_release);
  return header.copy_ns;
}

Status SnapshotWriter::seal(int64_t slot, uint64_t incarnation, int64_t step, std::string_view position) {
  const auto area = arena_.payload(rank_, slot);
  std::vector<std::span<const std::byte>> in_place;
  for (const arena::ShardExtent& shard : arena_.shards(rank_))
    in_place.emplace_back(area.data() + shard.offset, static_cast<size_t>(shard.bytes));
  RT_TRY(write(slot, incarnation, step, position, in_place));
  return {};
}

Result<RankSnapshot> read_slot(const Arena& arena, int64_t rank, int64_t slot, bool payload_too) {
  const arena::SlotHeader& header = arena.slot_header(rank, slot);
  const uint64_t sequence = header.sequence.load(std::memory_order_acquire);
  if (sequence == 0) return damaged(rank, slot, "empty");
  if (sequence % 2 != 0) return damaged(rank, slot, "half written");
  const HeadFields head{header.incarnation.load(std::memory_order_relaxed), header.step.load(std::memory_order_relaxed),
                        header.position_bytes, header.chunks, header.copy_ns};
  if (head.position_bytes < 0 || head.position_bytes > kPositionCapacity) {
    return damaged(rank, slot,
                   fmt::format("position of {} bytes, at most {} fit", head.position_bytes, kPositionCapacity));
  }
  if (head.chunks != arena.chunks(rank)) {
    return damaged(rank, slot, fmt::format("{} chunk hashes, the layout has {}", head.chunks, arena.chunks(rank)));
  }
  RankSnapshot out{head.incarnation,
                   head.step,
                   std::string(arena.position_area(rank, slot).data(), head.position_bytes),
                   {},
                   head.copy_ns};
  const auto stored = arena.hash_area(rank, slot);
  out.hashes.assign(stored.begin(), stored.end());
  if (hash_head(head, out.position, out.hashes) != header.head_hash) {
    return damaged(rank, slot, "the header's checksum does not hold");
  }
  if (!payload_too) return out;
  const auto area = arena.payload(rank, slot);
  size_t chunk = 0;
  for (const arena::ShardExtent& shard : arena.shards(rank)) {
    for (int64_t at = 0; at < shard.bytes; at += arena.chunk_bytes(), ++chunk) {
      const int64_t size = std::min(arena.chunk_bytes(), shard.bytes - at);
      const uint64_t hash = hash_bytes(std::span<const std::byte>(area.data() + shard.offset + at, size));
      if (hash != out.hashes[chunk]) {
        return damaged(rank, slot,
                       fmt::format("step {}, bytes [{}, {}): checksum {}, stored {}", out.step, shard.offset + at,
                                   shard.offset + at + size, hash_to_hex(hash), hash_to_hex(out.hashes[chunk])));
      }
    }
  }
  return out;
}

Result<CommonSnapshot> read_common(const Arena& arena, int64_t slot, bool payload_too) {
  CommonSnapshot out{.slot = slot};
  for (int64_t rank = 0; rank < arena.world(); ++rank) {
    RT_TRY_SET(RankSnapshot mine, read_slot(arena, rank, slot, payload_too));
    if (rank == 0) {
      out.incarnation = mine.incarnation;
      out.step = mine.step;
      out.position = mine.position;
    } else if (mine.incarnation != out.incarnation || mine.step != out.step || mine.position != out.position) {
      return damaged(
          rank, slot,
          fmt::format("step {} (incarnation {}), rank 0 has step {} (incarnation {}){}", mine.step, mine.incarnation,
                      out.step, out.incarnation, mine.step == out.step ? " or another position" : ""));
    }
    out.ranks.push_back(std::move(mine));
  }
  return out;
}

std::optional<CommonSnapshot> newest_verified(const Arena& arena, std::vector<std::string>* problems) {
  std::vector<SlotView> views = arena.views();
  while (const std::optional<int64_t> slot = newest_whole(views)) {
    Result<CommonSnapshot> found = read_common(arena, *slot, true);
    if (found.ok()) return std::move(found).value();
    if (problems != nullptr) problems->push_back(found.error().message);
    views[*slot].whole = false;
  }
  return std::nullopt;
}

}  // namespace cairn::ckpt
