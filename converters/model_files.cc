#include "converters/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "converters/hf_folder.h"
#include "runtime/core/file_calls.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxKeptBytes = int64_t{256} << 20;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

class Gatherer {
 public:
  Gatherer(ckpt::IoBackend& io, const CheckpointWeights& source, const fs::path& source_dir,
           const ModelFilesOptions& options, const RecipeDecoder& decode)
      : io_(io), source_(source), source_dir_(source_dir), options_(options), decode_(decode) {}

  Status gather_files() {
    if (options_.like.empty()) {
      RT_TRY_SET(const bool own, take_own_files());
      if (!own && !options_.without_tokenizer) RT_TRY(take_recipe_tokenizer());
    } else {
      RT_TRY(take_files_of(options_.like));
      if (!out_.files.contains(std::string(kConfigFile))) RT_TRY(take_tokenizer_of_folder());
    }
    if (options_.without_tokenizer)
      std::erase_if(out_.files, [](const auto& file) { return is_tokenizer_file(file.first); });
    const std::string of = (options_.like.empty() ? source_dir_ : options_.like).string();
    for (const auto& [name, content] : out_.files) {
      Status readable = check_passed_file(name, content);
      if (readable.ok()) continue;
      Error error = std::move(readable).error().with(of);
      error.message += "; --like FOLDER takes another copy of these files";
      if (is_tokenizer_file(name)) error.message += ", --without-tokenizer leaves those of the tokenizer out";
      return error;
    }
    return {};
  }
  ModelFiles take() { return std::move(out_); }

 private:
  Status take_files_of(const fs::path& folder) {
    std::vector<std::string> names = passed_files_in(folder);
    std::error_code error;
    if (fs::exists(fs::symlink_status(folder / kConfigFile, error))) names.emplace_back(kConfigFile);
    for (const std::string& name : names) {
      RT_TRY(check_inside(folder, name));
      RT_TRY_SET(out_.files[name], read_text_file(folder / name, kMaxKeptBytes));
    }
    return {};
  }

  /// The folder of a recipe's init.path. Empty: nowhere.
  static fs::path find_init(const std::string& path, const fs::path& checkpoint) {
    std::error_code error;
    for (const fs::path& place : places_of(path, checkpoint)) {
      if (fs::is_directory(place, error)) return place;
    }
    return hub_origin(path, checkpoint);
  }

  /// The folder of the Hub's cache that a name stood for when the checkpoint's run began, by hub.json of the run.
  static fs::path hub_origin(const std::string& name, const fs::path& checkpoint) {
    const Result<std::string> record =
        read_text_file(checkpoint.parent_path().parent_path() / kHubRecord, kMaxKeptBytes);
    if (!record.ok()) return {};
    const nlohmann::json kept = json_or_nothing(record.value());
    const fs::path folder = json_string(kept, "folder");
    std::error_code error;
    return json_string(kept, "given") == name && fs::is_directory(folder, error) ? folder : fs::path();
  }

  /// Of the Hugging Face folder that a run began with, or that the run began with which it began with, and so on: what
  /// fine-tuning does not change, and the dtype.
  Status take_files_of_origin() {
    constexpr int kMostRuns = 16;
    InitConfig init = source_.recipe().init;
    fs::path at = source_dir_;
    for (int run = 0; run < kMostRuns && !init.path.empty(); ++run) {
      const fs::path found = find_init(init.path, at);
      if (found.empty()) {
        out_.warnings.push_back(fmt::format(
            "the model began with {}, which is not there any more: its tokenizer, generation settings, token "
            "ids and dtype are not exported; --like FOLDER takes them from another copy of it",
            init.path));
        return {};
      }
      std::error_code error;
      if (fs::is_regular_file(found / kConfigFile, error)) {
        RT_TRY(take_files_of(found));
        if (const auto folder = HfFolder::inspect(found); folder.ok()) out_.origin_dtype = folder.value()->dtype();
        return {};
      }
      const fs::path checkpoints = fs::is_directory(found / "checkpoints", error) ? found / "checkpoints" : found;
      at = found;
      if (!fs::exists(found / ckpt::kManifestName, error)) {
        const Result<ckpt::CheckpointInfo> newest = ckpt::newest_complete(io_, checkpoints);
        if (!newest.ok() && newest.error().code == ErrorCode::kCorrupt) return newest.error();
        if (!newest.ok()) return {};  // nothing to be learnt from
        at = newest.value().dir;
      }
      const auto weights = CheckpointWeights::open(io_, at, decode_);
      if (!weights.ok()) return {};
      for (const std::string& name : weights.value()->files()) {
        if (!is_passed_file(name) && name != kConfigFile) continue;
        RT_TRY_SET(out_.files[name], weights.value()->file(name));
      }
      out_.origin_dtype = weights.value()->imported_dtype();
      if (!out_.files.empty()) return {};
      init = weights.value()->recipe().init;
    }
    return {};
  }

