#pragma once
// pytorch_model.bin, read without Python: an archive of torch.save (torch_archive.h) whose pickle says which tensor is
// which part of its storages (unpickler.h). Never run, never written.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "converters/torch_archive.h"
#include "converters/unpickler.h"
#include "converters/weights_file.h"
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

  const std::filesystem::path& path() const override { return archive_.path(); }
  const std::vector<SafeTensor>& tensors() const override { return tensors_; }
  /// Of a tensor that is a strided view of its storage, its elements are gathered.
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;
  /// Compares every entry with its CRC-32, where the writer has computed one. Errors: kCorrupt naming the entry.
  Status verify() const override { return archive_.verify(); }

 private:
  TorchBinFile() = default;
  Status load(Pickle pickle);

  struct View {
    int64_t data_offset = 0;  // of the tensor's first element in the file
    int64_t elem_bytes = 0;
    std::vector<int64_t> strides;  // elements
    bool contiguous = false;
    int64_t stored_elems = 0;  // of its storage
  };
  TorchArchive archive_;
  std::vector<SafeTensor> tensors_;  // sorted by where they lie
  std::vector<View> views_;          // of each of tensors_
};

}  // namespace cairn::convert
