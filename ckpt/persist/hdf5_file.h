#pragma once
// The HDF5 structure of a shard file: one contiguous dataset per shard at /<kind>/<tensor name>/<lo0_lo1...>.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/vfd.h"

namespace cairn::ckpt {

/// "/weight/layers.0.attn.q.weight/0_64"; a tensor without dims has "scalar" as last part.
std::string dataset_path(const TensorEntry& tensor, const Box& box);

/// Lays out one file: construct, place() every shard, hand in its hashes, finish(), take_image().
class Hdf5Writer {
 public:
  /// `shard_count` sizes the metadata blocks.
  static Result<std::unique_ptr<Hdf5Writer>> create(int64_t step, int64_t shard_count);
  ~Hdf5Writer();

  /// Makes the dataset and its attributes; returns the byte offset of its data. Datasets of 4096 bytes and more begin
  /// at multiples of 4096.
  Result<int64_t> place(const TensorEntry& tensor, const Box& box);
  /// The same for a coded shard, in chunks of these extents with the filters shuffle and zstd. Its chunks have no place
  /// before place_chunk().
  Status place_coded(const TensorEntry& tensor, const Box& box, std::span<const int64_t> chunk);
  /// Room for the stored bytes of one chunk of the i-th placed shard; its first element is at `corner`, counted from
  /// the box's own. HDF5 notes size and mask; the bytes are not kept, the caller writes them to the offset that is
  /// returned. Chunks of 4096 bytes and more begin at multiples of 4096.
  Result<int64_t> place_chunk(int64_t index, std::span<const int64_t> corner, std::span<const std::byte> stored,
                              uint32_t filter_mask);
  /// Small payload that lies between HDF5's own bytes: pages of the image.
  Hdf5Image& image();
  /// Where the object headers of the placed datasets lie, in order, and that of the root group. Before set_hashes().
  Result<std::vector<int64_t>> header_addresses();
  /// Chunk hashes of the i-th placed shard, as attributes.
  Status set_hashes(int64_t index, int64_t chunk_bytes, std::span<const uint64_t> hashes);
  /// Closes the HDF5 file. Afterwards the image is final and its eoa is the file's size.
  Status finish();
  /// After finish(), once.
  std::unique_ptr<Hdf5Image> take_image();

 private:
  struct Impl;
  explicit Hdf5Writer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct Hdf5Dataset {
  int64_t offset = -1, bytes = -1;  // -1: chunked, and `bytes` is what its chunks take
  std::vector<StoredChunk> chunks;  // of a chunked one, in row-major order; empty when there are more than 4096
  /// Whether the manifest says the same.
  bool fits(const ShardEntry& shard) const;
};

/// Looks up datasets by path in a file, through libhdf5. Give it only bytes whose checksum held: libhdf5 is not made
/// for hostile files. Errors: kCorrupt when the file or a dataset does not open.
Result<std::vector<Hdf5Dataset>> find_datasets(IoFile& file, std::span<const std::string> paths);

}  // namespace cairn::ckpt
