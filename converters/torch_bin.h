#pragma once
// pytorch_model.bin, read without Python: a zip archive (zip_directory.h) of raw storages and a pickle that says which
// tensor is which part of them (unpickler.h). Never run, never written.
//
//   TOP/data.pkl      the pickle           TOP/version    decimal text, 1 to 10
//   TOP/data/KEY      a raw storage        TOP/byteorder  "little" where it is there
// Source: pytorch torch/serialization.py, caffe2/serialize/inline_container.cc.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "converters/unpickler.h"
#include "converters/weights_file.h"
#include "converters/zip_directory.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

class TorchBinFile final : public WeightsFile {
 public:
  /// Errors, all with the path: kInvalidInput (no such file), kUnsupported (the formats before torch 1.6, TorchScript,
  /// big-endian, what the unpickler refuses), kCorrupt, kIo.
  static Result<std::unique_ptr<TorchBinFile>> open(const std::filesystem::path& path,
                                                    Pickle pickle = Pickle::kStateDict);
  /// An archive of one tensor without a name, in bytes [begin, begin + bytes) of a file that is open already.
  static Result<std::unique_ptr<TorchBinFile>> open_tensor(std::shared_ptr<const Fd> fd,
                                                           const std::filesystem::path& path, int64_t begin,
                                                           int64_t bytes);

  const std::filesystem::path& path() const override { return path_; }
  const std::vector<SafeTensor>& tensors() const override { return tensors_; }
  /// Of a tensor that is a strided view of its storage, its elements are gathered.
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;
  /// Compares every entry with its CRC-32, where the writer has computed one. Errors: kCorrupt naming the entry.
  Status verify() const override;

 private:
  TorchBinFile() = default;
  Status read_at(int64_t offset, std::span<char> out) const;
  Status load(Pickle pickle);

  struct View {
    int64_t data_offset = 0;  // of the tensor's first element in the file
    int64_t elem_bytes = 0;
    std::vector<int64_t> strides;  // elements
    bool contiguous = false;
    int64_t stored_elems = 0;  // of its storage
  };
  std::filesystem::path path_;
  std::shared_ptr<const Fd> fd_;
  int64_t begin_ = 0, file_bytes_ = 0;  // of the archive in the file
  std::vector<ZipEntry> entries_;
  std::vector<SafeTensor> tensors_;  // sorted by where they lie
  std::vector<View> views_;          // of each of tensors_
};

}  // namespace cairn::convert
