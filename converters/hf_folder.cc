#include "converters/hf_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "converters/config_keys.h"
#include "converters/dist_files.h"
#include "converters/elements.h"
#include "converters/folder_kinds.h"
#include "converters/safetensors.h"
#include "converters/sharded_files.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;
constexpr int64_t kMaxKeptBytes = int64_t{256} << 20;
constexpr int64_t kMaxConfigDepth = 32;
constexpr int64_t kBlockElems = int64_t{1} << 20;  // of a stored tensor in memory at a time
// The copies that published modules have.
constexpr std::string_view kModuleEmbedding = ".embed_tokens.weight", kModuleHead = ".shared_head.head.weight";

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }

}  // namespace

namespace {

/// Names of passed files: tokenizers of transformers, SentencePiece, tiktoken and Mistral; templates; terms of use.
struct PassedName {
  std::string_view pattern;
  bool of_tokenizer = true;
};
constexpr PassedName kPassedNames[] = {{"generation_config.json", false},
                                       {"tokenizer.json"},
                                       {"tokenizer_config.json"},
                                       {"special_tokens_map.json"},
                                       {"added_tokens.json"},
                                       {"vocab.json"},
                                       {"vocab.txt"},
                                       {"merges.txt"},
                                       {"tokenizer.model*"},
                                       {"spiece.model"},
                                       {"sentencepiece*.model"},
                                       {"tekken.json"},
                                       {"*.tiktoken"},
                                       {"tokenization_*.py"},
                                       {"chat_template.json"},
                                       {"*.jinja"},
                                       {"preprocessor_config.json", false},
                                       {"LICENSE*", false},
                                       {"LICENCE*", false},
                                       {"NOTICE*", false},
                                       {"USE_POLICY*", false},
                                       {"COPYING*", false}};

const PassedName* passed_name(std::string_view name) {
  // A name in a folder, nothing else: checkpoints from elsewhere say which files they hold.
  if (name.empty() || name.front() == '.' || name.find('/') != name.npos || name.find('\0') != name.npos)
    return nullptr;
  const auto* const found =
      std::ranges::find_if(kPassedNames, [&](const PassedName& one) { return matches(one.pattern, name); });
  return found == std::end(kPassedNames) ? nullptr : found;
}

}  // namespace

bool is_passed_file(std::string_view name) { return passed_name(name) != nullptr; }

bool is_tokenizer_file(std::string_view name) {
  const PassedName* const found = passed_name(name);
  return found != nullptr && found->of_tokenizer;
}

Status check_passed_file(std::string_view name, std::string_view content) {
  if (!name.ends_with(".json") || !is_passed_file(name)) return {};
  const Result<nlohmann::json> read = parse_python_object(content);
  return read.ok() ? Status() : Status(read.error()).with(name);
}

std::vector<std::string> passed_files_in(const fs::path& dir) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    // The reader refuses what is no plain file, such as a link to nothing.
    std::error_code ignored;
    const bool folder = fs::is_directory(it->path(), ignored) && !name.ends_with(".json");
    if (is_passed_file(name) && !folder) out.push_back(name);
  }
  std::ranges::sort(out);
  return out;
}

std::string_view problem_name(TensorProblem::Kind kind) {
  switch (kind) {
    case TensorProblem::Kind::kMissing:
      return "missing";
    case TensorProblem::Kind::kUnexpected:
      return "unexpected";
    case TensorProblem::Kind::kShape:
      return "shape";
    case TensorProblem::Kind::kDtype:
      return "dtype";
    case TensorProblem::Kind::kTwice:
      return "twice";
    case TensorProblem::Kind::kTie:
      return "tie";
    case TensorProblem::Kind::kLayers:
      return "layers";
  }
  return "?";
}

std::string TensorProblem::text() const {
  const std::string place = file.empty() ? tensor : fmt::format("{}: {}", file, tensor);
  switch (kind) {
    case Kind::kMissing:
      return fmt::format("{}: missing{}, expected {}", place, found.empty() ? "" : ", for " + found, expected);
    case Kind::kUnexpected:
      return fmt::format("{}: unexpected, {}", place, found);
    case Kind::kShape:
      return fmt::format("{}: shape {}, expected {}", place, found, expected);
    case Kind::kDtype:
      return fmt::format("{}: dtype {}, weights must be {}", place, found, expected);
    case Kind::kTwice:
      return fmt::format("{}: there twice, as {} and as {}", place, expected, found);
    case Kind::kTie:
      return fmt::format("{} {}", tensor, found);
    case Kind::kLayers:
      return fmt::format("config.json says {} layers, the files have {} (from {} on): let both have the same number",
                         expected, found, tensor);
  }
  return place;
}

namespace {

/// A name with its numbers as stars: what tensors of many layers have in common.
std::string kind_of(const TensorProblem& problem) {
  std::string out(problem_name(problem.kind));
  std::string_view rest = problem.tensor;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    out += fmt::format(".{}", number ? "*" : part);
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
  }
  return out;
}

}  // namespace

