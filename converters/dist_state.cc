#include "converters/dist_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "converters/dist_archives.h"
#include "converters/elements.h"
#include "converters/family.h"
#include "converters/foreign_file.h"
#include "converters/pickle_reader.h"
#include "converters/safetensors.h"
#include "converters/state_builder.h"
#include "converters/torch_values.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
using Id = TorchValues::Id;

constexpr int64_t kMaxMetadataBytes = int64_t{256} << 20, kMaxKeptBytes = int64_t{256} << 10;
constexpr int64_t kCompareElems = int64_t{1} << 20, kFirstLook = 4096;
constexpr std::string_view kWeightsOnly = "`cairn import --weights-only` takes the weights";

/// First parts of keys that are no model's.
constexpr std::string_view kOtherState[] = {"optimizer",     "optim",      "optimizers",  "lr_scheduler", "scheduler",
                                            "lr_schedulers", "dataloader", "train_state", "rng",          "rng_state"};

std::string_view first_part(std::string_view name) { return name.substr(0, name.find('.')); }

/// Without the dicts of an application around it.
std::string_view inside(std::string_view saved) {
  while (is_wrapper(first_part(saved)) && saved.find('.') != saved.npos) saved.remove_prefix(saved.find('.') + 1);
  return saved;
}

bool is_of_model(std::string_view saved) {
  return !is_optimizer_key(saved) && std::ranges::find(kOtherState, first_part(inside(saved))) == std::end(kOtherState);
}

/// Whether a name is of a table of tokens: tied ones are saved twice.
bool is_of_vocabulary(std::string_view name) {
  for (const std::string_view part : {"embed", "head", "wte", "output.weight", "shared.weight"}) {
    if (name.find(part) != name.npos) return true;
  }
  return false;
}

/// torchtitan's own names of a Llama model, and Hugging Face's.
constexpr std::pair<std::string_view, std::string_view> kTitanNames[] = {
    {"attention.wq", "self_attn.q_proj"},    {"attention.wk", "self_attn.k_proj"},
    {"attention.wv", "self_attn.v_proj"},    {"attention.wo", "self_attn.o_proj"},
    {"feed_forward.w1", "mlp.gate_proj"},    {"feed_forward.w2", "mlp.down_proj"},
    {"feed_forward.w3", "mlp.up_proj"},      {"attention_norm", "input_layernorm"},
    {"ffn_norm", "post_attention_layernorm"}};

struct Moments {
  const DistTensor *exp_avg = nullptr, *exp_avg_sq = nullptr;
  std::vector<std::string> strange;  // kinds that Adam has none of
  std::string step_file;
  int64_t step_begin = 0, step_bytes = -1;
};

class Opening : public StateBuilder {
 public:
  Opening(TrainingState about, bool only_weights, const nlohmann::json& config)
      : StateBuilder(std::move(about), only_weights), config_(config), files_(dir()) {}
  Result<ForeignState> read();

 private:
  Status take_moment(const DistStateKey& key, const DistTensor* tensor, const std::string& file, int64_t begin,
                     int64_t bytes);
  Status sort_tensors();
  Status settle_titan();
  int64_t paired(std::string_view theirs) const;
  Status check_moments(const std::string& name, const DistTensor& weight, const Moments& moments) const;
  Status add(const std::string& theirs, const DistTensor& weight, const Moments* moments);
  Status add_weights();
  Result<bool> is_copy(const std::string& theirs, const DistTensor& weight);
  Status read_settings();
  Status read_position();

  const nlohmann::json& config_;
  DistArchives files_;
  DistIndex index_;
  std::map<std::string, const DistTensor*> weights_;  // by name, without wrappers
  std::map<std::string, Moments> moments_;
  bool titan_ = false;
  int64_t head_dim_ = 0;
};

