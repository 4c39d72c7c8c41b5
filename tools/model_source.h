#pragma once
// What `generate`, `eval` and `export` are given on the command line: a Hugging Face folder, a checkpoint, a folder of
// checkpoints or a run folder; and the model made from it.

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/store/io_backend.h"
#include "converters/weight_source.h"
#include "runtime/config/recipe.h"
#include "runtime/core/result.h"
#include "runtime/inference/session.h"
#include "runtime/text/tokenizer.h"

namespace cairn::tools {

/// Ids of GLM's blank infilling, -1 where not known: what stands for a gap in the text, for one at its end, before and
/// behind what fills it.
struct InfillTokens {
  int32_t mask = -1, gmask = -1, start = -1, end = -1;
};

struct LoadedModel {
  std::filesystem::path from;  // the checkpoint or the folder
  Recipe recipe;
  std::unique_ptr<Machine> machine;  // where the session computes; null: the CPU
  std::unique_ptr<inference::Session> session;
  std::unique_ptr<text::Tokenizer> tokenizer;
  std::vector<int32_t> before;        // ids that the model wants before a text
  InfillTokens infill;                // of the recipe's objective, else of config.json; only with model.mask = prefix
  std::vector<std::string> warnings;  // of a Hugging Face folder, as an import of it has them
  std::vector<int32_t> stop;          // ids that end a text: of generation_config.json, config.json or the tokenizer
  int32_t begin = -1;        // stands before a text that has nothing before it: bos, else eos; -1: no such token
  std::string weights_hash;  // XXH3-64 of a checkpoint's manifest, which has the hashes of its bytes; else empty
};

/// A model without its weights: what is known of it before they are read.
struct OpenedModel {
  LoadedModel model;  // without machine and session
  std::unique_ptr<ckpt::IoBackend> io;
  std::unique_ptr<convert::WeightSource> source;
};

/// The token before a text that has nothing before it: the bos_token of the files beside a tokenizer, else the <s> of
/// a SentencePiece model, else what ends a document; -1: no such token. Errors: those of text::read_beside().
Result<int32_t> begin_token(const text::Tokenizer& tokenizer, const text::BesideFiles& files, bool sentencepiece);

/// Whether it has a config.json, which checkpoints and run folders have not.
bool is_hf_folder(const std::filesystem::path& path);

/// The hashes of the tokenizer that a checkpoint in its run's folder was trained with, by the run's lineage. Without
/// `file`: the checkpoint lies elsewhere, or the run used none.
text::TokenizerHashes trained_tokenizer(const std::filesystem::path& checkpoint, const ckpt::Manifest& manifest);

/// Looks at the value of --tokenizer. Errors: kUnsupported for a tokenizer of a kind that is not read here, naming it.
Status check_tokenizer_name(const std::string& name);

/// resolve_checkpoint(), where what lies there is no folder of another program's: that one is named.
Result<std::filesystem::path> resolve_source(const std::filesystem::path& path);

/// What a command gives to a model: texts, or ids that are there already.
enum class Works { kOnText, kOnIds };

/// `tokenizer`: empty (the one kept with the weights, else what the recipe says), or as text::tokenizer_config() reads
/// it. `precision`: "fp32", "bf16" or empty, the recipe's (fp32 for a Hugging Face folder). Errors: those of opening;
/// kInvalidInput when there is no tokenizer, or it has more ids than the model has rows; for work on ids one that does
/// not do is none, unless it was named. `device`: kCpu or kCuda; what CUDA cannot compute yet, or a device that cannot
/// be used, is an error.
Result<OpenedModel> open_model(const std::filesystem::path& path, const std::string& tokenizer,
                               const std::string& precision = {},
                               convert::WeightsOf weights_of = convert::WeightsOf::kTraining,
                               Works works = Works::kOnText);
Result<LoadedModel> load_weights(OpenedModel opened, DeviceChoice device);
/// Both.
Result<LoadedModel> load_model(const std::filesystem::path& path, const std::string& tokenizer,
                               const std::string& precision = {},
                               convert::WeightsOf weights_of = convert::WeightsOf::kTraining,
                               Works works = Works::kOnText, DeviceChoice device = DeviceChoice::kCpu);

}  // namespace cairn::tools