  /// Takes what the checkpoint keeps, or what lies beside it, or the files of what the run began with. Returns whether
  /// the model came with them: they are its own whatever the recipe says.
  Result<bool> take_own_files() {
    for (const std::string& name : source_.files()) {
      if (!is_passed_file(name) && name != kConfigFile && name != kIndexFile) continue;
      RT_TRY_SET(out_.files[name], source_.file(name));
    }
    // Of a checkpoint that is a Hugging Face folder these lie beside it.
    if (source_.files().empty()) RT_TRY(take_files_of(source_dir_));
    const bool own = !out_.files.empty();
    if (!own) RT_TRY(take_files_of_origin());
    for (const std::string& name : source_.empty_files()) {
      if (is_passed_file(name)) out_.files[name] = "";
    }
    return own;
  }

  /// --like FOLDER that has no config.json.
  Status take_tokenizer_of_folder() {
    const TokenizerConfig tokenizer = tokenizer_in(options_.like);
    if (tokenizer.kind == TokenizerConfig::Kind::kNone) {
      return invalid(fmt::format(
          "{} has neither {} nor a tokenizer; expected a Hugging Face folder, or one with tokenizer.json or "
          "tokenizer.model",
          options_.like.string(), kConfigFile));
    }
    out_.files.clear();
    RT_TRY_SET([[maybe_unused]] const bool own, take_own_files());
    RT_TRY_SET(const text::TokenizerHashes found, text::tokenizer_hashes(tokenizer));
    if (tokenizer.kind == source_.recipe().tokenizer.kind) {
      for (const text::TokenizerChange& one : text::tokenizer_changes(tokenizer.path, trained_tokenizer(), found)) {
        out_.warnings.push_back(
            fmt::format("{} is not the file that the run was trained with: {}", one.path, change_text(one)));
      }
    }
    return use_tokenizer(tokenizer);
  }

  text::TokenizerHashes trained_tokenizer() const {
    return options_.trained_tokenizer ? options_.trained_tokenizer(source_.manifest()) : text::TokenizerHashes{};
  }

  /// The hashes of the tokenizer among out_.files, of the recipe's kind.
  text::TokenizerHashes hashes_of_kept() const {
    const bool hf = source_.recipe().tokenizer.kind == TokenizerConfig::Kind::kHf;
    const auto of = [&](const char* name) {
      const auto kept = out_.files.find(name);
      return kept == out_.files.end() ? std::string() : kept->second;
    };
    text::BesideFiles beside;
    for (const char* name : text::kBesideNames) *beside.find(name) = of(name);
    return text::tokenizer_hashes(of(hf ? "tokenizer.json" : "tokenizer.model"), beside);
  }

