#pragma once
// A file of stored tensors, whichever its format: safetensors.h, torch_bin.h.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::convert {

struct SafeTensor {
  std::string name;
  std::string dtype;  // as safetensors names it: "F32", "BF16", "F8_E4M3", "I64", ...
  Shape shape;
  int64_t begin = 0, end = 0;  // bytes of the dense tensor; in safetensors relative to the data part
};

/// Opened for reading. Threads: const functions may be called from any.
class WeightsFile {
 public:
  virtual ~WeightsFile() = default;
  virtual const std::filesystem::path& path() const = 0;
  /// The files that it is read from.
  virtual std::vector<std::filesystem::path> paths() const { return {path()}; }
  /// In the order in which their bytes lie in the file.
  virtual const std::vector<SafeTensor>& tensors() const = 0;
  /// `bytes` bytes at `offset` of the tensor's row-major data. Errors: kIo, kCorrupt; with path and tensor.
  virtual Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const = 0;
  /// Compares the file with the checksums in it, when its format has some; reads all of it. Errors: kCorrupt, kIo.
  virtual Status verify() const { return {}; }
};

}  // namespace cairn::convert
