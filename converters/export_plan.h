#pragma once
// The plan of an export, made before its first byte: names, dtypes, small files, and how each tensor is made. An export
// writes it to a folder (export.h); a view makes parts of it for readers (hf_view.h).

#include <filesystem>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/block_fp8.h"
#include "converters/export.h"
#include "converters/family_tensors.h"
#include "converters/hf_writer.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct ExportPlan {
  HfOutput output;              // its small files among it
  std::vector<Output> outputs;  // how each tensor of it is made
  BlockFp8 blocks;
  std::string model_type;
  std::vector<std::string> warnings;

  /// A source of `tensors`. The arguments and the plan outlive it.
  Result<std::unique_ptr<TensorSource>> open(const std::filesystem::path& source_dir, const CheckpointWeights& source,
                                             std::span<const int64_t> tensors, OutputReads reads) const;
};

/// `name`: of the model, in its card. Errors: those of export_hf() that no writing brings.
Result<ExportPlan> plan_export(ckpt::IoBackend& io, const CheckpointWeights& source,
                               const std::filesystem::path& source_dir, const std::string& name,
                               const ExportOptions& options, const RecipeDecoder& decode);

}  // namespace cairn::convert
