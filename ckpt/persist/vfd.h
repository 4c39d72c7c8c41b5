#pragma once
// HDF5's view of a shard file: a virtual file driver (H5FD_class_t) over pages in memory. HDF5 itself does no I/O.
//
// Writing: libhdf5 lays out the file and writes its metadata into the image; payload never passes through HDF5, it goes
// from the caller's memory to the offsets that HDF5 gave. Afterwards part_writer.cc writes the image's pages, the one
// with the superblock last, so that a file whose writer died does not open. Only whole pages leave here, so no padding
// ever lies on top of a neighbour. Reading (verify): pages come from an IoFile when libhdf5 asks for them.
//
// Threads: libhdf5 is not thread safe; whoever calls it, anywhere in the process, holds hdf5_mutex().

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "ckpt/store/io_backend.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

std::recursive_mutex& hdf5_mutex();

class Hdf5Image {
 public:
  using Page = std::array<std::byte, kIoAlign>;

  Hdf5Image() = default;
  /// For reading a file of `size_bytes`; `source` outlives the image.
  Hdf5Image(IoFile& source, int64_t size_bytes) : eof(size_bytes), source_(&source) {}
  Hdf5Image(const Hdf5Image&) = delete;

  void put(int64_t offset, std::span<const std::byte> bytes);
  /// Makes the pages of these bytes, zero where nothing was put.
  void touch(int64_t offset, int64_t bytes);
  /// Bytes that were never put are zero. Errors: only when reading a file.
  Status get(int64_t offset, std::span<std::byte> bytes);

  const std::map<int64_t, std::unique_ptr<Page>>& pages() const { return pages_; }  // by page number

  int64_t eoa = 0;  // end of what HDF5 has allocated; the file's size when it is closed
  int64_t eof = 0;
  bool divert_payload = false;  // a write of raw data is not kept: only noted where it would go
  int64_t diverted_at = -1;
  std::optional<Error> error;  // the first failed read: a callback can only say "failed"

 private:
  Result<Page*> page(int64_t number);
  std::map<int64_t, std::unique_ptr<Page>> pages_;
  IoFile* source_ = nullptr;
};

/// A file access property list (hid_t, the caller closes it) whose files are this image: driver, V110 format bounds
/// (every metadata block has HDF5's own checksum), 4096 alignment, `meta_block_bytes` as metadata block size.
/// Negative on failure. The caller holds hdf5_mutex().
int64_t make_image_access(Hdf5Image& image, int64_t meta_block_bytes);

}  // namespace cairn::ckpt