Status Opening::take_moment(const DistStateKey& key, const DistTensor* tensor, const std::string& file, int64_t begin,
                            int64_t bytes) {
  Moments& moments = moments_[key.parameter];
  const bool twice = (key.kind == "step" && moments.step_bytes >= 0) ||
                     (key.kind == kMoments[0] && moments.exp_avg != nullptr) ||
                     (key.kind == kMoments[1] && moments.exp_avg_sq != nullptr);
  if (twice && !weights_only) {
    return refusal(
        ErrorCode::kCorrupt, dir().string(),
        fmt::format("has {} of {} twice, under keys that differ only in wrappers", key.kind, printable(key.parameter)),
        "each once", kCopyAgain);
  }
  if (key.kind == "step") {
    moments.step_file = file;
    moments.step_begin = begin;
    moments.step_bytes = bytes;
  } else if (key.kind == kMoments[0] && tensor != nullptr) {
    moments.exp_avg = tensor;
  } else if (key.kind == kMoments[1] && tensor != nullptr) {
    moments.exp_avg_sq = tensor;
  } else {
    moments.strange.push_back(printable(key.kind));
  }
  return {};
}

Status Opening::sort_tensors() {
  for (const std::vector<DistTensor>* tensors : {&index_.model, &index_.others}) {
    for (const DistTensor& tensor : *tensors) {
      const std::optional<DistStateKey> key = dist_state_key(tensor.name);
      if (!key && !weights_only && is_optimizer_key(tensor.name)) {
        return refusal(ErrorCode::kUnsupported, dir().string(),
                       fmt::format("its optimizer's state has names of another form ({})", printable(tensor.name)),
                       "keys as optimizer.state.NAME.exp_avg, of one optimizer", kWeightsOnly);
      }
      if (!key || tensor.chunks.empty()) continue;
      const DistChunk& chunk = tensor.chunks.front();
      RT_TRY(take_moment(*key, &tensor, chunk.file, chunk.begin, chunk.bytes));
    }
  }
  for (const DistValue& value : index_.values) {
    if (const auto key = dist_state_key(value.name)) {
      RT_TRY(take_moment(*key, nullptr, value.file, value.begin, value.bytes));
    }
  }
  for (const DistTensor& tensor : index_.model) {
    if (dist_state_key(tensor.name) || !is_of_model(tensor.name) || !is_float_dtype(tensor.dtype)) continue;
    std::string name = without_wrappers(tensor.name);
    if (const std::string shorter = name.substr(std::min(name.size(), name.find('.') + 1));  // planner_data is missing
        name.starts_with("model.") && !moments_.contains(name) && moments_.contains(shorter)) {
      name = shorter;
    }
    if (out.about.dtype.empty()) out.about.dtype = tensor.dtype;
    if (!weights_.emplace(name, &tensor).second) {
      return refusal(ErrorCode::kCorrupt, dir().string(),
                     fmt::format("has tensor {} twice, under keys that differ only in wrappers", printable(name)),
                     "each once", kCopyAgain);
    }
  }
  return {};
}

/// Whether the names are torchtitan's own, and how q and k are stored then.
Status Opening::settle_titan() {
  titan_ = weights_.contains("tok_embeddings.weight");
  if (!titan_) return {};
  if (!moments_.contains("freqs_cis")) weights_.erase("freqs_cis");  // a table that its models compute again
  const auto count = [&](const char* key) {
    const auto found = config_.find(key);
    return found != config_.end() && found->is_number_integer() ? found->get<int64_t>() : int64_t{0};
  };
  const auto named = config_.find("model_type");
  const std::string type = named != config_.end() && named->is_string() ? named->get<std::string>() : "none";
  if (type != "llama") {
    return refusal(ErrorCode::kUnsupported, dir().string(),
                   fmt::format("has torchtitan's own names, and config.json a model of type {}", printable(type)),
                   "torchtitan's names of a model of type llama",
                   "save it with the names of Hugging Face (checkpoint.last_save_in_hf), which has only the weights");
  }
  head_dim_ = count("head_dim");
  if (head_dim_ == 0 && count("num_attention_heads") > 0) {
    head_dim_ = count("hidden_size") / count("num_attention_heads");
  }
  if (head_dim_ <= 0 || head_dim_ % 2 != 0) {
    return refusal(ErrorCode::kInvalidInput, dir().string(), fmt::format("config.json has heads of {}", head_dim_),
                   "an even number of channels (head_dim, or hidden_size / num_attention_heads)", "mend config.json");
  }
  return {};
}

/// Channels of a head where torchtitan's rotary order is not Hugging Face's.
int64_t Opening::paired(std::string_view theirs) const {
  const bool turned = theirs.find(".attention.wq.") != theirs.npos || theirs.find(".attention.wk.") != theirs.npos;
  return titan_ && turned ? head_dim_ : 0;
}

