#pragma once
// The safetensors file: header codec (bytes <-> structs, no I/O) and plain file access.
//
//   0..7       N, uint64 little-endian: length of the header
//   8..8+N-1   JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {string: string}}
//   8+N..end   tensor bytes, little-endian, row-major, no gaps
// Source: huggingface/safetensors, safetensors/src/tensor.rs. Our reader is stricter: duplicate keys and extra fields
// are errors. Our writer gives the library's own bytes: tensors by dtype size class, then by name.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "converters/weights_file.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::convert {

/// Tensors of bytes (U8) of such names are no weights but HDF5's own bytes in a file that is both (dual_file.h).
inline constexpr std::string_view kStructurePrefix = "__hdf5__.";

struct SafetensorsHeader {
  std::vector<SafeTensor> tensors;  // in data order
  std::map<std::string, std::string> metadata;
  int64_t data_offset = 0;  // of the data part in the file: 8 + N
};

/// Bits of one element; 0 for an unknown dtype name.
int64_t safetensors_dtype_bits(std::string_view name);
/// F32, F16, BF16, F64 and the integers that DType knows. Errors: kUnsupported.
Result<DType> safetensors_dtype(std::string_view name);
std::string_view safetensors_dtype_name(DType dtype);

/// `head` holds at least the first min(file_bytes, 8 + N) bytes of the file. Errors: kCorrupt, naming byte or tensor,
/// what was found and what was expected. Never reads outside `head`; never crashes, whatever the bytes.
Result<SafetensorsHeader> decode_safetensors_header(std::string_view head, int64_t file_bytes);

/// Sorts `tensors` into file order, assigns their offsets, and returns 8 + header bytes.
Result<std::string> encode_safetensors_header(std::vector<SafeTensor>& tensors,
                                              const std::map<std::string, std::string>& metadata);

class SafetensorsFile final : public WeightsFile {
 public:
  /// Errors: kInvalidInput (no such file), kCorrupt (header), kIo; all with the path.
  static Result<SafetensorsFile> open(const std::filesystem::path& path);
  const std::filesystem::path& path() const override { return path_; }
  const std::vector<SafeTensor>& tensors() const override { return header_.tensors; }
  /// Without HDF5's own bytes, in a file that is HDF5 as well.
  const SafetensorsHeader& header() const { return header_; }
  Status read(const SafeTensor& tensor, int64_t offset, int64_t bytes, std::byte* out) const override;

 private:
  std::filesystem::path path_;
  Fd fd_;
  SafetensorsHeader header_;
};

/// Writes a file as a stream of tensors: temporary name, fsync, rename, fsync of the folder.
/// `fill(tensor, sink)` is called in file order and hands over exactly the tensor's bytes, in pieces.
using ByteSink = std::function<Status(const std::byte* data, int64_t bytes)>;
Status write_safetensors(const std::filesystem::path& path, std::vector<SafeTensor> tensors,
                         const std::map<std::string, std::string>& metadata,
                         const std::function<Status(const SafeTensor&, const ByteSink&)>& fill);

}  // namespace cairn::convert