namespace {

/// Words that stand before the names of the model in a file, "policy.", where without them they are those that are
/// missing: an unknown wrapper. `explained`: the problems that are of these names.
std::string strange_prefix(const std::vector<TensorProblem>& problems, std::set<const TensorProblem*>* explained) {
  std::map<std::string_view, const TensorProblem*> missing;  // with and without the backbone's prefix
  int64_t count = 0;
  for (const TensorProblem& problem : problems) {
    if (problem.kind != TensorProblem::Kind::kMissing) continue;
    ++count;
    const std::string_view name = problem.tensor, rest = name.substr(name.find('.') + 1);
    missing[name] = &problem;
    if (rest.find('.') != rest.npos) missing.emplace(rest, &problem);
  }
  std::map<std::string_view, std::vector<const TensorProblem*>> by_prefix;
  for (const TensorProblem& problem : problems) {
    if (problem.kind != TensorProblem::Kind::kUnexpected) continue;
    const std::string_view name = problem.tensor;
    for (size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      const auto found = missing.find(name.substr(dot + 1));
      if (found == missing.end()) continue;
      by_prefix[name.substr(0, dot + 1)].insert(by_prefix[name.substr(0, dot + 1)].end(), {&problem, found->second});
      break;
    }
  }
  const auto most = std::ranges::max_element(by_prefix, {}, [](const auto& one) { return one.second.size(); });
  if (most == by_prefix.end() || std::ssize(most->second) < count) return {};  // two for a name: less than half of them
  explained->insert(most->second.begin(), most->second.end());
  return std::string(most->first);
}

}  // namespace

std::vector<std::string> problem_lines(const std::vector<TensorProblem>& problems) {
  constexpr size_t kOfAKind = 3, kLines = 60;
  std::set<const TensorProblem*> explained;
  const std::string prefix = strange_prefix(problems, &explained);
  std::map<std::string, size_t> counts, shown;
  std::vector<std::string> out;
  if (!prefix.empty()) {
    out.push_back(
        fmt::format("{} names of the model have \"{}\" before them, which the program that wrote them added: "
                    "take it off the names",
                    explained.size() / 2, prefix));
  }
  for (const TensorProblem& problem : problems) {
    if (!explained.contains(&problem)) ++counts[kind_of(problem)];
  }
  size_t kinds_hidden = 0;
  for (const TensorProblem& problem : problems) {
    if (explained.contains(&problem)) continue;
    const std::string kind = kind_of(problem);
    const size_t at = shown[kind]++;
    if (out.size() >= kLines) {
      kinds_hidden += at == 0 ? 1 : 0;
    } else if (at < kOfAKind || counts[kind] == kOfAKind + 1) {
      out.push_back(problem.text());
    } else if (at == kOfAKind) {
      out.push_back(fmt::format("and {} more of that kind", counts[kind] - kOfAKind));
    }
  }
  if (kinds_hidden > 0) out.push_back(fmt::format("and {} more kinds of things", kinds_hidden));
  return out;
}

Result<std::unique_ptr<HfFolder>> HfFolder::open(const fs::path& dir, const HfOptions& options) {
  RT_TRY_SET(std::unique_ptr<HfFolder> out, inspect(dir, options));
  RT_TRY(out->refuse_problems());
  return out;
}

Result<std::unique_ptr<HfFolder>> HfFolder::open_with(const fs::path& dir, std::unique_ptr<WeightsFile> file,
                                                      const HfOptions& options, const std::string& config) {
  RT_TRY_SET(std::unique_ptr<HfFolder> out, inspect(dir, std::move(file), options, config));
  RT_TRY(out->refuse_problems());
  return out;
}

Status HfFolder::refuse_problems() const {
  if (problems_.empty()) return {};
  const fs::path of = weights_->files().size() == 1 ? weights_->files().front()->path() : dir_;
  std::string text =
      fmt::format("{}: its tensors are not those of the {} model in {}:", (fs::is_directory(of) ? of : dir_).string(),
                  family_.model_type, fs::is_directory(of) && of != dir_ ? (dir_ / kConfigFile).string() : kConfigFile);
  for (const std::string& line : problem_lines(problems_)) text += "\n  " + line;
  return invalid(std::move(text));
}

Result<std::unique_ptr<HfFolder>> HfFolder::inspect(const fs::path& dir, const HfOptions& options) {
  return inspect(dir, nullptr, options, "");
}

Result<std::unique_ptr<HfFolder>> HfFolder::inspect(const fs::path& dir, std::unique_ptr<WeightsFile> file,
                                                    const HfOptions& options, const std::string& config) {
  std::unique_ptr<HfFolder> out(new HfFolder());
  out->dir_ = dir;
  out->config_text_ = config;
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    return named(dir, invalid(fmt::format("{}: is no folder; expected one with config.json and model.safetensors",
                                          dir.string())));
  }
  if (file == nullptr) RT_TRY(check_no_adapter(dir));
  RT_TRY(out->read_config(std::move(file)));
  RT_TRY(out->match(options).with(dir.string()));
  if (out->weights_->index() == kIndexFile) out->kept_files_.emplace_back(kIndexFile);
  for (std::string& name : passed_files_in(dir)) out->kept_files_.push_back(std::move(name));
  if (config.empty()) out->kept_files_.emplace_back(kConfigFile);
  for (const std::string& name : out->kept_files_) {  // sooner than an import would
    RT_TRY(check_inside(dir, name));
    RT_TRY(open_foreign(dir / name));
    if (!name.ends_with(".json") || !is_passed_file(name)) continue;
    RT_TRY_SET(const std::string content, read_text_file(dir / name, kMaxKeptBytes));
    RT_TRY(check_passed_file(name, content).with(dir.string()));
  }
  return out;
}

