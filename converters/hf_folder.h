#pragma once
// A Hugging Face model folder, opened for reading: which files hold which tensor, checked as a whole before anything is
// read, then any rows of any logical tensor as float32. Memory is a few MiB whatever the model's size.
//
// Which files are read, and how eight-bit weights become floats: weights_folder.h. Code in a folder (*.py, auto_map) is
// never read.
//
// Names: as the family's table has them, or with the backbone's prefix added or removed (some converters saved the bare
// backbone), or as transformers 5 has them in memory (Family::also); never two of them for one tensor.
//
// Tied embeddings, by tie_word_embeddings and by what is on disk:
//   true   embedding | head | both, equal      -> tied, one tensor
//   true   both, different                     -> refused; HfOptions::untie keeps the two
//   false  both                                -> untied, even when equal
//   false  one of them                         -> refused: a head is never invented
//
// A value head (v_head of PPO) beside a whole causal model is left out with a warning. A head that scores texts in
// place of the model's own, as reward models and classifiers have, is refused, and so is an adapter, by itself or
// beside a model.
//
// Modules that predict further tokens, by num_nextn_predict_layers and by what is on disk: imported where both have
// them. Their copies of embedding and head, which published files have, must equal the model's.
// Source: transformers (4.52 and 5.x) modeling_utils.py, core_model_loading.py; huggingface_hub serialization/_base.py.

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "converters/family.h"
#include "converters/weight_source.h"
#include "converters/weights_folder.h"

namespace cairn::convert {

inline constexpr std::string_view kConfigFile = "config.json";

/// Files beside the weights that are kept and given back byte for byte: tokenizer, chat template, generation settings,
/// terms of use. By name.
bool is_passed_file(std::string_view name);
/// One that belongs to a tokenizer.
bool is_tokenizer_file(std::string_view name);
/// Checks that the readers of a passed file can read it: a JSON file has an object, as Python reads it. Errors:
/// kInvalidInput, with `name` and the byte.
Status check_passed_file(std::string_view name, std::string_view content);
/// Those of a folder, sorted.
std::vector<std::string> passed_files_in(const std::filesystem::path& dir);

struct HfOptions {
  bool untie = false;     // an embedding and a head that differ in a model that says it is tied: keep both
  bool drop_mtp = false;  // modules that predict further tokens are left out
};

/// A tensor that stands in the way.
struct TensorProblem {
  enum class Kind { kMissing, kUnexpected, kShape, kDtype, kTwice, kTie, kLayers };
  Kind kind = Kind::kMissing;
  std::string file, tensor;     // file is empty for what is nowhere
  std::string found, expected;  // shape, dtype or another name; may be empty

  std::string text() const;
};
std::string_view problem_name(TensorProblem::Kind kind);  // "missing", "unexpected", "shape", ...

/// A tensor of the folder under the name that the family's table has for it.
struct NamedTensor {
  std::string name;
  const FolderTensor* tensor = nullptr;
};

/// For people: a line for each, of many of one kind (the same name in many layers) the first ones and their number, and
/// a prefix that all unexpected names have.
std::vector<std::string> problem_lines(const std::vector<TensorProblem>& problems);

class HfFolder final : public WeightSource {
 public:
  /// Errors, all naming the folder or the file: kInvalidInput (no folder, no weights, config.json that is no
  /// model, and one list of every missing, unexpected, doubled, oddly shaped or oddly typed tensor), kCorrupt (a
  /// damaged file), kUnsupported (family, switch, dtype, quantisation).
  static Result<std::unique_ptr<HfFolder>> open(const std::filesystem::path& dir, const HfOptions& options = {});
  /// The same, but tensors that stand in the way are no error: a folder with problems may be looked at, not read.
  static Result<std::unique_ptr<HfFolder>> inspect(const std::filesystem::path& dir, const HfOptions& options = {});
  /// The model of the config.json in `dir` with tensors from elsewhere. Files beside it are kept; weights there are not
  /// read. `config`: in place of the file, which is then not kept; empty: the file.
  static Result<std::unique_ptr<HfFolder>> open_with(const std::filesystem::path& dir,
                                                     std::unique_ptr<WeightsFile> file, const HfOptions& options = {},
                                                     const std::string& config = "");

