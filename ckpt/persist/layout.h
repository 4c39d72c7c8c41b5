#pragma once
// The HDF5 structure of one shard file: complete in memory before any payload is written, and kept between saves.
//
// libhdf5 takes some 0.1 ms a dataset, and the structure of a run's files is the same at every save, except for the
// step and the chunk hashes. So libhdf5 makes it once, with made-up hashes, and a save puts its numbers in. The place
// of each hash array and of its block's checksum comes from the object headers that libhdf5 wrote; an array too large
// for one is found by its bytes. The result is byte for byte what libhdf5 would have written
// (tests/ckpt/persist/layout_test.cc). A layout in which something was not found says so; libhdf5 then makes it again
// with the true numbers.
//
// Threads: libhdf5 is serialised inside; otherwise a layout belongs to the save that uses it.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/persist/buffer.h"
#include "ckpt/persist/vfd.h"
#include "runtime/core/result.h"

namespace cairn::ckpt {

class FileLayout {
 public:
  /// Structure of a file that holds these shards, in this order, with hash arrays of the right lengths. The hashes in
  /// `shards` are not looked at.
  static Result<std::unique_ptr<FileLayout>> make(const Manifest& manifest, std::span<const ShardEntry> shards);
  const std::string& key() const { return key_; }  // of all in the structure that does not change from save to save

  int64_t size_bytes() const { return image_->eoa; }
  const std::vector<int64_t>& offsets() const { return offsets_; }  // of each shard's payload
  /// HDF5's own structure, or a shard too small to be aligned, lies in this page: it is written from image().
  bool has_page(int64_t number) const { return image_->pages().contains(number); }
  /// The first such page from this one on; beyond the file when there is none.
  int64_t next_page(int64_t number) const {
    const auto it = image_->pages().lower_bound(number);
    return it == image_->pages().end() ? kMaxTensorBytes / kIoAlign : it->first;
  }
  bool patchable() const { return patchable_; }
  int64_t memory_bytes() const;

  /// The step and the shards' hashes, as libhdf5 writes them. Payload that was put into image() before may be gone.
  Status fill_in(const Manifest& manifest, std::span<const ShardEntry> shards);

  /// After fill_in(); payload that shares pages with the structure is put here before it is written.
  Hdf5Image& image() { return *image_; }

 private:
  // File bytes [begin, end) of one checksummed block of an object header; the checksum is its last four bytes.
  struct Block {
    int64_t begin = 0, end = 0;
  };
  struct Patch {
    int64_t offset = 0, bytes = 0;  // of the attribute's value
    Block block;                    // that it lies in; empty: none, it is a huge object of a heap
  };
  Status build(const Manifest& manifest, std::span<const ShardEntry> shards);
  std::optional<Patch> find_attribute(int64_t header, std::string_view name, std::span<const std::byte> value);
  std::optional<Patch> find_outside_headers(std::span<const std::byte> value);
  void put_value(const Patch& patch, std::span<const std::byte> value);

  std::string key_;
  std::unique_ptr<Hdf5Image> image_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> headers_;  // of the datasets; the root group's last
  std::vector<Patch> patches_;    // in the same order
  bool patchable_ = false;
};

/// What a save leaves for the next one: layouts of the files, by file name, and the buffers that payload passed through
/// (Buffer::touch says why). For saves of one run one after the other; safe to share between threads.
class SaveCache {
 public:
  /// `buffers`: where those are kept, to be shared with whoever reads; null: here.
  explicit SaveCache(BufferStore* buffers = nullptr) : buffers_(buffers != nullptr ? buffers : &own_buffers_) {}
  SaveCache(const SaveCache&) = delete;

  /// The kept layout of this file when it is of these shards, else a new one. It is the caller's until put back.
  Result<std::unique_ptr<FileLayout>> take(const Manifest& manifest, const std::string& file_name,
                                           std::span<const ShardEntry> shards);
  void put_back(const std::string& file_name, std::unique_ptr<FileLayout> layout);

  BufferStore& buffers() { return *buffers_; }
  /// Of `bytes` for buffers and the kept layouts together, what buffers may take.
  int64_t buffer_bytes(int64_t bytes) const;

  int64_t hits() const;
  int64_t layout_bytes() const;  // of the layouts alone
  int64_t memory_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<FileLayout>> kept_;  // by file name
  BufferStore own_buffers_{kBounceBytes};
  BufferStore* buffers_;
  int64_t hits_ = 0;
};

/// HDF5's checksum of metadata: Bob Jenkins' lookup3 ("hashlittle", 2006) with an initial value of 0.
uint32_t lookup3(std::span<const std::byte> bytes);

}  // namespace cairn::ckpt
