#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace cairn::ckpt {

/// How many payload bytes one checksum of a raw shard stands for, in a save whose requests are of `chunk_bytes`.
///
/// That many, but less where rows are long: who reads some of the columns and verifies them reads each chunk that he
/// touches whole. A row of 32 KiB and more gets 16 checksums, or 8, 4 or 2 so that each stands for whole pages and for
/// least() at least: a half or a quarter of the columns, and mostly an eighth, is then whole chunks and nothing else.
/// With shorter rows leaving out what is not wanted gains nothing (docs/benchmarks.md). A row is what one step in a dim
/// spans; of several dims with long rows the innermost decides, which serves the others.
///
/// least() is 8 KiB, doubled until rows have no more than kMost checksums in the whole save: they are kept in memory by
/// who reads it, and opening it reads them all.
class ChecksumBytes {
 public:
  static constexpr int64_t kMost = int64_t{1} << 22;

  explicit ChecksumBytes(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  /// Counts a shard of the save, the box [lo, hi); of() is asked when all are counted.
  void count(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes);
  int64_t of(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes) const;
  int64_t least() const;

 private:
  static constexpr size_t kLevels = 12;  // least() is 8 KiB << level; at the last level rows are not cut
  size_t level() const;
  int64_t at_level(size_t level, std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes) const;

  int64_t chunk_bytes_;
  std::array<int64_t, kLevels> checksums_{};  // of rows, at each level
};

}  // namespace cairn::ckpt