Status HfFolder::read_config(std::unique_ptr<WeightsFile> given) {
  const fs::path path = dir_ / kConfigFile;
  if (config_text_.empty() && !is_plain_file(path)) {
    return named(dir_, invalid(fmt::format("{}: has no config.json; is this the folder that save_pretrained wrote?",
                                           dir_.string())));
  }
  if (config_text_.empty()) {
    RT_TRY_SET(config_text_, read_text_file(path, kMaxConfigBytes));
  }
  Result<nlohmann::json> config =
      parse_json_strictly(config_text_, "the config", kMaxConfigDepth, 0, JsonNumbers::kPython);
  if (!config.ok()) return std::move(config).error().with(path.string());
  std::vector<std::string> notes;
  Result<ModelConfig> model = model_from_config(config.value(), &notes);
  if (!model.ok()) return std::move(model).error().with(path.string());
  model_ = model.value();
  RT_TRY_SET(family_, find_family(config.value()["model_type"].get<std::string>()));
  not_read_ = unread_keys(family_, model_, config.value()).not_read;
  if (!not_read_.empty()) {
    notes.push_back(fmt::format("not read: {} of config.json: the {} family here has no such key",
                                fmt::join(not_read_, ", "), family_.model_type));
  }
  for (const char* key : {"dtype", "torch_dtype"}) {  // 5.x, 4.x
    if (config_dtype_.empty() && config.value().contains(key) && config.value()[key].is_string())
      config_dtype_ = config.value()[key];
  }
  fs::path dist;  // beside weights it is the state of the program that trained them
  if (given == nullptr && !WeightsFolder::has_weights(dir_)) {
    RT_TRY_SET(dist, find_dist_files(dir_));
  }
  if (given != nullptr) {
    weights_ = std::make_unique<WeightsFolder>(WeightsFolder::of(std::move(given)));
  } else if (!dist.empty()) {
    RT_TRY_SET(std::unique_ptr<DistFiles> files, DistFiles::open(dist, family_, model_));
    weights_ = std::make_unique<WeightsFolder>(WeightsFolder::of(std::move(files)));
  } else if (family_.joins.empty()) {
    RT_TRY_SET(WeightsFolder weights, WeightsFolder::open(dir_, config.value()));
    weights_ = std::make_unique<WeightsFolder>(std::move(weights));
  } else {
    RT_TRY_SET(const fs::path ranks, find_sharded_files(dir_));
    if (ranks.empty())
      return invalid(
          fmt::format("{}: has no files of ranks, mp_rank_00 and so on, and not exactly one .pt file", dir_.string()));
    RT_TRY_SET(std::unique_ptr<ShardedFiles> file, ShardedFiles::open(ranks, family_, model_));
    weights_ = std::make_unique<WeightsFolder>(WeightsFolder::of(std::move(file)));
  }
  warnings_ = weights_->warnings();
  warnings_.insert(warnings_.begin(), notes.begin(), notes.end());
  // Each layer and each expert has tensors of its own. The tables of what is expected are as long as config.json says:
  // with a number that no file supports they would take all memory before anything is compared.
  int64_t found = 0;
  for (const FolderTensor& tensor : weights_->tensors()) {
    const bool stack = tensor.shape.size() == 3 && count_elems(tensor.shape) > 0;
    found += stack ? tensor.shape[0] : 1;
  }
  const int64_t experts = std::max<int64_t>(1, model_.moe.experts);
  const int64_t sparse = model_.moe.experts > 0 ? model_.layers - std::ssize(model_.moe.dense_layers) : 0;
  if (model_.layers > found || experts > found || sparse * experts > found) {
    const std::string of_experts = sparse == 0               ? ""
                                   : sparse == model_.layers ? fmt::format(" of {} experts", experts)
                                                             : fmt::format(", {} of {} experts", sparse, experts);
    return invalid(fmt::format("{}: it says {} layers{}, and the weights beside it are {} tensors", path.string(),
                               model_.layers, of_experts, found));
  }
  return {};
}

