#pragma once
// Weights (a checkpoint of any layout) -> a Hugging Face folder that transformers 4.x and 5.x open.
//
// Everything is written to a hidden folder beside the target and takes its name when it is complete. Over a folder that
// is not empty (ExportOptions::overwrite) the order is: remove config.json (what is left cannot be opened), remove the
// other files that an export writes, move the new files in, config.json last. Other files are never touched.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"

namespace cairn::convert {

constexpr int64_t kDefaultShardBytes = 5'000'000'000;  // transformers 4.x and huggingface_hub

struct ExportOptions {
  std::optional<DType> dtype;   // f32, bf16, f16; unset: what was imported, when nothing was trained since, else f32
  int64_t max_shard_bytes = 0;  // tensor bytes of a file; 0: the split that was imported, else kDefaultShardBytes
  bool overwrite = false;       // a target folder that is not empty
  bool hdf5 = false;            // each weights file is HDF5 as well (dual_file.h), and has a second name, model*.h5;
                                // one file of f32 makes the folder a checkpoint
};

struct ExportReport {
  std::filesystem::path dir;
  DType dtype = DType::kF32;
  std::string model_type;
  int64_t tensors = 0, parameters = 0, data_bytes = 0, shards = 0, files_passed = 0;
  bool linked = false;  // the checkpoint's own weights file was given a name in the folder; no weights were written
  double seconds = 0;
  std::vector<std::string> warnings;
};

/// Errors: kInvalidInput (no checkpoint, target not empty), kUnsupported (no family holds the model; a weight that f16
/// cannot hold), kCorrupt (the checkpoint), kNoSpace, kIo. On error the target is as it was.
Result<ExportReport> export_hf(ckpt::IoBackend& io, const std::filesystem::path& checkpoint_dir,
                               const std::filesystem::path& hf_dir, const ExportOptions& options,
                               const RecipeDecoder& decode);

/// "5GB", "60KB", "1000": decimal units KB, MB, GB, TB. Errors: kInvalidInput.
Result<int64_t> parse_size(std::string_view text);

}  // namespace cairn::convert