  /// Takes the tokenizer of a model that was trained from scratch, or with another tokenizer than that of the folder
  /// that it began with.
  Status take_recipe_tokenizer() {
    TokenizerConfig tokenizer = source_.recipe().tokenizer;
    const bool of_origin =
        std::ranges::any_of(out_.files, [](const auto& file) { return is_tokenizer_file(file.first); });
    if (tokenizer.kind == TokenizerConfig::Kind::kNone) {
      if (of_origin) return {};
      out_.warnings.push_back(
          "no tokenizer is exported, for the recipe names none; --like FOLDER takes its files from a folder");
      if (const int64_t end = source_.recipe().objective.document_end; end >= 0)
        out_.tokenizer = TokenizerFiles{.eos = {end}};
      return {};
    }
    if (!tokenizer.path.empty()) {
      const text::TokenizerHashes trained = trained_tokenizer(), kept = hashes_of_kept();
      const auto is_kept = [&](const text::TokenizerHashes& other) {
        return !kept.file.empty() && kept.file == other.file && text::tokenizer_changes("", kept, other).empty();
      };
      if (is_kept(trained)) return {};
      Result<FoundTokenizer> found = find_tokenizer(tokenizer, source_dir_, trained);
      if (!found.ok()) {
        Error error = std::move(found).error();
        error.message += "; --like FOLDER takes another copy, --without-tokenizer leaves it out";
        return error;
      }
      if (is_kept(found.value().hashes)) return {};
      tokenizer = found.value().tokenizer;
      if (trained.file.empty()) {
        out_.warnings.push_back(fmt::format(
            "{} is exported as the tokenizer; no lineage.jsonl of the run says whether it is the file of the training",
            tokenizer.path));
      }
    }
    if (of_origin) {
      out_.warnings.push_back(
          fmt::format("the recipe's tokenizer is exported in place of that of {}", source_.recipe().init.path));
    }
    return use_tokenizer(tokenizer);
  }

  Status use_tokenizer(const TokenizerConfig& tokenizer) {
    const ModelConfig& model = source_.model();
    RT_TRY_SET(TokenizerFiles made, tokenizer_files(tokenizer, model.context, source_.recipe().objective.document_end));
    if (made.vocab > model.vocab) {
      return invalid(fmt::format(
          "{}: the tokenizer has {} ids, the model {} rows: they do not belong together; --like FOLDER names another "
          "one, --without-tokenizer leaves it out",
          tokenizer.path.empty() ? "bytes" : tokenizer.path, made.vocab, model.vocab));
    }
    std::erase_if(out_.files, [](const auto& file) { return is_tokenizer_file(file.first); });
    out_.files.merge(made.files);
    out_.warnings.insert(out_.warnings.end(), made.warnings.begin(), made.warnings.end());
    out_.tokenizer = std::move(made);
    return {};
  }

  ckpt::IoBackend& io_;
  const CheckpointWeights& source_;
  const fs::path& source_dir_;
  const ModelFilesOptions& options_;
  const RecipeDecoder& decode_;
  ModelFiles out_;
};

}  // namespace

std::string ModelFiles::original_text() const {
  const auto kept = files.find(std::string(kConfigFile));
  return kept == files.end() ? "" : kept->second;
}

std::string ModelFiles::original_type() const {
  const nlohmann::json original = json_or_nothing(original_text(), JsonNumbers::kPython);
  return json_string(original, "model_type");
}

void ModelFiles::settle_token_ids(nlohmann::ordered_json* config) {
  constexpr const char* kGeneration = "generation_config.json";
  if (!tokenizer) return;
  const auto id = [](int64_t one) { return one < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(one); };
  const std::vector<int64_t>& ends = tokenizer->eos;
  const std::pair<const char*, nlohmann::ordered_json> ids[] = {
      {"bos_token_id", id(tokenizer->bos)},
      {"eos_token_id", ends.size() > 1 ? nlohmann::ordered_json(ends) : id(ends.empty() ? -1 : ends[0])},
      {"pad_token_id", id(tokenizer->pad)}};
  auto generation =
      parse_ordered_json(files.contains(kGeneration) ? files[kGeneration] : "{}", kMaxJsonDepth, JsonNumbers::kPython);
  RT_CHECK(generation.ok() && generation.value().is_object(), "{} was not checked", kGeneration);
  nlohmann::ordered_json generates = std::move(generation).value();
  for (const auto& [key, value] : ids) {
    (*config)[key] = value;
    generates.erase(key);
    if (!value.is_null()) generates[key] = value;
  }
  if (generates.empty()) return;
  generates["transformers_version"] = (*config)["transformers_version"];
  files[kGeneration] = python_json_text(generates, 2) + "\n";
}

Result<ModelFiles> gather_model_files(ckpt::IoBackend& io, const CheckpointWeights& source, const fs::path& source_dir,
                                      const ModelFilesOptions& options, const RecipeDecoder& decode) {
  Gatherer gatherer(io, source, source_dir, options, decode);
  RT_TRY(gatherer.gather_files());
  return gatherer.take();
}

}  // namespace cairn::convert