Result<std::string> HfFolder::first_difference(const FolderTensor& a, const FolderTensor& b) const {
  if (a.dtype != b.dtype || a.shape != b.shape) {
    return fmt::format("{} {} and {} {}", a.dtype, to_string(a.shape), b.dtype, to_string(b.shape));
  }
  if (!is_float_dtype(a.dtype)) return fmt::format("{} is no dtype of weights", a.dtype);
  const int64_t count = count_elems(a.shape);
  std::vector<float> left(static_cast<size_t>(std::min(count, kBlockElems))), right(left.size());
  for (int64_t at = 0; at < count; at += kBlockElems) {
    const int64_t n = std::min(kBlockElems, count - at);
    RT_TRY(weights_->read(a, at, n, left.data()));
    RT_TRY(weights_->read(b, at, n, right.data()));
    // As bytes: NaNs may be equal, zeros may differ.
    if (std::memcmp(left.data(), right.data(), static_cast<size_t>(n) * sizeof(float)) == 0) continue;
    int64_t k = 0;
    while (std::memcmp(&left[k], &right[k], sizeof(float)) == 0) ++k;
    return fmt::format("first at element {} of {}", at + k, count);
  }
  return std::string();
}

void HfFolder::add_problem(TensorProblem::Kind kind, const FolderTensor* tensor, std::string name, std::string found,
                           std::string expected) {
  problems_.push_back(
      {kind, tensor != nullptr ? tensor->file_name() : "", std::move(name), std::move(found), std::move(expected)});
}

/// The model has the modules that config.json and the weights have both.
void HfFolder::settle_mtp(const HfOptions& options) {
  const auto count = std::ranges::count_if(weights_->tensors(), [&](const FolderTensor& tensor) {
    return later_layer(family_, model_, without_wrappers(tensor.name)) >= 0;
  });
  const std::string after = fmt::format("of layers from {}{} on", family_.later_layers, model_.layers);
  const int64_t said =
      json_or_nothing(config_text_, JsonNumbers::kPython).contains("num_nextn_predict_layers") ? model_.mtp.depth : 0;
  if (options.drop_mtp || count == 0) model_.mtp = {};
  if (said > 0 && count == 0) {
    warnings_.push_back(fmt::format(
        "config.json says that {} layers predict further tokens, and the weights have no tensors {}", said, after));
  } else if (count > 0 && model_.mtp.depth == 0) {
    warnings_.push_back(fmt::format("{} tensors {} are left out: they predict further tokens, {}", count, after,
                                    options.drop_mtp ? "and are not wanted" : "and config.json does not say so"));
  }
}

namespace {

/// The names that trainers of values and rewards, and classes that classify, give their heads.
bool is_scoring_head(std::string_view stored) {
  static constexpr std::string_view kHeads[] = {
      "v_head.*",       "value_head.*",          "critic_head.*",        "score.*",      "reward_head.*",
      "rm_head.*",      "regression_head.*",     "regression_layer.*",   "classifier.*", "cls_head.*",
      "ranking_head.*", "classification_head.*", "sequence_classifier.*"};
  const std::string plain = without_wrappers(stored);
  std::string_view name = plain;
  if (name.starts_with("model.")) name.remove_prefix(6);
  return std::ranges::any_of(kHeads, [&](std::string_view pattern) { return matches(pattern, name); });
}

/// The parts that peft puts into the names of a model that it has changed.
bool is_adapter_tensor(std::string_view stored) {
  static constexpr std::string_view kParts[] = {
      "*.lora_A.*",   "*.lora_B.*", "*.lora_embedding_?*", "*.base_layer.*", "*.lora_magnitude_vector*",
      "*.hada_w?_?*", "*.ia3_l*",   "*.modules_to_save.*", "*.oft_?*"};
  return std::ranges::any_of(kParts, [&](std::string_view pattern) { return matches(pattern, stored); });
}

/// The first number in a name, a layer's, and the name with another one in its place.
struct LayerName {
  int64_t layer = -1;
  std::string front, rest;
  std::string with(int64_t other) const { return fmt::format("{}{}{}", front, other, rest); }
};
LayerName layer_name(const std::string& name) {
  for (size_t at = 0, end = 0; at < name.size(); at = end + 1) {
    end = std::min(name.find('.', at), name.size());
    LayerName out{.front = name.substr(0, at), .rest = name.substr(end)};
    const auto [stop, error] = std::from_chars(name.data() + at, name.data() + end, out.layer);
    if (error == std::errc() && stop == name.data() + end && out.layer >= 0) return out;
  }
  return {};
}

/// All names that the table has for the model.
std::set<std::string> known_names(const Family& family, const ModelConfig& model) {
  std::set<std::string> out = {head_name(family)};
  for (const Mapping& mapping : tensor_map(family, model)) out.insert(mapping.stored);
  for (const std::optional<Mapping>& other : other_map(family, model)) {
    if (other) out.insert(other->stored);
  }
  return out;
}

}  // namespace

