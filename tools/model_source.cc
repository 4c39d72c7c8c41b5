#include "tools/model_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "ckpt/format/manifest.h"
#include "ckpt/format/names.h"
#include "ckpt/retention/catalog.h"
#include "ckpt/store/posix_backend.h"
#include "converters/folder_kinds.h"
#include "converters/hf_folder.h"
#include "converters/import.h"
#include "converters/tokenizer_files.h"
#include "dsl/dsl.h"
#include "runtime/cuda/machine/module.h"
#include "runtime/cuda/recipe/refusals.h"
#include "runtime/evaluation/transforms.h"
#include "runtime/json/json.h"
#include "runtime/plan/device_choice.h"
#include "tools/run/folder/folder.h"
#include "tools/run/folder/lineage.h"
#include "tools/version.h"

namespace cairn::tools {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 30;

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

Status fill(const convert::WeightSource& source, inference::Session& session) {
  // Runs come tensor by tensor, so one tensor at a time is in memory twice.
  std::vector<float> whole;
  int64_t held = -1;
  for (const trainer::StateTensor& run : session.weights()) {
    const Shape& shape = session.plan().tensors[run.tensor].shape;
    if (held != run.tensor) {
      whole.resize(count_elems(shape));
      RT_TRY(source.read(run.tensor, whole));
      held = run.tensor;
    }
    convert::copy_box_out(whole.data(), shape, run.box, address_of(run.data.as<float>()));
  }
  return session.weights_ready();
}

/// The first CUDA device, where it can compute the model.
Result<std::unique_ptr<Machine>> machine_for(const Recipe& recipe) {
  RT_TRY_SET(Plan plan, inference::Session::plan_of(recipe));
  settle_device(plan.recipe, DeviceChoice::kCuda);
  for (const cuda::Refusal& one : cuda::refusals(plan)) {
    return Error{ErrorCode::kUnsupported, fmt::format("{} {}", one.field, one.message)};
  }
  RT_TRY_SET(std::unique_ptr<cuda::CudaMachine> opened, cuda::open_machine(tree_version(), {}));
  return std::unique_ptr<Machine>(std::move(opened));
}

/// What lies beside the weights: a tokenizer.json before a SentencePiece model, as transformers prefers it.
Result<std::unique_ptr<text::Tokenizer>> tokenizer_of_files(
    const std::function<Result<std::string>(std::string_view)>& file, const std::vector<std::string>& names,
    text::BesideFiles* files) {
  const auto has = [&](std::string_view name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  text::BesideFiles& beside = *files;
  for (const char* name : text::kBesideNames) {
    if (!has(name)) continue;
    RT_TRY_SET(*beside.find(name), file(name));
    RT_TRY(convert::check_passed_file(name, *beside.find(name)));  // an empty one too
  }
  if (has("tokenizer.json")) {
    RT_TRY_SET(const std::string tokenizer, file("tokenizer.json"));
    return text::make_hf_tokenizer(tokenizer, beside).with("tokenizer.json");
  }
  if (!has("tokenizer.model")) return std::unique_ptr<text::Tokenizer>();
  RT_TRY_SET(const std::string model, file("tokenizer.model"));
  return text::make_sentencepiece_tokenizer(model, beside).with("tokenizer.model");
}

/// eos_token_id of generation_config.json, else of config.json: a number or a list of numbers.
Result<std::vector<int32_t>> stop_ids(const std::function<Result<std::string>(std::string_view)>& file,
                                      const std::vector<std::string>& names) {
  for (const std::string_view name : {"generation_config.json", "config.json"}) {
    if (std::find(names.begin(), names.end(), name) == names.end()) continue;
    RT_TRY_SET(const std::string text, file(name));
    RT_TRY_SET(const nlohmann::json config, parse_python_object(text).with(name));
    if (!config.contains("eos_token_id")) continue;
    const nlohmann::json& ids = config["eos_token_id"];
    std::vector<int32_t> out;
    for (const nlohmann::json& id : ids.is_array() ? ids : nlohmann::json::array({ids})) {
      if (const auto fits = json_integer(id, 0, INT32_MAX)) out.push_back(static_cast<int32_t>(*fits));
    }
    if (!out.empty()) return out;
  }
  return std::vector<int32_t>();
}

nlohmann::json config_of(const std::function<Result<std::string>(std::string_view)>& file,
                         const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), convert::kConfigFile) == names.end()) return nullptr;
  const Result<std::string> text = file(convert::kConfigFile);
  return json_or_nothing(text.ok() ? text.value() : std::string(), JsonNumbers::kPython);
}

