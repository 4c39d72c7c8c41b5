#pragma once
// Where a model's float weights come from: a Hugging Face folder or a checkpoint. Export, generation and evaluation
// read through this and cannot tell the two apart.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/persist/read.h"
#include "ckpt/plan/load_plan.h"
#include "ckpt/store/io_backend.h"
#include "runtime/config/recipe.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual const ModelConfig& model() const = 0;
  /// model_tensors(model()): logical names and shapes, canonical order.
  virtual const std::vector<TensorSpec>& tensors() const = 0;
  /// A box of tensors()[tensor], dense, row-major. `out` holds exactly as many floats.
  virtual Status read_box(int64_t tensor, const Box& box, std::span<float> out) const = 0;

  /// Rows [first, end) of dim 0.
  Status read_rows(int64_t tensor, int64_t first, int64_t end, std::span<float> out) const {
    Box box = Box::whole(tensors()[tensor].shape);
    box.lo[0] = first;
    box.hi[0] = end;
    return read_box(tensor, box, out);
  }

  /// The whole tensor.
  Status read(int64_t tensor, std::span<float> out) const {
    return read_box(tensor, Box::whole(tensors()[tensor].shape), out);
  }
};

/// Copies a box out of a dense row-major tensor of `shape` into dense memory of its own. At least one dim.
void copy_box_out(const float* whole, const Shape& shape, const Box& box, float* dense);

/// Files that a checkpoint keeps beside its weights (the tokenizer, the original config.json) are tensors of this kind:
/// dtype u8, one dim, named as the file. So they are committed, checksummed and resharded with everything else.
inline constexpr std::string_view kFileKind = "file";

/// Turns the text in a manifest back into a recipe (dsl::decode_recipe).
using RecipeDecoder = std::function<Result<Recipe>(std::string_view json)>;

/// Which of a checkpoint's weights: those that are trained, or their moving average (optimizer.ema); or moments, read
/// in the same way.
enum class WeightsOf { kTraining, kAverage, kFirstMoment, kSecondMoment };

class CheckpointWeights final : public WeightSource {
 public:
  /// Errors: those of the reader and the decoder; kInvalidInput listing every weight that is missing or of another
  /// shape than the recipe says, and for a checkpoint without averages when they are asked for. `io` must outlive the
  /// object.
  static Result<std::unique_ptr<CheckpointWeights>> open(ckpt::IoBackend& io, const std::filesystem::path& dir,
                                                         const RecipeDecoder& decode,
                                                         WeightsOf which = WeightsOf::kTraining);

  const ModelConfig& model() const override { return recipe_.model; }
  const std::vector<TensorSpec>& tensors() const override { return tensors_; }
  Status read_box(int64_t tensor, const Box& box, std::span<float> out) const override;

  /// Of the tensors that are read, as the manifest spells it.
  std::string_view kind() const { return kind_; }
  const Recipe& recipe() const { return recipe_; }
  const ckpt::Manifest& manifest() const { return reader_->manifest(); }
  /// Names of the kept files, and the bytes of one. Errors: kInvalidInput for one that is not there.
  std::vector<std::string> files() const;
  Result<std::string> file(std::string_view name) const;
  /// Kept files of no bytes: a tensor has at least one element, so these stand in the manifest's state.
  std::vector<std::string> empty_files() const;
  /// The dtype of the weights in the folder that this checkpoint was imported from and has not left since (step 0);
  /// nothing for any other checkpoint.
  std::optional<DType> imported_dtype() const;
  /// Of an import that nothing has trained: HfFolder::own_dtypes().
  std::map<std::string, DType> imported_dtypes() const;

 private:
  CheckpointWeights() = default;
  Status run(std::span<const ckpt::LoadRead> reads, std::byte* into) const;

  std::unique_ptr<ckpt::CheckpointReader> reader_;
  std::string_view kind_;
  Recipe recipe_;
  std::vector<TensorSpec> tensors_;
  std::unique_ptr<ckpt::LoadPlanner> planner_;  // refers to the reader's manifest
};

}  // namespace cairn::convert