/// The folder's tensors by what they are called with the prefix, of all names that the family can have. `copies`: those
/// of embedding and head that belong to modules.
HfFolder::Found HfFolder::find_known(std::vector<const FolderTensor*>* copies) {
  const std::set<std::string> known = known_names(family_, model_);
  Found found;
  std::vector<std::string> passed_over;
  for (const FolderTensor& tensor : weights_->tensors()) {
    const std::string name = known_name(family_, known, tensor.name);
    const int64_t later = name.empty() ? later_layer(family_, model_, without_wrappers(tensor.name)) : -1;
    if (later >= 0 && model_.mtp.depth == 0) continue;  // settle_mtp() has told
    if (later >= 0 && (tensor.name.ends_with(kModuleEmbedding) || tensor.name.ends_with(kModuleHead))) {
      copies->push_back(&tensor);
      continue;
    }
    if (name.empty() && is_ignored_tensor(family_, tensor.name)) {
      ignored_.push_back(tensor.name);
      continue;
    }
    if (name.empty() && is_passed_over(family_, tensor.name)) {
      passed_over.push_back(tensor.name);
      continue;
    }
    if (name.empty() && is_scoring_head(tensor.name)) {
      heads_.push_back(&tensor);
      continue;
    }
    if (name.empty()) {
      add_problem(TensorProblem::Kind::kUnexpected, &tensor, tensor.name,
                  fmt::format("{} {}", tensor.dtype, to_string(tensor.shape)), "");
      continue;
    }
    const auto [at, is_new] = found.emplace(name, &tensor);
    if (!is_new) add_problem(TensorProblem::Kind::kTwice, &tensor, name, tensor.name, at->second->name);
  }
  if (!passed_over.empty()) {
    warnings_.push_back(
        fmt::format("{} tensor{} with \"{}\" in the name left out, such as {}: transformers passes over these",
                    passed_over.size(), passed_over.size() == 1 ? "" : "s", family_.passed_over, passed_over.front()));
  }
  return found;
}

Status HfFolder::refuse_adapter_tensors() const {
  for (const FolderTensor& tensor : weights_->tensors()) {
    if (!is_adapter_tensor(tensor.name)) continue;
    return Error{
        ErrorCode::kUnsupported,
        fmt::format("{}: {} is of an adapter that was saved unmerged with its model; adapters are not read: let "
                    "peft merge it (merge_and_unload, then save_pretrained)",
                    tensor.file_name(), tensor.name)};
  }
  return {};
}

/// Heads that score texts: beside the model's own they are left out, as transformers does; in its place they make
/// another model.
Status HfFolder::settle_heads(const Found& found) {
  const nlohmann::json config = json_or_nothing(config_text_, JsonNumbers::kPython);
  const auto classes = config.find("architectures");
  std::string scores;
  for (const nlohmann::json& one : classes != config.end() && classes->is_array() ? *classes : nlohmann::json()) {
    const std::string name = one.is_string() ? one.get<std::string>() : std::string();
    for (const char* end : {"ForSequenceClassification", "ForTokenClassification", "RewardModel", "ForRewardModel"}) {
      if (name.ends_with(end)) scores = name;
    }
  }
  const bool own_head = model_.tied_embeddings || found.contains(head_name(family_));
  if (scores.empty() && (heads_.empty() || own_head)) {
    std::string names;
    for (const FolderTensor* head : heads_) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", head->name);
      ignored_.push_back(head->name);
    }
    if (!names.empty()) warnings_.push_back(fmt::format("{}: a value head, left out as transformers does", names));
    return {};
  }
  if (heads_.empty() && own_head && !model_.tied_embeddings) return {};  // the class is wrong: the head exists
  const FolderTensor* head = heads_.empty() ? nullptr : heads_.front();
  return Error{
      ErrorCode::kUnsupported,
      fmt::format("it is a reward model or a classifier{}{}: it scores texts and predicts no tokens; give the "
                  "causal model that it was made from",
                  scores.empty() ? "" : fmt::format(", {}", scores),
                  head == nullptr ? ""
                                  : fmt::format(", with {} {} in {}", head->name, to_string(head->shape),
                                                own_head ? "it" : fmt::format("place of {}", head_name(family_))))};
}

/// Where config.json and the files have another number of layers, that is said once, not for each tensor.
void HfFolder::settle_layers() {
  if (problems_.empty()) return;
  const std::set<std::string> known = known_names(family_, model_);
  std::map<int64_t, int64_t> tensors;  // of each layer in the files
  for (const FolderTensor& tensor : weights_->tensors()) {
    const LayerName name = layer_name(without_wrappers(tensor.name));
    if (name.layer < 0) continue;
    const auto is_known = [&](int64_t other) { return !known_name(family_, known, name.with(other)).empty(); };
    if (is_known(0) || is_known(model_.layers - 1)) ++tensors[name.layer];
  }
  int64_t layers = 0;  // a stray tensor is no layer
  while (tensors.contains(layers) && tensors[layers] > (layers < model_.layers ? 0 : 1)) ++layers;
  if (layers == 0 || layers == model_.layers) return;
  std::string first;
  std::erase_if(problems_, [&](const TensorProblem& problem) {
    const bool missing = problem.kind == TensorProblem::Kind::kMissing;
    if (!missing && problem.kind != TensorProblem::Kind::kUnexpected) return false;
    const int64_t layer = layer_name(without_wrappers(problem.tensor)).layer;
    if (layer < std::min(layers, model_.layers) || layer >= std::max(layers, model_.layers)) return false;
    if (first.empty()) first = problem.tensor;
    return true;
  });
  if (first.empty()) return;
  problems_.insert(problems_.begin(), {.kind = TensorProblem::Kind::kLayers,
                                       .tensor = std::move(first),
                                       .found = fmt::format("{}", layers),
                                       .expected = fmt::format("{}", model_.layers)});
}

