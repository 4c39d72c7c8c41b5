#include "converters/megatron_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "converters/megatron_args.h"
#include "converters/megatron_parts.h"
#include "converters/pickle_reader.h"
#include "converters/safetensors.h"
#include "converters/torch_values.h"
#include "runtime/core/count_text.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace megatron {
namespace {

namespace fs = std::filesystem;
using Id = TorchValues::Id;
using Dict = TorchValues::Dict;

constexpr const char* kCommonFile = "common.pt";
constexpr int64_t kMaxMetadataBytes = int64_t{256} << 20, kMaxKeptBytes = int64_t{256} << 10;
/// The optimizer's states, by kind; masters have two names.
constexpr std::pair<std::string_view, size_t> kStates[] = {
    {"param", 0}, {"fp32_param", 0}, {kMoments[0], 1}, {kMoments[1], 2}};

/// The number that follows `front` in a key; nothing without one.
std::optional<int64_t> number_behind(std::string_view key, std::string_view front) {
  const size_t at = key.find(front);
  if (at == key.npos) return std::nullopt;
  int64_t out = -1;
  const char* const begin = key.data() + at + front.size();
  const auto [end, error] = std::from_chars(begin, key.data() + key.size(), out);
  return error == std::errc() && end != begin && out >= 0 ? std::optional(out) : std::nullopt;
}

struct StateName {
  size_t kind = 0;
  std::string key;      // of the weight
  BufferKey buffer;     // of a bucket
  int64_t bucket = -1;  // -1: the state is named
};

/// Reads a key of the optimizer's state; returns nothing for a form that is not known.
std::optional<StateName> state_name(std::string_view saved) {
  StateName out;
  if (const auto chain = number_behind(saved, "chained_")) out.buffer.chain = *chain;
  const size_t top = saved.find("optimizer.");
  if (top == saved.npos) return std::nullopt;
  std::string_view rest = saved.substr(top + 10);
  if (rest.starts_with("state.")) {
    rest.remove_prefix(6);
    for (const auto& [name, kind] : kStates) {
      if (!rest.starts_with(name) || rest.size() <= name.size() + 1 || rest[name.size()] != '.') continue;
      out.kind = kind;
      out.key = rest.substr(name.size() + 1);
      return out;
    }
    return std::nullopt;
  }
  const auto group = number_behind(rest, "dp_group_idx_"), number = number_behind(rest, ".gbuf_idx_"),
             bucket = number_behind(rest, ".bucket_idx_");
  const size_t dtype = rest.find(".dtype_"), last = rest.rfind('.');
  if (!group || !number || !bucket || dtype == rest.npos || last == rest.npos) return std::nullopt;
  for (const auto& [name, kind] : kStates) {
    if (rest.substr(last + 1) != name) continue;
    out.kind = kind;
    out.bucket = *bucket;
    out.buffer.group = *group;
    out.buffer.number = *number;
    out.buffer.dtype = rest.substr(dtype, std::min(rest.find(')', dtype), rest.size()) - dtype);
    return out;
  }
  return std::nullopt;
}

bool is_of_optimizer(std::string_view saved) {
  return saved.starts_with("optimizer.") || saved.starts_with("chained_");
}

/// Refuses what is in the way, and sorts the rest.
Status sort_tensors(Opening& o) {
  for (const std::vector<DistTensor>* tensors : {&o.index.model, &o.index.others}) {
    for (const DistTensor& tensor : *tensors) {
      if (!is_of_optimizer(tensor.name)) {
        if (tensor.name.find("_extra_state") != tensor.name.npos || !is_float_dtype(tensor.dtype)) continue;
        if (o.out.about.dtype.empty()) o.out.about.dtype = tensor.dtype;
        o.weights.emplace(tensor.name, &tensor);
        continue;
      }
      if (o.weights_only) continue;
      const std::optional<StateName> name = state_name(tensor.name);
      if (!name) {
        return refusal(
            ErrorCode::kUnsupported, o.dir().string(),
            fmt::format("its optimizer's state has {}, of a form that is not known here", printable(tensor.name)),
            "exp_avg, exp_avg_sq and param of Adam, by name or in buckets", kWeightsOnly);
      }
      const DistTensor*& place =
          name->bucket < 0 ? o.named[name->kind][name->key] : o.buffers[name->buffer].buckets[name->kind][name->bucket];
      if (place != nullptr) {
        return refusal(
            ErrorCode::kCorrupt, o.dir().string(),
            fmt::format("has state {} twice, under keys that differ only in their optimizer", printable(tensor.name)),
            "each once", kCopyAgain);
      }
      place = &tensor;
    }
  }
  return {};
}

// --- common.pt ------------------------------------------------------------------------------------------------------

constexpr int64_t kMostVisits = 100'000;  // values that are looked at for settings: lists may be shared by lists

/// Calls `use` with each list of settings below `id`: of one optimizer, or of several under their numbers. `visits`:
/// counts values, and ends at kMostVisits.
void for_each_group(const TorchValues& file, Id id, int depth, int64_t* visits,
                    const std::function<void(Id group)>& use) {
  if (depth > 3 || ++*visits > kMostVisits) return;
  if (const std::vector<Id>* parts = file.items(id)) {  // what ranks saved as one value each
    for (const Id part : *parts) {
      if (*visits > kMostVisits) break;
      for_each_group(file, part, depth + 1, visits, use);
    }
    return;
  }
  if (file.dict(id) == nullptr) return;
  if (const std::vector<Id>* groups = file.items(file.get(id, "param_groups"))) {
    for (const Id group : *groups) {
      if (++*visits > kMostVisits) break;
      use(group);
    }
    return;
  }
  for (const auto& [key, value] : *file.dict(id)) {
    if (*visits > kMostVisits) break;
    for_each_group(file, value, depth + 1, visits, use);
  }
}

Status read_groups(Opening& o, const TorchValues& file, Id optimizer, const std::string& place, nlohmann::json* kept) {
  Status out;
  int64_t opaque = 0, visits = 0;
  for_each_group(file, optimizer, 0, &visits, [&](Id group) {
    OptimizerConfig& to = o.out.optimizer;
    const auto number = [&](const char* name) { return file.number(file.get(group, name)); };
    if (const auto lr = number("lr"); lr && *lr > 0) to.peak_lr = std::max(to.peak_lr, *lr);
    if (const auto eps = number("eps")) to.eps = *eps;
    if (const auto decay = number("weight_decay")) to.weight_decay = std::max(to.weight_decay, *decay);
    if (const std::vector<Id>* betas = file.items(file.get(group, "betas")); betas != nullptr && betas->size() == 2) {
      to.beta1 = file.number((*betas)[0]).value_or(to.beta1);
      to.beta2 = file.number((*betas)[1]).value_or(to.beta2);
    }
    if (const auto step = number("step"); step && out.ok()) out = o.take_step(*step, place);
    if (kept->size() < 64) kept->push_back(file.json(group, &opaque));
  });
  if (visits > kMostVisits) {
    return refusal(ErrorCode::kCorrupt, place, fmt::format("has more than {} values in its optimizer", kMostVisits),
                   "some groups of settings", kCopyAgain);
  }
  return out;
}

/// The updates, the settings and the loss scale.
Status read_optimizer(Opening& o, const TorchValues* common) {
  nlohmann::json groups = nlohmann::json::array();
  o.out.optimizer.weight_decay = 0;
  const Id optimizer = common == nullptr ? TorchValues::kNothing : common->find("optimizer");
  bool counted = false;
  if (common != nullptr) {
    const std::string place = common->archive().path().string();
    const Id inner = common->get(optimizer, "optimizer");
    if (const auto step = common->number(common->get(common->get(inner, "state"), "common_step"))) {
      RT_TRY(o.take_step(*step, place));
    }
    RT_TRY(read_groups(o, *common, optimizer, place, &groups));
    const Id scaler = common->get(optimizer, "grad_scaler");
    if (const auto scale = common->number(common->get(scaler, "scale")); scale && *scale > 0) {
      o.out.loss_scale.scale = *scale;
      o.out.loss_scale.good_steps =
          std::max<int64_t>(0, common->integer(common->get(scaler, "growth_tracker")).value_or(0));
      o.out.loss_scale.hysteresis_left =
          std::max<int64_t>(0, common->integer(common->get(scaler, "hysteresis_tracker")).value_or(1) - 1);
    }
  }
  for (const DistValue& value : o.index.values) {  // of buckets
    if (!is_of_optimizer(value.name) || value.name.find(".optimizer/shard_") == value.name.npos) continue;
    RT_TRY_SET(const std::unique_ptr<TorchValues> file, o.archives.read(value.file, value.begin, value.bytes));
    o.out.archives.push_back({o.dir() / value.file, value.begin, value.bytes});
    RT_TRY(
        read_groups(o, *file, file->root(), fmt::format("{}: {}", o.dir().string(), printable(value.name)), &groups));
    counted = true;
  }
  if (!o.has_step()) {
    return o.take_step(-1, counted ? o.dir().string() : (o.dir() / kCommonFile).string());
  }
  nlohmann::json distinct = nlohmann::json::array();
  for (nlohmann::json& group : groups) {
    if (!group.is_discarded() && std::ranges::find(distinct, group) == distinct.end())
      distinct.push_back(std::move(group));
  }
  if (std::ssize(json_text(distinct)) <= kMaxKeptBytes) o.out.kept["param_groups"] = std::move(distinct);
  return {};
}

int64_t whole_argument(const Opening& o, const char* name) {
  return std::min(json_count(o.args, name), int64_t{1} << 50);
}

Status read_position(Opening& o, const TorchValues* common) {
  const int64_t step = common == nullptr ? -1 : common->integer(common->find("iteration")).value_or(-1);
  if (step < 0 || step > int64_t{1} << 50) {
    return refusal(ErrorCode::kCorrupt, (o.dir() / kCommonFile).string(), "does not say how many steps were done",
                   "a whole number as iteration", kCopyAgain);
  }
  o.out.step = step;
  o.out.samples = whole_argument(o, "consumed_train_samples");
  int64_t tokens = 0;
  if (!__builtin_mul_overflow(o.out.samples, whole_argument(o, "seq_length"), &tokens)) o.out.tokens = tokens;
  o.out.loss_scale.skipped = std::clamp<int64_t>(o.out.step - o.out.adam_step, 0, o.out.step);
  o.out.optimizer.clip = std::max(0.0, json_number(o.args, "clip_grad"));
  int64_t opaque = 0;
  nlohmann::json scheduler = common->json(common->find("opt_param_scheduler"), &opaque);
  if (!scheduler.is_discarded()) o.out.kept["opt_param_scheduler"] = std::move(scheduler);
  nlohmann::json kept = o.args;
  for (auto it = kept.begin(); it != kept.end() && std::ssize(json_text(kept)) > kMaxKeptBytes;) it = kept.erase(it);
  o.out.kept["args"] = std::move(kept);
  return {};
}

/// The arguments as plain values.
nlohmann::json arguments_of(const TorchValues& common) {
  nlohmann::json out = nlohmann::json::object();
  const Dict* const fields = common.state(common.find("args"));
  int64_t opaque = 0;
  for (size_t k = 0; fields != nullptr && k < std::min<size_t>(fields->size(), 5000); ++k) {
    const auto& [key, value] = (*fields)[k];
    const std::string name = printable(common.text(key));
    nlohmann::json plain = common.json(value, &opaque);
    if (!name.empty() && !plain.is_discarded()) out[name] = std::move(plain);
  }
  return out;
}

// --- the model ------------------------------------------------------------------------------------------------------

Status settle_model(Opening& o, const nlohmann::json& config) {
  nlohmann::json made = config;
  if (!config.is_object()) {
    Result<nlohmann::json> of_args = config_from_args(o.args);
    if (!of_args.ok()) return std::move(of_args).error().with((o.dir() / kCommonFile).string());
    made = std::move(of_args).value();
    o.out.config = json_text(made, 2) + "\n";
  }
  Result<ModelConfig> model = model_from_config(made);
  if (!model.ok())
    return std::move(model).error().with(config.is_object() ? "config.json" : (o.dir() / kCommonFile).string());
  o.model = model.value();
  RT_TRY_SET(o.family, find_family("megatron_gpt"));
  const auto rows = o.weights.find("embedding.word_embeddings.weight");
  if (rows != o.weights.end() && !rows->second->shape.empty() && rows->second->shape[0] > o.model.vocab) {
    o.out.notes.push_back(
        fmt::format("{} of {} rows of the vocabulary are left out: Megatron's softmax ran over them too",
                    rows->second->shape[0] - o.model.vocab, rows->second->shape[0]));
  }
  return {};
}

Status read_weights(Opening& o, std::map<std::string, std::vector<FileBox>>* boxes, FlatTensors* to) {
  for (const auto& [key, tensor] : o.weights) {
    RT_TRY_SET((*boxes)[key], o.archives.boxes(*tensor, &o.out));
    RT_TRY(add_views(o, key, tensor->dtype, tensor->shape, (*boxes)[key], to));
  }
  return {};
}

/// Masters and moments of each weight. A weight without a master is it; one without moments begins with zeros.
Status add_states(Opening& o, const States& states, const std::map<std::string, std::vector<FileBox>>& weights) {
  int64_t frozen = 0, unmastered = 0;
  FlatTensors* const to[kKinds] = {o.out.weights.get(), o.out.exp_avg.get(), o.out.exp_avg_sq.get()};
  for (const auto& [key, tensor] : o.weights) {
    const auto found = states.find(key);
    for (size_t kind = 0; kind < kKinds; ++kind) {
      const Placed* const placed =
          found == states.end() || found->second[kind].tensor == nullptr ? nullptr : &found->second[kind];
      if (placed == nullptr && kind == 0) {
        unmastered += tensor->dtype != "F32";
        RT_TRY(add_views(o, key, tensor->dtype, tensor->shape, weights.at(key), to[kind]));
        continue;
      }
      if (placed == nullptr) {
        frozen += kind == 1;
        RT_TRY(add_views(o, key, "F32", tensor->shape, {{Shape(tensor->shape.size(), 0), tensor->shape, -1, 0}},
                         to[kind]));
        continue;
      }
      const std::string dtype = o.buffers.empty() ? placed->tensor->dtype : "F32";
      RT_TRY(add_views(o, key, dtype, tensor->shape, placed->boxes, to[kind]));
    }
  }
  if (frozen > 0) {
    o.out.notes.push_back(
        fmt::format("{} no optimizer state: moments begin at zero there, and Cairn trains all tensors",
                    frozen == 1 ? "1 tensor has" : fmt::format("{} tensors have", frozen)));
  }
  if (unmastered > 0) {
    o.out.notes.push_back(fmt::format("{} of 16 bits without float masters: the weights are taken as they are",
                                      count_text(unmastered, "tensor")));
  }
  return {};
}

Result<ForeignState> read(Opening& o, const nlohmann::json& config) {
  if (!o.out.about.problems.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is a training state of Megatron-LM that is not complete:\n  {}", o.dir().string(),
                             fmt::join(o.out.about.problems, "\n  "))};
  }
  std::unique_ptr<TorchValues> common;
  if (is_plain_file(o.dir() / kCommonFile)) {
    RT_TRY_SET(common, TorchValues::read(o.dir() / kCommonFile));
    o.args = arguments_of(*common);
  } else if (!config.is_object() || !o.weights_only) {
    return refusal(ErrorCode::kInvalidInput, (o.dir() / kCommonFile).string(), "is missing",
                   "it beside .metadata: it has the model's sizes and the step", kCopyAgain);
  }
  RT_TRY_SET(const std::string pickle, read_text_file(o.dir() / ".metadata", kMaxMetadataBytes));
  Result<DistIndex> index = read_dist_index(pickle);
  if (!index.ok()) return std::move(index).error().with((o.dir() / ".metadata").string());
  o.index = std::move(index).value();
  RT_TRY(o.archives.check_files(o.index));
  RT_TRY(sort_tensors(o));
  RT_TRY(settle_model(o, config));
  std::map<std::string, std::vector<FileBox>> weights;
  if (o.weights_only) {
    RT_TRY(read_weights(o, &weights, o.out.weights.get()));
    return std::move(o.out);
  }
  o.out.model_copy = std::make_unique<FlatTensors>(o.dir(), o.out.files);
  RT_TRY(read_weights(o, &weights, o.out.model_copy.get()));
  const bool named = !o.named[1].empty();
  if (named == !o.buffers.empty()) {
    return refusal(
        ErrorCode::kUnsupported, o.dir().string(),
        named ? "has optimizer state by name and in buckets" : "has no optimizer state of a form that is known here",
        "fully_reshardable, fully_sharded_model_space or dp_reshardable", kWeightsOnly);
  }
  RT_TRY_SET(const States states, named ? read_named(o) : read_buckets(o));
  RT_TRY(add_states(o, states, weights));
  RT_TRY(read_optimizer(o, common.get()));
  RT_TRY(read_position(o, common.get()));
  return std::move(o.out);
}

}  // namespace

