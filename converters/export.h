#pragma once
// Weights (a checkpoint of any layout) -> a Hugging Face folder that transformers 4.x and 5.x open.
//
// How the folder comes to be, in bounded memory and so that a killed export goes on: hf_writer.h.

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/store/io_backend.h"
#include "converters/hf_writer.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/text/tokenizer.h"

namespace cairn::convert {

struct ExportOptions {
  std::optional<DType> dtype;   // f32, bf16, f16; unset: what was imported, when nothing was trained since, else f32
  int64_t max_shard_bytes = 0;  // tensor bytes of a file; 0: the split that was imported, else kDefaultShardBytes
  WeightsOf weights = WeightsOf::kTraining;
  bool overwrite = false;      // a target folder that is not empty
  std::filesystem::path like;  // a Hugging Face folder whose family, token ids and tokenizer files are taken, or one
                               // with a tokenizer only; empty: those that the checkpoint keeps, else the recipe's
  bool without_tokenizer = false;  // no files of a tokenizer
  /// The recipe's tokenizer when the run was trained. May be empty itself.
  std::function<text::TokenizerHashes(const ckpt::Manifest&)> trained_tokenizer;
  bool block_fp8 = false;  // the layers' matrices in blocks of eight bits (block_fp8.h), where the family has them;
                           // dtype is that of the rest, unset after training: bf16
  bool hdf5 = false;       // each weights file is HDF5 as well (dual_file.h), and has a second name, model*.h5;
                           // one file of f32 makes the folder a checkpoint
  const std::atomic<bool>* cancel = nullptr;                              // as HfWriteOptions'
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;  // the same
  std::function<std::unique_ptr<ckpt::IoBackend>()> make_io;              // the same
};

struct ExportReport {
  std::filesystem::path dir;
  DType dtype = DType::kF32;
  bool block_fp8 = false;  // but for what is in blocks
  std::string model_type;
  int64_t tensors = 0, parameters = 0, data_bytes = 0, shards = 0, files_passed = 0;
  int64_t taken_files = 0, taken_bytes = 0;  // that an earlier export, cut off, had written
  bool linked = false;  // the checkpoint's own weights file was given a name in the folder; no weights were written
  double seconds = 0;
  std::vector<std::string> not_finite;  // as HfWriteReport's; among the warnings too
  std::vector<std::string> warnings;
};

/// Errors: kInvalidInput (no checkpoint, target not empty), kUnsupported (no family holds the model; a weight that f16
/// cannot hold), kCorrupt (the checkpoint), kNoSpace, kIo, kStopped. On error the target is as it was.
Result<ExportReport> export_hf(ckpt::IoBackend& io, const std::filesystem::path& checkpoint_dir,
                               const std::filesystem::path& hf_dir, const ExportOptions& options,
                               const RecipeDecoder& decode);

/// What is said of tensors that hold a NaN or an infinity.
std::string not_finite_warning(const std::vector<std::string>& tensors);

/// "bf16", or "fp8 in blocks, the rest bf16".
std::string dtype_text(DType dtype, bool block_fp8);
std::string dtype_text(const ExportReport& report);

/// Errors: kInvalidInput for a dtype that no folder is written in.
Status check_export_dtype(const std::optional<DType>& dtype);

/// Token ids of the original config: ints, a list of ints, or null; anything else is left out.
void keep_token_ids(const std::string& original, nlohmann::ordered_json* config);

/// "5GB", "60KB", "1000": decimal units KB, MB, GB, TB. Errors: kInvalidInput.
Result<int64_t> parse_size(std::string_view text);

}  // namespace cairn::convert