/// What ChatGLM2 and ChatGLM3 want before a text: [gMASK] and sop. Their own tokenizer numbers [MASK], [gMASK],
/// [sMASK], sop, eop behind the pieces of the SentencePiece model (tokenization_chatglm.py beside the published
/// weights).
std::vector<int32_t> chatglm_before(int64_t pieces) {
  return {static_cast<int32_t>(pieces + 1), static_cast<int32_t>(pieces + 3)};
}

InfillTokens infill_tokens(const Recipe& recipe, const nlohmann::json& config) {
  const ObjectiveConfig& objective = recipe.objective;
  if (recipe.model.mask != Mask::kPrefix) return {};
  if (objective.kind == ObjectiveConfig::Kind::kInfill) {
    const auto id = [](int64_t token) { return static_cast<int32_t>(token); };
    return {id(objective.mask_token), id(objective.gmask_token), id(objective.start_token), id(objective.end_token)};
  }
  const auto id = [&](const char* key) {
    const bool said = config.is_object() && config.contains(key);
    return static_cast<int32_t>(said ? json_integer(config[key], 0, INT32_MAX).value_or(-1) : -1);
  };
  return {id("mask_token_id"), id("gmask_token_id"), id("bos_token_id"), id("eos_token_id")};
}

}  // namespace

Result<int32_t> begin_token(const text::Tokenizer& tokenizer, const text::BesideFiles& files, bool sentencepiece) {
  RT_TRY_SET(const text::Beside beside, text::read_beside(files));
  const std::string named = beside.bos.empty() && sentencepiece ? "<s>" : beside.bos;
  const std::optional<int32_t> id = named.empty() ? std::nullopt : tokenizer.find(named);
  return id.value_or(tokenizer.eod());
}

bool is_hf_folder(const fs::path& path) {
  std::error_code error;
  return fs::exists(path / convert::kConfigFile, error);
}

text::TokenizerHashes trained_tokenizer(const fs::path& checkpoint, const ckpt::Manifest& manifest) {
  std::error_code error;
  const fs::path run = fs::weakly_canonical(checkpoint, error).parent_path().parent_path();
  const Result<Lineage> lineage = Lineage::read(run);
  if (!lineage.ok()) return {};
  const std::vector<LineageEntry>& entries = lineage.value().entries();
  const auto found = std::ranges::find(entries, ckpt::lineage_of(manifest), &LineageEntry::hash);
  return found == entries.end() ? text::TokenizerHashes{} : found->tokenizer;
}

Status check_tokenizer_name(const std::string& name) {
  if (auto kind = convert::foreign_tokenizer(name)) return Error{ErrorCode::kUnsupported, std::move(*kind)};
  return {};
}

Result<fs::path> resolve_source(const fs::path& path) {
  Result<fs::path> found = resolve_checkpoint(path);
  if (found.ok()) return found;
  return convert::named(path, std::move(found).error());
}

namespace {

/// The files beside the weights, and how to read one.
struct KeptFiles {
  std::function<Result<std::string>(std::string_view)> read;
  std::vector<std::string> names;
  nlohmann::json config;
  text::TokenizerHashes trained;  // of the recipe's tokenizer
  bool has(std::string_view name) const { return std::find(names.begin(), names.end(), name) != names.end(); }
};

/// The tokenizer of `name`, where it is not empty, else the model's own.
Status take_tokenizer(const std::string& name, const KeptFiles& files, LoadedModel& out) {
  text::BesideFiles beside;
  bool sentencepiece = false;
  const auto from_path = [&](const TokenizerConfig& config) -> Status {
    RT_TRY_SET(out.tokenizer, text::make_tokenizer(config));
    sentencepiece = config.kind == TokenizerConfig::Kind::kSentencePiece;
    if (config.kind != TokenizerConfig::Kind::kBytes) {
      RT_TRY_SET(beside, text::beside_files(config.path));
    }
    return {};
  };
  if (!name.empty()) {
    RT_TRY(check_tokenizer_name(name));
    RT_TRY(from_path(text::tokenizer_config(name)));
  } else {
    Result<std::unique_ptr<text::Tokenizer>> kept = tokenizer_of_files(files.read, files.names, &beside);
    if (!kept.ok()) return std::move(kept).error().with(out.from.string());
    out.tokenizer = std::move(kept).value();
    sentencepiece = out.tokenizer != nullptr && !files.has("tokenizer.json");
    if (!out.tokenizer && out.recipe.tokenizer.kind != TokenizerConfig::Kind::kNone) {
      RT_TRY_SET(const convert::FoundTokenizer found,
                 convert::find_tokenizer(out.recipe.tokenizer, out.from, files.trained));
      RT_TRY(from_path(found.tokenizer));
    }
  }
  if (!out.tokenizer) {
    return invalid(fmt::format(
        "{}: has no tokenizer (tokenizer.json or tokenizer.model beside the weights, or one in the recipe); "
        "name one with --tokenizer bytes or --tokenizer FILE",
        out.from.string()));
  }
  if (out.tokenizer->own_vocab() > out.recipe.model.vocab) {
    return invalid(fmt::format("{}: the tokenizer has {} ids, the model {} rows: they do not belong together",
                               out.from.string(), out.tokenizer->own_vocab(), out.recipe.model.vocab));
  }
  out.before = out.tokenizer->before();
  const bool chatglm = files.config.is_object() && json_field(files.config, "model_type") == "chatglm";
  if (chatglm && name.empty() && !files.has("tokenizer.json")) out.before = chatglm_before(out.tokenizer->own_vocab());
  if (out.stop.empty() && out.tokenizer->eod() >= 0) out.stop = {out.tokenizer->eod()};
  RT_TRY_SET(out.begin, begin_token(*out.tokenizer, beside, sentencepiece));
  return {};
}

}  // namespace