/// The name under which the folder has the embedding, of all that the family can have; the table's where it has none.
std::string HfFolder::embedding_name(const Found& found) const {
  const auto is_embedding = [](const Mapping& mapping) { return mapping.logical == "embed.tokens"; };
  const auto mappings = tensor_map(family_, model_);
  const std::string own = std::ranges::find_if(mappings, is_embedding)->stored;
  if (found.contains(own)) return own;
  for (const std::optional<Mapping>& other : other_map(family_, model_)) {
    if (other && is_embedding(*other) && found.contains(other->stored)) return other->stored;
  }
  return own;
}

Status HfFolder::settle_copies(const std::vector<const FolderTensor*>& copies, const Found& found) {
  const std::string embedding = embedding_name(found);
  for (const FolderTensor* copy : copies) {
    const bool is_head = copy->name.ends_with(kModuleHead) && !model_.tied_embeddings;
    const auto own = found.find(is_head ? head_name(family_) : embedding);
    if (own == found.end()) continue;  // missing, which is reported
    RT_TRY_SET(const std::string difference, first_difference(*own->second, *copy));
    if (difference.empty()) {
      ignored_.push_back(copy->name);
    } else {
      add_problem(
          TensorProblem::Kind::kTie, nullptr, copy->name,
          fmt::format("and {} differ ({}), and what predicts further tokens has no embedding and no head of its "
                      "own here; --drop-mtp leaves it out",
                      own->first, difference),
          "");
    }
  }
  return {};
}

Status HfFolder::settle_tie(const HfOptions& options, Found& found) {
  const std::string head_key = head_name(family_);
  const auto head = found.find(head_key);
  const std::string embedding_key = embedding_name(found);
  const auto embedding = found.find(embedding_key);
  if (!model_.tied_embeddings) {
    if (head == found.end() && embedding != found.end()) {
      add_problem(TensorProblem::Kind::kTie, nullptr, head_key,
                  "must be stored, for tie_word_embeddings is false; set it to true if the model shares its embedding",
                  "");
    }
    return {};
  }
  if (head == found.end()) return {};
  if (embedding == found.end()) {
    found[embedding_key] = head->second;
    found.erase(head_key);
    return {};
  }
  RT_TRY_SET(const std::string difference, first_difference(*embedding->second, *head->second));
  if (difference.empty()) {
    ignored_.push_back(head->second->name);
    found.erase(head);
  } else if (options.untie) {
    model_.tied_embeddings = false;
    warnings_.push_back(fmt::format("{} and {} differ though tie_word_embeddings is true: imported as two tensors",
                                    embedding_key, head_key));
  } else {
    add_problem(TensorProblem::Kind::kTie, nullptr, embedding_key,
                fmt::format("and {} differ ({}) though tie_word_embeddings is true; --untie imports both, as an untied "
                            "model",
                            head_key, difference),
                "");
    found.erase(head);
  }
  return {};
}

/// Of a tensor that is there under another name of the family's: that name's mapping. So too where neither is there and
/// the folder has such names: what is missing is reported as its writer calls it.
void HfFolder::take_other_names(const Found& found) {
  std::vector<std::optional<Mapping>> others = other_map(family_, model_);
  const auto is_there = [&](const std::optional<Mapping>& other) { return other && found.contains(other->stored); };
  const bool any = std::ranges::any_of(others, is_there);
  std::set<std::string> doubled;
  for (Mapping& mapping : mappings_) {
    std::optional<Mapping>& renamed = others[static_cast<size_t>(mapping.tensor)];
    if (!any || !renamed) continue;
    const auto own = found.find(mapping.stored), other = found.find(renamed->stored);
    if (own != found.end() && other != found.end()) {
      if (!doubled.insert(other->first).second) continue;
      add_problem(TensorProblem::Kind::kTwice, other->second, other->first, other->second->name, own->second->name);
    } else if (own == found.end()) {
      mapping = std::move(*renamed);
    }
  }
}

Status HfFolder::match(const HfOptions& options) {
  settle_mtp(options);
  std::vector<const FolderTensor*> copies;
  RT_TRY(refuse_adapter_tensors());
  Found found = find_known(&copies);
  RT_TRY(settle_heads(found));
  RT_TRY(settle_tie(options, found));
  RT_TRY(settle_copies(copies, found));
  if (has_unit_head()) {
    warnings_.push_back(
        fmt::format("the rows of {} are divided by their lengths, as the published code does with {} "
                    "tokens",
                    head_name(family_), model_.vocab));
  }
  tensors_ = model_tensors(model_);
  mappings_ = tensor_map(family_, model_);
  take_other_names(found);
  std::set<std::string> told;
  for (const Mapping& mapping : mappings_) {
    const std::string expected = to_string(mapping.shape);
    const auto it = found.find(mapping.stored);
    stored_.push_back({mapping.stored, it == found.end() ? nullptr : it->second});
    if (!told.insert(mapping.stored).second) continue;  // q, k and v may share one stored tensor
    if (it == found.end()) {
      const auto unlisted = weights_->unlisted().find(mapping.stored);
      add_problem(TensorProblem::Kind::kMissing, nullptr, mapping.stored,
                  unlisted == weights_->unlisted().end() ? "" : "the index does not list it in " + unlisted->second,
                  expected);
    } else if (const FolderTensor& tensor = *it->second; !is_float_dtype(tensor.dtype)) {
      add_problem(TensorProblem::Kind::kDtype, &tensor, tensor.name, tensor.dtype, "F32, BF16, F16 or F64");
    } else if (to_string(tensor.shape) != expected) {
      add_problem(TensorProblem::Kind::kShape, &tensor, tensor.name, to_string(tensor.shape), expected);
    }
  }
  settle_layers();
  settle_dtype();
  return {};
}