Status add_views(const Opening& o, const std::string& key, const std::string& dtype, const Shape& shape,
                 const std::vector<FileBox>& boxes, FlatTensors* to) {
  const int64_t elem_bytes = safetensors_dtype_bits(dtype) / 8;
  Result<std::vector<DistView>> views =
      views_of({.name = key, .dtype = dtype, .shape = shape, .chunks = {}}, o.family, o.model);
  if (!views.ok()) return std::move(views).error().with(o.dir().string());
  for (DistView& view : views.value()) {
    std::vector<FileBox> of_view;
    int64_t elems = 0;
    for (const FileBox& box : boxes) {
      FileBox part = box;
      if (view.layer >= 0) {
        part = rows_of(box, view.layer, view.layer + 1, elem_bytes);
        part.offsets.erase(part.offsets.begin());
        part.sizes.erase(part.sizes.begin());
      } else if (!shape.empty()) {
        part = rows_of(box, 0, view.shape[0], elem_bytes);
      }
      if (part.elems() == 0) continue;
      elems += part.elems();
      of_view.push_back(std::move(part));
    }
    if (elems != count_elems(view.shape) || to->find(view.name) != nullptr) {
      return refusal(ErrorCode::kCorrupt, o.dir().string(),
                     fmt::format("{} has {} elements in the files{}", printable(key), elems,
                                 to->find(view.name) != nullptr ? ", and twice" : ""),
                     fmt::format("{}, once", count_elems(view.shape)), kCopyAgain);
    }
    to->add_boxes(view.name, dtype, view.shape, std::move(of_view));
  }
  return {};
}

}  // namespace megatron

Result<ForeignState> open_megatron_state(TrainingState about, bool weights_only, const nlohmann::json& config) {
  megatron::Opening opening(std::move(about), weights_only);
  return megatron::read(opening, config);
}

}  // namespace cairn::convert
