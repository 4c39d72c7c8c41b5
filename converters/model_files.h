#pragma once
// The small files that a model goes out with: config.json as it came, tokenizer, chat template, generation settings.
// From the checkpoint, from what the run began with, from the recipe's tokenizer, or from a folder that a person names.

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/store/io_backend.h"
#include "converters/tokenizer_files.h"
#include "converters/weight_source.h"
#include "runtime/core/dtype.h"
#include "runtime/core/result.h"
#include "runtime/text/tokenizer.h"

namespace cairn::convert {

/// In a run's folder: the model of the Hub that the run began with, as "given" in the recipe, and the "folder" of the
/// Hub's cache with the files of that commit. Written by tools/init_options.h.
inline constexpr const char* kHubRecord = "hub.json";

struct ModelFilesOptions {
  /// A Hugging Face folder whose family, token ids and tokenizer files are taken, or one with a tokenizer only; empty:
  /// those that the checkpoint keeps, else the recipe's.
  std::filesystem::path like;
  bool without_tokenizer = false;  // no files of a tokenizer
  /// The recipe's tokenizer when the run was trained. May be empty itself.
  std::function<text::TokenizerHashes(const ckpt::Manifest&)> trained_tokenizer;
};

struct ModelFiles {
  std::map<std::string, std::string> files;  // by name
  std::optional<TokenizerFiles> tokenizer;   // that goes out as the recipe's; none: what the files say
  std::optional<DType> origin_dtype;         // of the folder that the run began with
  std::vector<std::string> warnings;

  /// config.json as it came; empty: there is none.
  std::string original_text() const;
  /// Its model_type; empty: it has none.
  std::string original_type() const;
  /// Writes the ids of a tokenizer that was taken: in config.json and in what generation reads.
  void settle_token_ids(nlohmann::ordered_json* config);
};

/// Errors: kInvalidInput (a file that no program could read; a tokenizer that is missing, or not the model's), kIo,
/// kCorrupt.
Result<ModelFiles> gather_model_files(ckpt::IoBackend& io, const CheckpointWeights& source,
                                      const std::filesystem::path& source_dir, const ModelFilesOptions& options,
                                      const RecipeDecoder& decode);

}  // namespace cairn::convert
