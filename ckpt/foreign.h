#pragma once
// Weights that are no checkpoint of ours (a Hugging Face folder) as something that a run may begin with. converters/
// knows such folders, tools/ joins the two.

#include <filesystem>
#include <functional>
#include <memory>

#include "ckpt/format/manifest.h"
#include "runtime/core/result.h"
#include "runtime/core/shape.h"

namespace cairn::ckpt {

class ForeignWeights {
 public:
  virtual ~ForeignWeights() = default;

  /// What is there: tensors of kind "weight", float whatever the file has, by their logical names; step 0.
  virtual const Manifest& manifest() const = 0;

  /// The elements of `box` of the tensor called `name`, row-major. Errors: those of reading, kCorrupt among them.
  virtual Status read(std::string_view name, const Box& box, float* out) const = 0;
};

/// Opens `dir` when it is such a folder; null when it is not, and is to be read as a checkpoint.
using OpenForeign = std::function<Result<std::unique_ptr<ForeignWeights>>(const std::filesystem::path& dir)>;

}  // namespace cairn::ckpt
