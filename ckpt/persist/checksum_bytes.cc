#include "ckpt/persist/checksum_bytes.h"

#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {

int64_t checksum_bytes(std::span<const int64_t> lo, std::span<const int64_t> hi, int64_t elem_bytes,
                       int64_t chunk_bytes) {
  constexpr int64_t kLongRowBytes = int64_t{64} << 10;
  constexpr int64_t kLeastBytes = int64_t{16} << 10;
  int64_t row_bytes = elem_bytes, rows = 1;
  auto dim = std::ssize(lo) - 1;
  for (; dim >= 1 && row_bytes < kLongRowBytes; --dim) row_bytes *= hi[dim] - lo[dim];
  for (; dim >= 0; --dim) rows *= hi[dim] - lo[dim];
  if (row_bytes < kLongRowBytes || rows == 1) return chunk_bytes;  // of one row every part is in one piece

  for (const int64_t parts : {16, 8, 4, 2}) {
    int64_t part = row_bytes / parts;
    if (row_bytes % parts != 0 || part % kIoAlign != 0 || part < kLeastBytes) continue;
    while (part > chunk_bytes && part % (2 * kIoAlign) == 0) part /= 2;
    if (part <= chunk_bytes) return part;
  }
  return chunk_bytes;
}

}  // namespace cairn::ckpt
