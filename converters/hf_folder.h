#pragma once
// A Hugging Face model folder, opened for reading: which files hold which tensor, checked as a whole before anything is
// read, then any rows of any logical tensor as float32. Memory is a few MiB whatever the model's size.
//
// Order of preference, as transformers': model.safetensors, model.safetensors.index.json with its shards.
// pytorch_model.bin is refused: it is a pickle. Code in a folder (*.py, auto_map) is never read.
//
// Names: as the family's table has them, or with the backbone's prefix added or removed (some converters saved the bare
// backbone); never both for one tensor.
//
// Tied embeddings, by tie_word_embeddings and by what is on disk:
//   true   embedding | head | both, equal      -> tied, one tensor
//   true   both, different                     -> refused; HfOptions::untie keeps the two
//   false  both                                -> untied, even when equal
//   false  one of them                         -> refused: a head is never invented
// Source: transformers (4.52 and 5.x) modeling_utils.py, core_model_loading.py; huggingface_hub serialization/_base.py.

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "converters/family.h"
#include "converters/safetensors.h"
#include "converters/weight_source.h"

namespace cairn::convert {

inline constexpr std::string_view kSingleFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";
inline constexpr std::string_view kConfigFile = "config.json";

/// Files beside the weights that are kept and given back byte for byte: tokenizer, chat template, generation settings.
const std::vector<std::string_view>& passed_files();

/// weight_map of an index: tensor name -> file name. Errors: kCorrupt, naming what is wrong (a file name with a
/// separator, no map, ...). `total_size`, when asked for, is 0 if the index has none.
Result<std::map<std::string, std::string>> parse_index(std::string_view text, int64_t* total_size = nullptr);

struct HfOptions {
  bool untie = false;  // an embedding and a head that differ in a model that says it is tied: keep both
};

class HfFolder final : public WeightSource {
 public:
  /// Errors, all naming the folder or the file: kInvalidInput (no folder, no weights, config.json that is no
  /// model, and one list of every missing, unexpected, doubled, oddly shaped or oddly typed tensor), kCorrupt (a
  /// damaged file), kUnsupported (family, switch, dtype, .bin, quantised).
  static Result<std::unique_ptr<HfFolder>> open(const std::filesystem::path& dir, const HfOptions& options = {});

  const ModelConfig& model() const override { return model_; }
  const std::vector<TensorSpec>& tensors() const override { return tensors_; }
  Status read_rows(int64_t tensor, int64_t first, int64_t end, std::span<float> out) const override;

  const std::filesystem::path& dir() const { return dir_; }
  const Family& family() const { return family_; }
  /// The dtype of all weights; the widest (f64, f32, bf16 or f16) when they differ.
  DType dtype() const { return dtype_; }
  /// Things a person should know that stop nothing: stray weight files, a wrong total_size, precision that is lost.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Which of passed_files(), config.json and the index are there.
  const std::vector<std::string>& kept_files() const { return kept_files_; }

 private:
  HfFolder() = default;
  struct Stored {
    int64_t file = -1;
    const SafeTensor* tensor = nullptr;
  };
  Status read_config();
  Status open_files();
  Status match(const HfOptions& options);
  Status settle_tie(const HfOptions& options, std::map<std::string, Stored>& found, std::string* problems);
  Status read_run(int64_t tensor, const RowRun& run, int64_t columns, float* out) const;
  Result<std::string> first_difference(const Stored& a, const Stored& b) const;

  std::filesystem::path dir_;
  Family family_;
  ModelConfig model_;
  std::vector<TensorSpec> tensors_;
  std::vector<Mapping> mappings_;  // of each of tensors_
  std::vector<Stored> stored_;     // of each of tensors_
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  DType dtype_ = DType::kF32;
  std::vector<std::string> warnings_, kept_files_;
};

/// The whole of a small file. Errors: kInvalidInput (not there, no regular file, larger than max_bytes), kIo.
Result<std::string> read_text_file(const std::filesystem::path& path, int64_t max_bytes);

}  // namespace cairn::convert