std::string name_of_titan(std::string_view theirs) {
  if (theirs == "tok_embeddings.weight") return "model.embed_tokens.weight";
  if (theirs == "output.weight") return "lm_head.weight";
  std::string out = fmt::format("model.{}", theirs);
  for (const auto& [own, hf] : kTitanNames) {
    const std::string part = fmt::format(".{}.", own);
    if (const size_t at = out.find(part); at != out.npos) return out.replace(at + 1, own.size(), hf);
  }
  return out;
}

Status Opening::check_moments(const std::string& name, const DistTensor& weight, const Moments& moments) const {
  const std::string place = fmt::format("{}: optimizer state of {}", dir().string(), printable(name));
  if (!moments.strange.empty()) {
    return refusal(ErrorCode::kUnsupported, place,
                   fmt::format("the optimizer is not Adam or AdamW: it has {}", fmt::join(moments.strange, ", ")),
                   "step, exp_avg and exp_avg_sq", kWeightsOnly);
  }
  for (const auto& [kind, tensor] : {std::pair(kMoments[0], moments.exp_avg), {kMoments[1], moments.exp_avg_sq}}) {
    if (tensor == nullptr) {
      return refusal(ErrorCode::kCorrupt, place, fmt::format("{} is missing", kind), "step, exp_avg and exp_avg_sq",
                     kWeightsOnly);
    }
    if (tensor->shape != weight.shape) {
      return refusal(ErrorCode::kCorrupt, place, fmt::format("{} is {}", kind, to_string(tensor->shape)),
                     fmt::format("{}, as the weight", to_string(weight.shape)), kWeightsOnly);
    }
    if (!is_float_dtype(tensor->dtype)) {
      return refusal(ErrorCode::kUnsupported, place, fmt::format("{} is {}", kind, tensor->dtype),
                     "F32, BF16 or F16: moments of eight bits are not read", kWeightsOnly);
    }
  }
  return {};
}

/// `moments`: null for a tensor that was not trained.
Status Opening::add(const std::string& theirs, const DistTensor& weight, const Moments* moments) {
  const std::string name = titan_ ? name_of_titan(theirs) : theirs;
  const int64_t heads = paired(theirs);
  if (heads > 0 && (weight.shape.empty() || weight.shape[0] % heads != 0)) {
    return refusal(ErrorCode::kCorrupt, dir().string(),
                   fmt::format("{} is {}", printable(theirs), to_string(weight.shape)),
                   fmt::format("a multiple of {} rows, the head_dim of config.json", heads), "mend config.json");
  }
  if (out.weights->find(name) != nullptr) {
    return refusal(ErrorCode::kCorrupt, dir().string(), fmt::format("has tensor {} twice", printable(name)),
                   "each once", kCopyAgain);
  }
  RT_TRY_SET(std::vector<FileBox> boxes, files_.boxes(weight, &out));
  out.weights->add_boxes(name, weight.dtype, weight.shape, std::move(boxes), heads);
  if (weights_only) return {};
  if (moments == nullptr) {
    for (FlatTensors* const kind : {out.exp_avg.get(), out.exp_avg_sq.get()}) {
      kind->add(name, "F32", weight.shape, {{-1, 0, count_elems(weight.shape)}});
    }
    return {};
  }
  RT_TRY(check_moments(theirs, weight, *moments));
  for (const auto& [kind, tensor] :
       {std::pair(out.exp_avg.get(), moments->exp_avg), {out.exp_avg_sq.get(), moments->exp_avg_sq}}) {
    RT_TRY_SET(std::vector<FileBox> of_kind, files_.boxes(*tensor, &out));
    kind->add_boxes(name, tensor->dtype, tensor->shape, std::move(of_kind), heads);
  }
  const std::string place = fmt::format("{}: optimizer state of {}", dir().string(), printable(theirs));
  if (moments->step_bytes < 0) return take_step(-1, place);
  out.archives.push_back({dir() / moments->step_file, moments->step_begin, moments->step_bytes});
  Result<double> step = files_.number(moments->step_file, moments->step_begin, moments->step_bytes);
  if (!step.ok()) return std::move(step).error().with(place);
  return take_step(step.value(), place);
}