Result<OpenedModel> open_model(const fs::path& path, const std::string& tokenizer, const std::string& precision,
                               convert::WeightsOf weights_of, Works works) {
  OpenedModel opened{.io = std::make_unique<ckpt::PosixBackend>()};
  LoadedModel& out = opened.model;
  KeptFiles files;
  if (is_hf_folder(path)) {
    if (weights_of == convert::WeightsOf::kAverage) {
      return invalid(
          fmt::format("{}: --ema is for checkpoints; a Hugging Face folder has one set of weights", path.string()));
    }
    RT_TRY_SET(std::unique_ptr<convert::HfFolder> folder, convert::HfFolder::open(path));
    out.from = path;
    out.recipe = convert::recipe_for_import(folder->model(), {.tp = 1, .pp = 1, .dp = 1}, "hf", path);
    files.names = folder->kept_files();
    out.warnings = folder->warnings();
    files.read = [path](std::string_view name) { return convert::read_text_file(path / name, kMaxFileBytes); };
    opened.source = std::move(folder);
  } else {
    RT_TRY_SET(out.from, resolve_source(path));
    RT_TRY_SET(std::unique_ptr<convert::CheckpointWeights> weights,
               unless_removed({out.from},
                              convert::CheckpointWeights::open(*opened.io, out.from, dsl::decode_recipe, weights_of)));
    RT_TRY_SET(const std::string manifest,
               unless_removed({out.from}, convert::read_text_file(out.from / ckpt::kManifestName, kMaxFileBytes)));
    out.weights_hash = fmt::format("{:016x}", evaluation::hash_of(manifest));
    out.recipe = weights->recipe();
    files.names = weights->files();
    files.trained = trained_tokenizer(out.from, weights->manifest());
    files.read = [kept = weights.get()](std::string_view name) { return kept->file(name); };
    opened.source = std::move(weights);
  }
  if (!precision.empty()) out.recipe.precision = precision == "bf16" ? Precision::kBf16 : Precision::kF32;
  Result<std::vector<int32_t>> stop = stop_ids(files.read, files.names);
  if (!stop.ok()) return std::move(stop).error().with(out.from.string());
  out.stop = std::move(stop).value();
  files.config = config_of(files.read, files.names);
  out.infill = infill_tokens(out.recipe, files.config);
  if (const Status taken = take_tokenizer(tokenizer, files, out); !taken.ok()) {
    if (works == Works::kOnText || !tokenizer.empty()) return taken.error();
    out.tokenizer.reset();  // ids need none
  }
  return opened;
}

Result<LoadedModel> load_weights(OpenedModel opened, DeviceChoice device) {
  LoadedModel& out = opened.model;
  if (device == DeviceChoice::kCuda) {
    RT_TRY_SET(out.machine, machine_for(out.recipe));
  }
  RT_TRY_SET(out.session, inference::Session::make(out.recipe, out.machine.get()));
  RT_TRY(unless_removed({out.from}, fill(*opened.source, *out.session)));
  return std::move(out);
}

Result<LoadedModel> load_model(const fs::path& path, const std::string& tokenizer, const std::string& precision,
                               convert::WeightsOf weights_of, Works works, DeviceChoice device) {
  RT_TRY_SET(OpenedModel opened, open_model(path, tokenizer, precision, weights_of, works));
  return load_weights(std::move(opened), device);
}

}  // namespace cairn::tools
