#pragma once
// The weights files of a Hugging Face folder: which there are, whether the index fits them, and any elements of any
// stored tensor as floats. Knows nothing of families.
//
// Order of preference, as transformers': model.safetensors, model.safetensors.index.json with its shards,
// pytorch_model.bin, pytorch_model.bin.index.json with its shards. One kind is read; nothing depends on the order in
// which a folder is listed. Source: transformers (4.52 and 5.x) modeling_utils.py; huggingface_hub serialization.
//
// Quantised weights become floats here: which there are and how they are stored, quantisation.h.

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "converters/foreign_file.h"
#include "converters/weights_file.h"
#include "runtime/core/result.h"

namespace cairn::convert {

inline constexpr std::string_view kSingleFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";
inline constexpr std::string_view kSingleBin = "pytorch_model.bin";
inline constexpr std::string_view kBinIndex = "pytorch_model.bin.index.json";

/// weight_map of an index: tensor name -> file name, in the folder or below it. Errors: kCorrupt, naming what is wrong
/// (a file name that leaves the folder, no map, ...). `total_size`, when asked for, is 0 if the index has none.
Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size = nullptr);

struct FolderTensor {
  std::string name;   // as in the file
  std::string dtype;  // of what is read: that of the file, but "F32" for quantised weights
  Shape shape;
  const WeightsFile* file = nullptr;
  const SafeTensor* stored = nullptr;
  // Of quantised weights: one scale for so many rows and columns.
  const WeightsFile* scale_file = nullptr;
  const SafeTensor* scale = nullptr;
  int64_t block_rows = 0, block_columns = 0;
  bool mxfp4 = false;  // stored is [experts, out, in / 32, 16], this tensor [experts, out, in]

  std::string file_name() const { return file->path().filename().string(); }
};

class WeightsFolder {
 public:
  /// `config`: config.json. Errors: kInvalidInput (no weights, files that are missing), kCorrupt (a damaged file, an
  /// index that does not fit its files: all mismatches in one list), kUnsupported (a quantisation that is not above).
  static Result<WeightsFolder> open(const std::filesystem::path& dir, const nlohmann::json& config);
  /// Of files that somebody else has opened.
  static WeightsFolder of(std::unique_ptr<WeightsFile> file);
  /// Whether open() would find a file of weights.
  static bool has_weights(const std::filesystem::path& dir);

  const std::vector<FolderTensor>& tensors() const { return tensors_; }
  const std::vector<std::unique_ptr<WeightsFile>>& files() const { return files_; }
  /// Which index was read: kIndexFile, kBinIndex, or empty for a single file.
  const std::string& index() const { return index_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Tensors that the files hold and the index does not list, by name: which file. They are not read.
  const std::map<std::string, std::string>& unlisted() const { return unlisted_; }

  // Threads: these may be called from any. Memory: a few MiB a thread, whatever the tensor. Errors of all: kIo,
  // kCorrupt; of quantised weights kCorrupt for a code or a scale that makes no finite number, with its place.

  /// Rows [row, row + rows) and columns [column, column + columns) as floats, dense, row-major. A tensor of any number
  /// of dims is read as a matrix: rows are all dims but the last (a vector is one column).
  Status read_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                   float* out) const;
  /// Elements [first, first + count), row-major.
  Status read(const FolderTensor& tensor, int64_t first, int64_t count, float* out) const;
  /// The same of a stack [experts, rows, columns] turned to [experts, columns, rows].
  Status read_turned(const FolderTensor& tensor, int64_t first, int64_t count, float* out) const;
  /// The codes [first, first + count) of an F8_E4M3 weight, as they are stored.
  Status read_codes(const FolderTensor& tensor, int64_t first, int64_t count, std::byte* out) const;

 private:
  Status open_index(const std::filesystem::path& dir, std::string_view index);
  void tell_strays(const std::filesystem::path& dir);
  Status scale_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                    float* out) const;
  Status read_mxfp4(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                    float* out) const;

  std::vector<std::unique_ptr<WeightsFile>> files_;
  std::vector<FolderTensor> tensors_;
  std::string index_;
  std::map<std::string, std::string> unlisted_;
  std::vector<std::string> warnings_;
};

/// A tensor of any number of dims as a matrix.
int64_t row_count(const Shape& shape);
int64_t column_count(const Shape& shape);

}  // namespace cairn::convert
