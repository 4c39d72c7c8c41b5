#include "ckpt/persist/checksum_bytes.h"

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kLongRowBytes = int64_t{32} << 10;
constexpr int64_t kLeastBytes = int64_t{8} << 10;

}  // namespace

void ChecksumBytes::count(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes) {
  for (size_t level = 0; level < kLevels; ++level) {
    const int64_t part = at_level(level, lo, hi, elem_bytes);
    if (part == chunk_bytes_) break;  // and at each level behind
    int64_t bytes = elem_bytes;
    for (size_t dim = 0; dim < lo.size(); ++dim) bytes *= hi[dim] - lo[dim];
    checksums_[level] += bytes / part;
  }
}

int64_t ChecksumBytes::of(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes) const {
  return at_level(level(), lo, hi, elem_bytes);
}

int64_t ChecksumBytes::least() const { return kLeastBytes << level(); }

size_t ChecksumBytes::level() const {
  size_t level = 0;
  while (checksums_[level] > kMost) ++level;  // the last level has none
  return level;
}

int64_t ChecksumBytes::at_level(size_t level, std::span<const int64_t> lo, std::span<const int64_t> hi,
                                int64_t elem_bytes) const {
  if (level == kLevels - 1 || lo.size() != hi.size()) return chunk_bytes_;
  int64_t row_bytes = elem_bytes, rows = 1;
  auto dim = std::ssize(lo) - 1;
  for (; dim >= 1 && row_bytes < kLongRowBytes; --dim) row_bytes *= hi[dim] - lo[dim];
  for (; dim >= 0; --dim) rows *= hi[dim] - lo[dim];
  if (row_bytes < kLongRowBytes || rows == 1) return chunk_bytes_;  // of one row every part is in one piece

  for (const int64_t parts : {16, 8, 4, 2}) {
    int64_t part = row_bytes / parts;
    if (row_bytes % parts != 0 || part % kIoAlign != 0 || part < kLeastBytes << level) continue;
    while (part > chunk_bytes_ && part % (2 * kIoAlign) == 0) part /= 2;
    if (part <= chunk_bytes_) return part;
  }
  return chunk_bytes_;
}

}  // namespace cairn::ckpt
