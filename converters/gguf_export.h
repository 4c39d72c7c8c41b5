#pragma once
// A checkpoint -> one GGUF file: gguf_model.h has the tensors, gguf_vocab.h the tokenizer, gguf_file.h the bytes.
//
// The file appears whole, durable, under its name, or not at all. Memory: some 150 MiB.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/gguf_file.h"
#include "converters/model_files.h"
#include "converters/weight_source.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct GgufExportOptions {
  std::optional<GgufType> type;  // of matrices; unset: what was imported, f32 of a model that was trained from scratch
  WeightsOf weights = WeightsOf::kTraining;
  ModelFilesOptions files;
  bool overwrite = false;                                                 // a file that exists
  const std::atomic<bool>* cancel = nullptr;                              // when true it ends with kStopped
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // may be empty
};

struct GgufExportReport {
  std::filesystem::path file;
  std::string model_type, architecture;
  GgufType type = GgufType::kF32;
  int64_t tensors = 0, parameters = 0, data_bytes = 0;
  double seconds = 0;
  std::vector<std::string> not_finite;  // among the warnings too
  std::vector<std::string> warnings;
};

/// Errors: kInvalidInput (no checkpoint, a target that exists or lies in the checkpoint, no tokenizer), kUnsupported
/// (no architecture for the model; a tokenizer that GGUF cannot say; a weight that f16 or q8_0 cannot hold), kCorrupt,
/// kNoSpace, kIo, kStopped. On error nothing new exists.
Result<GgufExportReport> export_gguf(ckpt::IoBackend& io, const std::filesystem::path& checkpoint_dir,
                                     const std::filesystem::path& target, const GgufExportOptions& options,
                                     const RecipeDecoder& decode);

}  // namespace cairn::convert
