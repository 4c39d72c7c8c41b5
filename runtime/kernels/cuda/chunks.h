#pragma once
// Work over many runs of elements in one launch: a run is cut into chunks, and a block has one. The tables are made
// once from the plan, and lie on the device.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace cairn::kernels::cuda {

constexpr int64_t kChunk = 16384;  // elements

struct Chunk {
  int32_t run = 0;
  int32_t number = 0;  // within the run
};

/// For runs of `counts` elements, one run after the other.
inline std::vector<Chunk> chunks_of(std::span<const int64_t> counts) {
  std::vector<Chunk> out;
  for (size_t run = 0; run < counts.size(); ++run) {
    for (int64_t k = 0; k * kChunk < counts[run]; ++k) {
      out.push_back({static_cast<int32_t>(run), static_cast<int32_t>(k)});
    }
  }
  return out;
}

/// Where the chunks of each group of runs begin, and the end: groups[run] ascending from 0 to `count` - 1.
inline std::vector<int32_t> chunk_begins(std::span<const Chunk> chunks, std::span<const int32_t> groups,
                                         int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count + 1), 0);
  for (const Chunk& chunk : chunks) ++out[static_cast<size_t>(groups[static_cast<size_t>(chunk.run)] + 1)];
  for (size_t group = 1; group < out.size(); ++group) out[group] += out[group - 1];
  return out;
}

}  // namespace cairn::kernels::cuda
