#pragma once
// A snapshot of memory that lies elsewhere, as one rank would leave it.

#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "ckpt/snapshot/snapshot.h"
#include "runtime/core/word_sums.h"

namespace cairn::ckpt::testing {

/// Copies `sources`, the memory of each shard of the rank, into the slot and publishes it.
inline Status write_snapshot(const Arena& arena, int64_t rank, int64_t slot, uint64_t incarnation, int64_t step,
                             std::string_view position, std::span<const std::span<const std::byte>> sources) {
  const auto shards = arena.shards(rank);
  RT_CHECK(sources.size() == shards.size(), "{} boxes, the layout has {}", sources.size(), shards.size());
  SnapshotWriter writer(arena, rank);
  writer.begin(slot, incarnation, step);
  std::vector<uint64_t> sums;
  for (size_t k = 0; k < shards.size(); ++k) {
    RT_CHECK(std::ssize(sources[k]) == shards[k].bytes, "{} bytes, the layout has {}", sources[k].size(),
             shards[k].bytes);
    std::memcpy(arena.payload(rank, slot).data() + shards[k].offset, sources[k].data(), sources[k].size());
    sums.push_back(word_sums(sources[k].data(), shards[k].bytes / 4));
  }
  return writer.publish(slot, incarnation, step, position, sums, 0);
}

}  // namespace cairn::ckpt::testing
