#pragma once
// Tables of runs of state that one launch goes through, a block for each chunk of a run. A run has `count` elements and
// `first_chunk`, its first of all runs' chunks, one run after the other.

#include <cstdint>
#include <span>

namespace cairn::kernels::cuda {

constexpr int64_t kChunk = 16384;  // elements of a run that a block has

/// The runs lie on the device.
template <typename Run>
struct RunTable {
  const Run* runs = nullptr;
  int64_t run_count = 0, chunks = 0;

  /// Fills first_chunk; returns the number of chunks.
  static int64_t number_chunks(std::span<Run> runs) {
    int64_t chunks = 0;
    for (Run& run : runs) {
      run.first_chunk = static_cast<uint32_t>(chunks);
      chunks += (run.count + kChunk - 1) / kChunk;
    }
    return chunks;
  }
};

}  // namespace cairn::kernels::cuda