/// Whether a tensor without moments is a copy of one that was trained, as tied weights are saved.
Result<bool> Opening::is_copy(const std::string& theirs, const DistTensor& weight) {
  if (!is_of_vocabulary(theirs)) return false;
  FlatTensors one(dir(), out.files);
  RT_TRY_SET(std::vector<FileBox> boxes, files_.boxes(weight, &out));
  one.add_boxes(theirs, weight.dtype, weight.shape, std::move(boxes));
  const int64_t elem = safetensors_dtype_bits(weight.dtype) / 8, bytes = count_elems(weight.shape) * elem;
  std::vector<std::byte> mine(static_cast<size_t>(std::min(bytes, kCompareElems * elem))), other(mine.size());
  for (const SafeTensor& tensor : std::span(out.weights->tensors()).first(moments_.size())) {
    if (weight.shape.size() < 2 || tensor.shape != weight.shape || tensor.dtype != weight.dtype) continue;
    if (!is_of_vocabulary(tensor.name)) continue;
    bool same = true;
    for (int64_t at = 0, count = 0; at < bytes && same; at += count) {  // the first look is short: few are copies
      count =
          std::min<int64_t>(at == 0 ? std::min<int64_t>(kFirstLook, std::ssize(mine)) : std::ssize(mine), bytes - at);
      RT_TRY(one.read(one.tensors().front(), at, count, mine.data()));
      RT_TRY(out.weights->read(tensor, at, count, other.data()));
      same = std::memcmp(mine.data(), other.data(), static_cast<size_t>(count)) == 0;
    }
    if (same) return true;
  }
  return false;
}

Status Opening::add_weights() {
  if (weights_only) {
    for (const auto& [name, weight] : weights_) RT_TRY(add(name, *weight, nullptr));
    return {};
  }
  if (moments_.empty()) {
    return refusal(ErrorCode::kUnsupported, dir().string(), "its optimizer's state has names of another form",
                   "keys as optimizer.state.NAME.exp_avg, which get_optimizer_state_dict of torch makes", kWeightsOnly);
  }
  for (const auto& [name, moments] : moments_) {
    if (weights_.contains(name)) continue;
    if (DistStateKey{name, ""}.is_numbered()) {
      return refusal(
          ErrorCode::kUnsupported, dir().string(),
          fmt::format("its optimizer's state is numbered (optimizer.state.{}), without the tensors' names", name),
          "state by name, which get_optimizer_state_dict of torch.distributed.checkpoint.state_dict makes",
          fmt::format("load it with its trainer and save it by name; {}", kWeightsOnly));
    }
    return refusal(ErrorCode::kCorrupt, dir().string(),
                   fmt::format("has optimizer state of {} and no weight of that name", printable(name)),
                   "a weight for each, under `model`", kWeightsOnly);
  }
  for (const auto& [name, moments] : moments_) RT_TRY(add(name, *weights_.at(name), &moments));
  int64_t frozen = 0;
  for (const auto& [name, weight] : weights_) {
    if (moments_.contains(name)) continue;
    RT_TRY_SET(const bool copy, is_copy(name, *weight));
    if (copy) continue;
    RT_TRY(add(name, *weight, nullptr));
    ++frozen;
  }
  if (frozen > 0) {
    out.notes.push_back(fmt::format("{} no optimizer state: moments begin at zero there, and Cairn trains all tensors",
                                    frozen == 1 ? "1 tensor has" : fmt::format("{} tensors have", frozen)));
  }
  return {};
}

constexpr std::string_view kSettings[] = {"lr", "eps", "betas", "weight_decay", "maximize", "decoupled_weight_decay"};