  const ModelConfig& model() const override { return model_; }
  const std::vector<TensorSpec>& tensors() const override { return tensors_; }
  Status read_box(int64_t tensor, const Box& box, std::span<float> out) const override;

  const std::filesystem::path& dir() const { return dir_; }
  const Family& family() const { return family_; }
  /// config.json as it is.
  const std::string& config_text() const { return config_text_; }
  /// Text that changes when a weights file or config.json does: names, sizes, times of change, headers.
  std::string identity() const;
  /// The dtype of most elements: of all weights, but for own_dtypes(). Of scaled eight-bit weights: what
  /// config.json says that they stand for, else f32.
  DType dtype() const { return dtype_; }
  /// Things a person should know that stop nothing: stray weight files, a wrong total_size, precision that is lost.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Keys of config.json that nobody here reads and that might change numbers, sorted.
  const std::vector<std::string>& not_read() const { return not_read_; }
  /// passed_files_in() the folder, config.json and the index.
  const std::vector<std::string>& kept_files() const { return kept_files_; }

  const WeightsFolder& weights() const { return *weights_; }
  /// mappings()[k] says how one of tensors(), or a row of it, is made, stored()[k] from what (its tensor is null where
  /// it is missing).
  const std::vector<Mapping>& mappings() const { return mappings_; }
  const std::vector<NamedTensor>& stored() const { return stored_; }
  /// Old buffers, and a head that equals its tied embedding: names as in the files.
  const std::vector<std::string>& ignored() const { return ignored_; }
  /// By logical name, of tensors that are not of dtype(), and of all biases that balance experts.
  const std::map<std::string, DType>& own_dtypes() const { return own_dtypes_; }
  const std::vector<TensorProblem>& problems() const { return problems_; }
  /// Whether rows of the head are divided by their lengths: what is read is not what is stored.
  bool has_unit_head() const;

 private:
  HfFolder() = default;
  static Result<std::unique_ptr<HfFolder>> inspect(const std::filesystem::path& dir, std::unique_ptr<WeightsFile> file,
                                                   const HfOptions& options, const std::string& config);
  Status refuse_problems() const;
  using Found = std::map<std::string, const FolderTensor*>;  // by the table's name
  Status read_config(std::unique_ptr<WeightsFile> given);
  Status match(const HfOptions& options);
  void settle_mtp(const HfOptions& options);
  Found find_known(std::vector<const FolderTensor*>* copies);
  std::string embedding_name(const Found& found) const;
  Status refuse_adapter_tensors() const;
  Status settle_heads(const Found& found);
  void settle_layers();
  Status settle_copies(const std::vector<const FolderTensor*>& copies, const Found& found);
  void take_other_names(const Found& found);
  Status settle_tie(const HfOptions& options, Found& found);
  Status read_vectors(size_t first, const Box& box, std::span<float> out) const;
  Status read_unit_rows(const FolderTensor& stored, const Box& box, std::span<float> out) const;
  Result<std::string> first_difference(const FolderTensor& a, const FolderTensor& b) const;
  /// Where in mappings() those of a tensor begin and end.
  std::pair<size_t, size_t> mappings_of(int64_t tensor) const;
  void settle_dtype();
  void add_problem(TensorProblem::Kind kind, const FolderTensor* tensor, std::string name, std::string found,
                   std::string expected);

  std::filesystem::path dir_;
  std::string config_text_, config_dtype_;
  Family family_;
  ModelConfig model_;
  std::unique_ptr<WeightsFolder> weights_;
  std::vector<TensorSpec> tensors_;
  std::vector<Mapping> mappings_;
  std::vector<NamedTensor> stored_;
  DType dtype_ = DType::kF32;
  std::vector<std::string> warnings_, kept_files_, ignored_, not_read_;
  std::vector<const FolderTensor*> heads_;  // that score texts
  std::map<std::string, DType> own_dtypes_;
  std::vector<TensorProblem> problems_;
};

}  // namespace cairn::convert
