#pragma once
// How a chunk of a coded shard becomes smaller and whole again: its byte planes are split (HDF5's shuffle filter), then
// one zstd frame (HDF5 filter 32015). Bytes to bytes; no I/O.
//
// Of trained numbers only the exponents say less than they could; there is nothing to match. So zstd is told to look
// for no matches and only to Huffman-code (bench/compress.py measures it: its level 1's ratio within 2 %, at about
// twice the speed). What comes out is an ordinary frame. The same chunk gives the same bytes with the same zstd.
//
// Threads: an encoder or decoder belongs to one thread.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::ckpt {

/// HDF5's shuffle: the first byte of every element, then the second of every element ... A size that is no multiple
/// of `elem_bytes` keeps its last bytes as they are. `to` is as large as `from` and does not overlap it.
void split_planes(std::span<const std::byte> from, int64_t elem_bytes, std::span<std::byte> to);
void join_planes(std::span<const std::byte> from, int64_t elem_bytes, std::span<std::byte> to);

// Bits of a filter mask: which filter of the pipeline shuffle, zstd was not applied.
inline constexpr uint32_t kNotShuffled = 1, kNotCompressed = 2;

/// What a chunk is stored as.
struct CodedChunk {
  std::vector<std::byte> bytes;
  uint32_t filter_mask = 0;
};

/// What zstd looks for. The default is what saves use; the others are for comparing.
enum class Effort { kHuffman, kLevel1, kLevel3 };

class ChunkEncoder {
 public:
  explicit ChunkEncoder(Effort effort = Effort::kHuffman);
  ~ChunkEncoder();
  ChunkEncoder(ChunkEncoder&&) noexcept;
  ChunkEncoder& operator=(ChunkEncoder&&) noexcept;

  /// `payload`: at most chunk_bytes; the rest of the chunk is zeros. What would not get smaller is stored as it is,
  /// with both bits of the mask set: a stored chunk is never larger than chunk_bytes. `out` keeps its memory between
  /// calls. Errors: kUnavailable when zstd gets no memory.
  Status encode(std::span<const std::byte> payload, int64_t elem_bytes, int64_t chunk_bytes, CodedChunk& out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(ChunkDecoder&&) noexcept;
  ChunkDecoder& operator=(ChunkDecoder&&) noexcept;

  /// Undoes `stored` to exactly chunk.size() bytes. Whatever the bytes, nothing is read or written beyond the two spans
  /// and no more memory than the chunk's size is taken. On error the contents of `chunk` are unspecified.
  /// Errors: kCorrupt (found and expected), kUnsupported for bits of the mask that are none of ours.
  Status decode(std::span<const std::byte> stored, uint32_t filter_mask, int64_t elem_bytes,
                std::span<std::byte> chunk);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::ckpt