std::pair<size_t, size_t> HfFolder::mappings_of(int64_t tensor) const {
  const auto [begin, end] = std::ranges::equal_range(mappings_, tensor, {}, &Mapping::tensor);
  return {begin - mappings_.begin(), end - mappings_.begin()};
}

void HfFolder::settle_dtype() {
  const DType said = config_dtype_ == "bfloat16"  ? DType::kBf16
                     : config_dtype_ == "float16" ? DType::kF16
                                                  : DType::kF32;
  const auto dtype_of = [&](const NamedTensor& stored) -> std::optional<DType> {
    if (stored.tensor == nullptr || !is_float_dtype(stored.tensor->dtype)) return std::nullopt;
    return stored.tensor->scale != nullptr ? said : safetensors_dtype(stored.tensor->dtype).value();
  };
  std::map<DType, int64_t> elems;
  std::set<std::string_view> seen, told;  // stored tensors
  for (const NamedTensor& stored : stored_) {
    const std::optional<DType> dtype = dtype_of(stored);
    if (dtype && seen.insert(stored.name).second) elems[*dtype] += count_elems(stored.tensor->shape);
  }
  int64_t most = 0;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBf16, DType::kF16}) {
    if (!elems.contains(dtype) || elems[dtype] <= most) continue;
    dtype_ = dtype;
    most = elems[dtype];
  }
  for (size_t k = 0; k < stored_.size(); ++k) {
    const std::optional<DType> dtype = dtype_of(stored_[k]);
    const TensorSpec& tensor = tensors_[static_cast<size_t>(mappings_[k].tensor)];
    if (!dtype || (*dtype == dtype_ && !tensor.balances)) continue;
    const auto [begin, end] = mappings_of(mappings_[k].tensor);
    const bool mixed = std::any_of(stored_.begin() + begin, stored_.begin() + end,
                                   [&](const NamedTensor& row) { return dtype_of(row) != dtype; });
    own_dtypes_[tensor.name] = mixed || *dtype == DType::kF64 ? DType::kF32 : *dtype;
    const bool router = tensor.balances || tensor.name.ends_with(".moe.router.weight");  // classes keep it in float32
    if (*dtype != dtype_ && !(router && *dtype == DType::kF32)) told.insert(stored_[k].name);
  }
  if (!told.empty()) {
    warnings_.push_back(fmt::format("the weights have several dtypes: {} tensors of {} are not {}", told.size(),
                                    seen.size(), dtype_name(dtype_)));
  }
  if (elems.contains(DType::kF64)) warnings_.push_back("F64 weights are rounded to float32");
}

namespace {

/// Of each of `lines` lines of `width` numbers, every `stride`-th becomes the next of `count` numbers; lines then lie
/// close together.
void keep_every(int64_t stride, int64_t lines, int64_t width, int64_t count, float* block) {
  if (stride == 1) return;
  for (int64_t line = 0; line < lines; ++line) {
    const float* const from = block + line * width;
    float* const to = block + line * count;  // never ahead of what is read
    for (int64_t k = 0; k < count; ++k) to[k] = from[k * stride];
  }
}

}  // namespace

std::string HfFolder::identity() const {
  std::string out = config_text_ + "\n";
  for (const auto& file : weights_->files()) {
    std::error_code ignored;
    for (const fs::path& path : file->paths()) {
      out += fmt::format("{} {} {}\n", path.filename().string(), fs::file_size(path, ignored),
                         fs::last_write_time(path, ignored).time_since_epoch().count());
    }
    for (const SafeTensor& tensor : file->tensors())
      out += fmt::format("{} {} {} {}\n", tensor.name, tensor.dtype, to_string(tensor.shape), tensor.begin);
  }
  return out;
}

bool HfFolder::has_unit_head() const { return family_.unit_head_vocab > 0 && family_.unit_head_vocab == model_.vocab; }