/// optimizer.param_groups.GROUP.SETTING, where GROUP is a number or a parameter's name.
Status Opening::read_settings() {
  std::map<std::string, nlohmann::json> groups;
  std::set<double> rates;
  int64_t opaque = 0;
  nlohmann::json kept = nlohmann::json::object();
  OptimizerConfig& to = out.optimizer;
  for (const DistValue& value : index_.values) {
    const std::string_view key = inside(value.name);
    const size_t front = key.find(".param_groups."), last = key.rfind('.');
    const bool setting = front != key.npos && !is_of_model(value.name) && last > front + 14;
    const std::string_view name = key.substr(last == key.npos ? 0 : last + 1);
    const bool read = std::ranges::find(kSettings, name) != std::end(kSettings);
    if (setting ? !read : (first_part(key) == "dataloader" || dist_state_key(value.name) || kept.size() > 1000))
      continue;
    const auto values = files_.read(value.file, value.begin, value.bytes);
    if (!values.ok()) {
      ++opaque;
      continue;
    }
    out.archives.push_back({dir() / value.file, value.begin, value.bytes});
    const Id root = values.value()->root();
    nlohmann::json plain = values.value()->json(root, &opaque);
    if (plain.is_discarded()) continue;
    if (!setting) {
      kept[printable(value.name)] = std::move(plain);
      continue;
    }
    groups[std::string(key.substr(0, last))][std::string(name)] = plain;
    const double number = values.value()->number(root).value_or(-1);
    if (name == "lr" && number >= 0) rates.insert(number);
    if (name == "lr" && number > 0) to.peak_lr = std::max(rates.size() == 1 ? 0.0 : to.peak_lr, number);
    if (name == "eps" && number >= 0) to.eps = number;
    if (name == "weight_decay") to.weight_decay = std::max(to.weight_decay, number);  // vectors often have none
    if (name == "betas" && plain.is_array() && plain.size() == 2 && plain[0].is_number() && plain[1].is_number()) {
      to.beta1 = plain[0].get<double>();
      to.beta2 = plain[1].get<double>();
    }
  }
  const auto holds = [](const nlohmann::json& group, const char* name, bool value) {
    const auto found = group.find(name);
    return found != group.end() && found->is_boolean() && found->get<bool>() == value;
  };
  bool decays_gradients = false;
  for (const auto& [key, group] : groups) {
    if (holds(group, "maximize", true)) {
      return refusal(ErrorCode::kUnsupported, fmt::format("{}: {}", dir().string(), printable(key)),
                     "maximize is True: it goes up the gradient", "maximize False", kWeightsOnly);
    }
    const auto decay = group.find("weight_decay");
    decays_gradients |= holds(group, "decoupled_weight_decay", false) && decay != group.end() && decay->is_number() &&
                        decay->get<double>() > 0;
  }
  if (decays_gradients) {
    out.notes.emplace_back(
        "its Adam adds weight_decay to the gradients (decoupled_weight_decay is False); Cairn's decays the weights: "
        "the "
        "next steps differ");
  }
  if (rates.size() > 1) {
    out.notes.push_back(fmt::format("its parameters have {} learning rates, a recipe has one", rates.size()));
  }
  if (opaque > 0) {
    out.notes.push_back(fmt::format("{} of the state left out: no plain values", count_text(opaque, "value")));
  }
  nlohmann::json distinct = nlohmann::json::array();
  for (auto& [key, group] : groups) {
    if (std::ranges::find(distinct, group) == distinct.end()) distinct.push_back(std::move(group));
  }
  for (auto it = kept.begin(); it != kept.end() && std::ssize(json_text(kept)) > kMaxKeptBytes;) it = kept.erase(it);
  if (std::ssize(json_text(distinct)) <= kMaxKeptBytes) out.kept["param_groups"] = std::move(distinct);
  out.kept["state"] = std::move(kept);
  return {};
}

Status Opening::read_position() {
  RT_TRY_SET(const DistPosition at, dist_position(dir(), index_, &out.archives));
  out.tokens = std::max<int64_t>(0, at.tokens);
  out.step = at.step;
  if (at.step < 0) {
    out.step = out.adam_step;
    out.notes.push_back(
        fmt::format("it does not say how many steps were done (train_state.step or global_step): {} is "
                    "the optimizer's own count",
                    out.step));
  }
  if (at.schedule >= 0 && at.schedule != out.step) {
    out.notes.push_back(fmt::format("its schedule has done {} of {}", count_text(at.schedule, "step"), out.step));
  }
  return {};
}

