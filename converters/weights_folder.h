#pragma once
// The weights files of a Hugging Face folder: which there are, whether the index fits them, and any elements of any
// stored tensor as floats. Knows nothing of families.
//
// Order of preference, as transformers': model.safetensors, model.safetensors.index.json with its shards,
// pytorch_model.bin, pytorch_model.bin.index.json with its shards. One kind is read; nothing depends on the order in
// which a folder is listed. Source: transformers (4.52 and 5.x) modeling_utils.py; huggingface_hub serialization.
//
// Weights of eight bits become floats here, with the scales that config.json's quantization_config speaks of:
//   quant_method         scale of X.weight       its shape
//   fp8                  X.weight_scale_inv      [ceil(out / b0), ceil(in / b1)], b = weight_block_size; null: one
//   number compressed-tensors   X.weight_scale          one number, [out, 1], or blocks as above (group:
//   block_structure) fbgemm_fp8           X.weight_scale          [out, 1]
// A weight is its stored number times its scale, in float32. Scales of activations have no use here and are left out.
// Source: transformers 5.x integrations/finegrained_fp8.py, integrations/fbgemm_fp8.py; compressed-tensors'
// quantization schemes.

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

/// weight_map of an index: tensor name -> file name. Errors: kCorrupt, naming what is wrong (a file name with a
/// separator, no map, ...). `total_size`, when asked for, is 0 if the index has none.
Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size = nullptr);

struct FolderTensor {
  std::string name;   // as in the file
  std::string dtype;  // of what is read: that of the file, but "F32" for scaled weights
  Shape shape;
  const WeightsFile* file = nullptr;
  const SafeTensor* stored = nullptr;
  // Of scaled weights: one scale for so many rows and columns.
  const WeightsFile* scale_file = nullptr;
  const SafeTensor* scale = nullptr;
  int64_t block_rows = 0, block_columns = 0;

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
  /// Whether some weights are made from eight bits and scales.
  bool quantised() const { return quantised_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Threads: these may be called from any. Memory: a few MiB a thread, whatever the tensor.

  /// Rows [row, row + rows) and columns [column, column + columns) as floats, dense, row-major. A tensor of any number
  /// of dims is read as a matrix: rows are all dims but the last (a vector is one column).
  Status read_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                   float* out) const;
  /// Elements [first, first + count), row-major.
  Status read(const FolderTensor& tensor, int64_t first, int64_t count, float* out) const;

 private:
  Status open_index(const std::filesystem::path& dir, std::string_view index);
  Status settle_scales(const nlohmann::json& config);
  void tell_strays(const std::filesystem::path& dir);
  Status scale_rect(const FolderTensor& tensor, int64_t row, int64_t rows, int64_t column, int64_t columns,
                    float* out) const;

  std::vector<std::unique_ptr<WeightsFile>> files_;
  std::vector<FolderTensor> tensors_;
  std::string index_;
  bool quantised_ = false;
  std::vector<std::string> warnings_;
};

/// A tensor of any number of dims as a matrix.
int64_t row_count(const Shape& shape);
int64_t column_count(const Shape& shape);

}  // namespace cairn::convert