/// Rows [lo, hi) of the head, each divided by its length, and of these the columns of `box`. Source: Baichuan 2's
/// NormHead, torch.nn.functional.normalize.
Status HfFolder::read_unit_rows(const FolderTensor& stored, const Box& box, std::span<float> out) const {
  constexpr double kLeast = 1e-12;
  const int64_t width = stored.shape[1], columns = box.extent(1);
  const int64_t at_once = std::max<int64_t>(1, kBlockElems / width);
  std::vector<float> block(static_cast<size_t>(std::min(at_once, box.extent(0)) * width));
  for (int64_t row = box.lo[0]; row < box.hi[0]; row += at_once) {
    const int64_t rows = std::min(at_once, box.hi[0] - row);
    RT_TRY(weights_->read_rect(stored, row, rows, 0, width, block.data()));
    for (int64_t r = 0; r < rows; ++r) {
      const std::span<const float> whole = std::span(block).subspan(static_cast<size_t>(r * width), width);
      double squares = 0;
      for (const float value : whole) squares += static_cast<double>(value) * value;
      const double length = std::max(std::sqrt(squares), kLeast);
      float* const to = out.data() + (row - box.lo[0] + r) * columns;
      for (int64_t c = 0; c < columns; ++c) to[c] = static_cast<float>(whole[box.lo[1] + c] / length);
    }
  }
  return {};
}

/// Of a matrix whose rows are stored by themselves, from mappings()[first] on.
Status HfFolder::read_vectors(size_t first, const Box& box, std::span<float> out) const {
  const int64_t columns = box.extent(1);
  for (int64_t row = box.lo[0]; row < box.hi[0]; ++row, out = out.subspan(static_cast<size_t>(columns))) {
    const FolderTensor& stored = *stored_[first + static_cast<size_t>(row)].tensor;
    RT_TRY(weights_->read(stored, box.lo[1], columns, out.data()));
  }
  return {};
}

Status HfFolder::read_box(int64_t tensor, const Box& box, std::span<float> out) const {
  RT_CHECK(static_cast<int64_t>(out.size()) == box.count_elems(), "{}: {} floats", tensors_[tensor].name, out.size());
  if (out.empty()) return {};
  const size_t begin = mappings_of(tensor).first;
  const Mapping& mapping = mappings_[begin];
  if (mapping.only_row >= 0) return read_vectors(begin, box, out);
  const FolderTensor& stored = *stored_[begin].tensor;
  if (has_unit_head() && mapping.logical == "head.weight") return read_unit_rows(stored, box, out);
  const Shape& shape = tensors_[tensor].shape;
  const bool vector = shape.size() < 2;
  const int64_t column = vector ? 0 : box.lo.back(), columns = vector ? 1 : box.extent(box.dims() - 1);
  const std::vector<RowRun> runs = row_runs(mapping, shape);
  // Rows of the matrix that the box has, piece by piece: of more than two dims they are not one stretch.
  Shape outer = shape, outer_lo = box.lo, outer_hi = box.hi;
  if (!vector) {
    outer.pop_back();
    outer_lo.pop_back();
    outer_hi.pop_back();
  }
  float* to = out.data();
  std::vector<int64_t> at = outer_lo;
  const size_t last = outer.size() - 1;
  while (true) {
    const int64_t first = flat_offset(outer, at), end = first + outer_hi[last] - outer_lo[last];
    for (const RowRun& run : runs) {
      const int64_t begin = std::max(first, run.logical), stop = std::min(end, run.logical + run.count);
      if (begin >= stop) continue;
      float* target = to + (begin - first) * columns;
      const int64_t place = run.stored + (begin - run.logical) * run.stride, rows = stop - begin;
      const int64_t span = RowRun{.count = rows, .stride = run.stride}.span();  // what lies between is read too
      if (vector && mapping.shape.size() == 2 && !mapping.transpose) {          // stored as a matrix of one row
        RT_TRY(weights_->read(stored, place, rows, target));
        continue;
      }
      if (!mapping.transpose && run.stride == 1) {
        RT_TRY(weights_->read_rect(stored, place, rows, column, columns, target));
        continue;
      }
      if (!mapping.transpose) {
        const int64_t at_once = std::max<int64_t>(1, kBlockElems / (columns * run.stride));
        std::vector<float> block(static_cast<size_t>(std::min(at_once, rows) * run.stride * columns));
        for (int64_t r = 0; r < rows; r += at_once) {
          const RowRun part{.count = std::min(at_once, rows - r), .stride = run.stride};
          RT_TRY(weights_->read_rect(stored, place + r * run.stride, part.span(), column, columns, block.data()));
          for (int64_t k = 0; k < part.count; ++k) {
            std::copy_n(block.data() + k * run.stride * columns, columns, target + (r + k) * columns);
          }
        }
        continue;
      }
      // The wanted rows are columns of what is stored, the wanted columns its rows.
      const int64_t lines = std::max<int64_t>(1, kBlockElems / span);
      std::vector<float> block(static_cast<size_t>(std::min(lines, columns) * span));
      for (int64_t c = 0; c < columns; c += lines) {
        const int64_t n = std::min(lines, columns - c);
        RT_TRY(weights_->read_rect(stored, mapping.line + column + c, n, place, span, block.data()));
        keep_every(run.stride, n, span, rows, block.data());
        transpose_into(block.data(), n, rows, target + c, columns);
      }
    }
    to += (end - first) * columns;
    size_t d = last;
    while (d-- > 0) {
      if (++at[d] < outer_hi[d]) break;
      at[d] = outer_lo[d];
    }
    if (d == static_cast<size_t>(-1)) return {};
  }
}

}  // namespace cairn::convert
