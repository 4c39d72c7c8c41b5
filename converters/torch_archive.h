#pragma once
// The archive that torch.save writes: a zip (zip_directory.h) of raw storages beside a pickle that says what they are
// parts of. Opened without Python; the pickle is handed on, not run.
//
//   TOP/data.pkl      the pickle           TOP/version    decimal text, 1 to 10
//   TOP/data/KEY      a raw storage        TOP/byteorder  "little" where it is present
// Source: pytorch torch/serialization.py, caffe2/serialize/inline_container.cc.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "converters/zip_directory.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

class TorchArchive {
 public:
  TorchArchive() = default;
  /// Errors, all with the path: kInvalidInput (no such file), kUnsupported (the formats before torch 1.6, TorchScript,
  /// big-endian), kCorrupt, kIo.
  static Result<TorchArchive> open(const std::filesystem::path& path);
  /// An archive in bytes [begin, begin + bytes) of a file that is open already.
  static Result<TorchArchive> open_part(std::shared_ptr<const Fd> fd, const std::filesystem::path& path, int64_t begin,
                                        int64_t bytes);

  const std::filesystem::path& path() const { return path_; }
  /// The name of the pickle's entry, for messages.
  std::string pickle_name() const { return top_ + "data.pkl"; }
  /// The bytes of the pickle. Errors: kCorrupt for a wrong checksum, or more than 64 MiB.
  Result<std::string> pickle() const { return text_of("data.pkl", kMaxPickleBytes); }
  /// The entry data/KEY; null without one.
  const ZipEntry* storage(std::string_view key) const;
  const std::string& top() const { return top_; }
  /// Where the archive begins in its file; entries and read_at() count from there.
  int64_t begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }
  /// Bytes of the archive. Threads: any. Errors: kIo, kCorrupt for a file that ends before.
  Status read_at(int64_t offset, std::span<char> out) const;
  /// Compares every entry with its CRC-32, where the writer has computed one. Errors: kCorrupt naming the entry.
  Status verify() const;

 private:
  static constexpr int64_t kMaxPickleBytes = int64_t{64} << 20;
  Status load();
  Result<std::string> text_of(std::string_view name, int64_t max_bytes) const;

  std::filesystem::path path_;
  std::shared_ptr<const Fd> fd_;
  int64_t begin_ = 0, bytes_ = 0;  // of the archive in the file
  std::string top_;
  std::vector<ZipEntry> entries_;
  std::map<std::string, size_t, std::less<>> by_name_;  // without the top folder, which all share
};

}  // namespace cairn::convert