Result<ForeignState> Opening::read() {
  if (!out.about.problems.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is a training state of torch.distributed.checkpoint that is not complete:\n  {}",
                             dir().string(), fmt::join(out.about.problems, "\n  "))};
  }
  const fs::path metadata = dir() / ".metadata";
  RT_TRY_SET(const std::string pickle, read_text_file(metadata, kMaxMetadataBytes));
  Result<DistIndex> index = read_dist_index(pickle);
  if (!index.ok()) return std::move(index).error().with(metadata.string());
  index_ = std::move(index).value();
  RT_TRY(files_.check_files(index_));
  RT_TRY(sort_tensors());
  if (weights_.empty()) {
    return refusal(ErrorCode::kUnsupported, dir().string(), "has no weights under names that are known here",
                   "tensors under `model`, or at the top", "save with {\"model\": ..., \"optimizer\": ...}");
  }
  RT_TRY(settle_titan());
  RT_TRY(add_weights());
  if (!weights_only) {
    RT_TRY(read_settings());
    RT_TRY(read_position());
  }
  for (const SafeTensor& tensor : out.weights->tensors()) {
    if (tensor.dtype == "F32" || weights_only) continue;
    out.notes.push_back(fmt::format("{} is stored as {}: no float masters were kept, the weights are taken as they are",
                                    tensor.name, tensor.dtype));
    break;
  }
  return std::move(out);
}

}  // namespace

bool DistStateKey::is_numbered() const {
  return !parameter.empty() && parameter.find_first_not_of("0123456789") == parameter.npos;
}

std::optional<DistStateKey> dist_state_key(std::string_view saved) {
  const std::string_view key = inside(saved);
  const std::string_view first = first_part(key);
  if (first != "optimizer" && first != "optim" && first != "optimizers") return std::nullopt;
  std::string_view rest = key.substr(std::min(key.size(), first.size() + 1));
  if (!rest.starts_with("state.")) return std::nullopt;
  rest.remove_prefix(6);
  const size_t dot = rest.rfind('.');
  if (dot == rest.npos || dot == 0 || dot + 1 == rest.size()) return std::nullopt;
  return DistStateKey{without_wrappers(rest.substr(0, dot)), std::string(rest.substr(dot + 1))};
}

bool is_optimizer_key(std::string_view saved) {
  const std::string_view key = inside(saved), first = first_part(key);
  return (first.starts_with("optim") || first.starts_with("chained_")) && key.find(".state.") == first.size();
}

Result<DistPosition> dist_position(const fs::path& dir, const DistIndex& index, std::vector<ArchivePlace>* read) {
  DistArchives files(dir);
  DistPosition out;
  int priority = 0;  // of the key that `step` is from
  const auto look = [&](const std::string& saved, const std::string& file, int64_t begin, int64_t bytes) -> Status {
    const std::string_view key = inside(saved);
    const auto state = dist_state_key(saved);
    const bool adam = state && state->kind == "step" && out.adam_step < 0;
    const int rank = key == "train_state.step" ? 3 : key == "global_step" ? 2 : key == "step" ? 1 : 0;
    const bool step = rank > priority, tokens = key == "train_state.ntokens_seen";
    if (!adam && !step && !tokens && key != "lr_scheduler.last_epoch") return {};
    if (read != nullptr) read->push_back({dir / file, begin, bytes});
    Result<double> found = files.number(file, begin, bytes);
    if (!found.ok()) return std::move(found).error().with(saved);
    const double number = found.value();
    if (adam) {
      out.adam_step = number;
      return {};
    }
    const bool whole = number >= 0 && number <= 1e15 && number == std::floor(number);
    if (!whole && (step || tokens)) {
      return refusal(ErrorCode::kCorrupt, fmt::format("{}: {}", dir.string(), printable(saved)),
                     fmt::format("is {}", number), "a whole number from 0 on",
                     fmt::format("{}; {}", kCopyAgain, kWeightsOnly));
    }
    int64_t& to = step ? out.step : tokens ? out.tokens : out.schedule;
    to = whole ? static_cast<int64_t>(number) : -1;
    if (step) priority = rank;
    return {};
  };
  for (const std::vector<DistTensor>* tensors : {&index.model, &index.others}) {
    for (const DistTensor& tensor : *tensors) {
      if (!tensor.shape.empty() || tensor.chunks.size() != 1) continue;
      const DistChunk& chunk = tensor.chunks.front();
      RT_TRY(look(tensor.name, chunk.file, chunk.begin, chunk.bytes));
    }
  }
  for (const DistValue& value : index.values) RT_TRY(look(value.name, value.file, value.begin, value.bytes));
  return out;
}

Result<ForeignState> open_dist_state(TrainingState about, bool weights_only, const nlohmann::json& config) {
  return Opening(std::move(about), weights_only, config).read();
}

}  // namespace cairn::convert
