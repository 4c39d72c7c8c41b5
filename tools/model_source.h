#pragma once
// What `generate`, `eval` and `export` are given on the command line: a Hugging Face folder, a checkpoint, a folder of
// checkpoints or a run folder; and the model made from it.

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "ckpt/store/io_backend.h"
#include "converters/weight_source.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/data/tokenizer.h"
#include "runtime/inference/session.h"

namespace cairn::tools {

struct LoadedModel {
  std::filesystem::path from;  // the checkpoint or the folder
  Recipe recipe;
  std::unique_ptr<inference::Session> session;
  std::unique_ptr<data::Tokenizer> tokenizer;
};

/// `tokenizer`: empty (what the recipe says, or a SentencePiece model that is kept with the weights), "bytes", or the
/// path of a SentencePiece model. Errors: those of opening; kInvalidInput when there is no tokenizer, or it has more
/// ids than the model has rows.
Result<LoadedModel> load_model(const std::filesystem::path& path, const std::string& tokenizer);

}  // namespace cairn::tools
