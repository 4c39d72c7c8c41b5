#include "converters/deepspeed.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "converters/safetensors.h"
#include "runtime/core/count_text.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

namespace fs = std::filesystem;
using Id = TorchValues::Id;
using Dict = TorchValues::Dict;
constexpr Id kNothing = TorchValues::kNothing;

constexpr std::array<std::string_view, 2> kMoments = {"exp_avg", "exp_avg_sq"};
constexpr size_t kKinds = 3;  // masters and the two moments
constexpr size_t kMostNames = size_t{1} << 22;
constexpr int64_t kMaxKeptBytes = int64_t{256} << 10;
constexpr std::string_view kCopyAgain = "copy the files of one save here, or save again";
constexpr std::string_view kUniversal =
    "python -m deepspeed.checkpoint.ds_to_universal joins the ranks; give the folder that it writes";

/// Says what was found at `place`, what was expected and what to do.
Error refusal(ErrorCode code, std::string_view place, std::string_view wrong, std::string_view expected,
              std::string_view remedy) {
  return Error{code, fmt::format("{}: {}\n  expected {}\n  {}", place, wrong, expected, remedy)};
}

/// The number between `front` and what follows in a name; -1 without one.
int64_t number_after(std::string_view name, std::string_view front) {
  const size_t at = name.find(front);
  if (at == name.npos) return -1;
  int64_t out = -1;
  const char* const begin = name.data() + at + front.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), out);
  return error == std::errc() && end != begin ? out : -1;
}

Result<std::unique_ptr<TorchValues>> read_archive(const fs::path& path) {
  Result<std::unique_ptr<TorchValues>> out = TorchValues::read(path);
  if (out.ok() || out.error().code != ErrorCode::kCorrupt) return out;
  return Error{ErrorCode::kCorrupt,
               fmt::format("{}\n  expected a complete file of torch.save\n  {}", out.error().message, kCopyAgain)};
}

Result<std::vector<std::string>> sorted_names(const fs::path& dir) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    out.push_back(it->path().filename().string());
    if (out.size() > kMostNames) return Error{ErrorCode::kUnsupported, fmt::format("{}: too many names", dir.string())};
  }
  if (error) return os_error(error.value(), dir.string());
  std::ranges::sort(out);
  return out;
}

struct Parameter {
  std::string name;
  Shape shape;
  int64_t elems = 0;
};

/// A rank's part of one buffer: masters and moments.
using Parts = std::array<TorchTensor, kKinds>;

/// The part of one group (ZeRO-1, -2) or sub-group (ZeRO-3) in a rank's optimizer file.
struct RankGroup {
  Parts parts;
  double step = -1;
  std::vector<int64_t> padding;                               // after each parameter; empty: none
  std::map<std::string, std::pair<int64_t, int64_t>> slices;  // elements and start of what the rank has, if it says
};

struct RankFile {
  fs::path path;
  int64_t file = -1;  // in the pool
  int64_t stage = 0;
  int64_t said_rank = -1;  // by its content; -1: it does not say
  std::vector<int64_t> partition_count;
  std::vector<RankGroup> groups;
};

class Reader {
 public:
  Reader(TrainingState about, bool weights_only) : weights_only_(weights_only) { out_.about = std::move(about); }
  Result<ForeignState> read();

 private:
  const fs::path& dir() const { return out_.about.folder; }
  std::string text(const fs::path& path) const { return path.string(); }
  Status refuse_layouts(const std::vector<std::string>& names) const;
  Status read_model_files(const std::vector<std::string>& names);
  Status read_shapes(const TorchValues& model);
  Status read_module(const TorchValues& model, int64_t file);
  Status read_frozen(const TorchValues& model, int64_t file);
  Status read_position(const TorchValues& model);
  Status keep_text(const TorchValues& model);
  void read_settings(const TorchValues& file, Id param_groups);
  void read_scaler(const TorchValues& file, Id scaler);
  Result<Parameter> parameter(const TorchValues& file, Id name, Id size) const;
  Result<int64_t> add_file(const TorchValues& file);

  Result<RankGroup> rank_group(const TorchValues& file, Id master, Id state, std::string_view what) const;
  Result<RankFile> read_rank(const fs::path& path, int64_t stage);
  Result<std::map<int64_t, fs::path>> rank_paths(const std::vector<std::string>& names) const;
  Status read_ranks(const std::vector<std::string>& names);
  Status check_steps(const std::vector<RankFile>& ranks);
  Status take_step(double step, const std::string& place);
  Status place_flat(const std::vector<RankFile>& ranks);
  Status check_slices(const std::vector<RankFile>& ranks, size_t group) const;
  Status place_cut(const std::vector<RankFile>& ranks);
  Status read_universal();
  Result<TorchTensor> universal_tensor(const TorchValues& file, const std::string& name) const;
  Status read_plain(const TorchValues& model, int64_t file);
  Status group_names(const TorchValues& model, Id masters, const std::vector<std::vector<Shape>>& shapes,
                     std::vector<std::vector<std::string>>* names) const;

  FlatTensors& kind(size_t k) { return *(k == 0 ? out_.weights : k == 1 ? out_.exp_avg : out_.exp_avg_sq); }
  Status add(const Parameter& parameter, const std::array<std::string, kKinds>& dtypes,
             std::array<std::vector<FlatRun>, kKinds> runs);
  Status add_untrained();
  std::string step_place_;

  const bool weights_only_;
  ForeignState out_;
  std::vector<std::vector<Parameter>> groups_;
  std::vector<fs::path> model_files_;
  std::vector<std::string> module_names_;  // in its order
  std::map<std::string, TorchTensor> module_;
  std::map<std::string, std::string> storages_;  // of module_: equal of tied tensors
  std::map<std::string, std::string> shared_;    // alias -> name
  std::set<std::string> buffers_;
  struct Frozen {
    Parameter parameter;
    std::string dtype;
    std::vector<FlatRun> runs;
  };
  std::vector<Frozen> frozen_;
  int64_t model_file_ = -1;
  bool round_robin_ = false;
};

Result<Parameter> Reader::parameter(const TorchValues& file, Id name, Id size) const {
  const std::string place = fmt::format("{}: a parameter's sizes", file.archive().path().string());
  RT_TRY_SET(const std::string_view text, file.tree().string(name, place));
  Parameter out{.name = std::string(text)};
  RT_TRY_SET(out.shape, file.tree().shape(size, fmt::format("{}: {}", place, printable(text))));
  out.elems = 1;
  for (const int64_t extent : out.shape) {
    if (__builtin_mul_overflow(out.elems, extent, &out.elems)) {
      return Error{ErrorCode::kCorrupt, fmt::format("{}: {}: beyond 64 bits", place, printable(text))};
    }
  }
  return out;
}

Result<int64_t> Reader::add_file(const TorchValues& file) {
  out_.archives.push_back(file.archive().path());
  return out_.files->add(file.archive().path());
}

Status Reader::refuse_layouts(const std::vector<std::string>& names) const {
  const auto any = [&](std::string_view pattern) {
    return std::ranges::any_of(names, [&](const std::string& name) { return matches(pattern, name); });
  };
  const auto unsupported = [&](std::string_view wrong, std::string_view expected, std::string_view remedy) {
    return refusal(ErrorCode::kUnsupported, dir().string(), wrong, expected, remedy);
  };
  if (any("layer_*-model_*states.pt"))
    return unsupported("is a pipeline of DeepSpeed's: its tensors are named by layers",
                       "one model, with the names that Hugging Face has", kUniversal);
  if (any("*expert_*_model_states.pt") || any("expp_rank_*"))
    return unsupported("has experts of DeepSpeed's own, in files of their own",
                       "a model without DeepSpeed's MoE layers",
                       "save its weights with save_16bit_model and import these");
  if (any("offloaded_tensors"))
    return unsupported("has moments in offloaded_tensors, from an optimizer that was kept on NVMe",
                       "the moments in *_optim_states.pt", "save once without offload_optimizer.device = nvme");
  const bool universal = fs::is_directory(dir() / "zero");
  const auto of_other_rank = [](const std::string& name) {
    return name.ends_with("_states.pt") && number_after(name, "mp_rank_") > 0;
  };
  if (!universal && std::ranges::any_of(names, of_other_rank))
    return unsupported(fmt::format("is of several model ranks ({})", std::max<int64_t>(2, out_.about.model_ranks)),
                       "only mp_rank_00", kUniversal);
  return {};
}

Status Reader::read_shapes(const TorchValues& model) {
  const auto add_group = [&](const Dict& shapes) -> Status {
    std::vector<Parameter> group;
    for (const auto& [name, size] : shapes) {
      RT_TRY_SET(Parameter one, parameter(model, name, size));
      group.push_back(std::move(one));
    }
    groups_.push_back(std::move(group));
    return {};
  };
  const Id shapes = model.find("param_shapes");
  if (const std::vector<Id>* groups = model.items(shapes); groups != nullptr) {
    for (const Id group : *groups) {
      const Dict* const found = model.dict(group);
      if (found == nullptr) {
        return Error{ErrorCode::kCorrupt,
                     fmt::format("{}: param_shapes: a group is no dict", model.archive().path().string())};
      }
      RT_TRY(add_group(*found));
    }
  } else if (const Dict* all = model.dict(shapes); all != nullptr) {
    RT_TRY(add_group(*all));
  }
  return {};
}

Status Reader::read_module(const TorchValues& model, int64_t file) {
  if (const std::vector<Id>* buffers = model.items(model.find("buffer_names")); buffers != nullptr) {
    for (const Id name : *buffers) buffers_.insert(model.text(name));
  }
  if (const Dict* shared = model.dict(model.find("shared_params")); shared != nullptr) {
    for (const auto& [alias, name] : *shared) shared_[model.text(alias)] = model.text(name);
  }
  const Dict* const module = model.dict(model.find("module"));
  if (module == nullptr) return {};
  int64_t strided = 0;
  for (const auto& [key, value] : *module) {
    const std::string name = model.text(key);
    if (name.empty() || !model.is_tensor(value)) continue;
    Result<TorchTensor> tensor = model.tensor(value, name);
    if (!tensor.ok() && tensor.error().code == ErrorCode::kUnsupported) {
      ++strided;
      continue;
    }
    if (!tensor.ok()) return std::move(tensor).error();
    if (tensor.value().elems == 0 && tensor.value().shape != Shape{0}) continue;
    if (tensor.value().elems == 0) continue;  // ZeRO-3's stand-in for what all ranks hold
    storages_[name] = model.storage_key(value);
    if (module_.emplace(name, std::move(tensor).value()).second) module_names_.push_back(name);
  }
  if (strided > 0) {
    out_.notes.push_back(fmt::format("{} of the model's copy {} strided: the masters are not compared with {}",
                                     count_text(strided, "tensor"), strided == 1 ? "is" : "are",
                                     strided == 1 ? "it" : "them"));
  }
  if (module_.empty()) return {};
  out_.model_copy = std::make_unique<FlatTensors>(dir(), out_.files);
  for (const std::string& name : module_names_) {
    const TorchTensor& tensor = module_[name];
    if (!is_float_dtype(tensor.dtype)) continue;
    out_.model_copy->add(name, tensor.dtype, tensor.shape, {{file, tensor.offset, tensor.elems}});
  }
  return {};
}

/// ZeRO-1, -2: whole tensors in one file. ZeRO-3: a fragment in each rank's, padded to the same length.
Status Reader::read_frozen(const TorchValues& model, int64_t file) {
  const Dict* const shapes = model.dict(model.find("frozen_param_shapes"));
  if (shapes == nullptr) return {};
  size_t k = 0;
  for (const auto& [name, size] : *shapes) {
    RT_TRY_SET(Parameter one, parameter(model, name, size));
    RT_TRY_SET(const TorchTensor fragment,
               model.tensor(model.get(model.find("frozen_param_fragments"), one.name), "frozen " + one.name));
    if (k == frozen_.size()) frozen_.push_back({one, fragment.dtype, {}});
    Frozen& frozen = frozen_[k++];
    if (frozen.parameter.name != one.name || frozen.dtype != fragment.dtype) {
      return refusal(ErrorCode::kCorrupt, text(model.archive().path()),
                     fmt::format("frozen tensor {} is another one than in the first rank's file", one.name),
                     frozen.parameter.name, kCopyAgain);
    }
    int64_t before = 0;
    for (const FlatRun& run : frozen.runs) before += run.count;
    const int64_t count = std::min(fragment.elems, one.elems - before);
    if (count > 0) frozen.runs.push_back({file, fragment.offset, count});
  }
  return {};
}

Status Reader::read_position(const TorchValues& model) {
  const std::optional<int64_t> steps = model.integer(model.find("global_steps"));
  if (!steps || *steps < 0) {
    return refusal(ErrorCode::kCorrupt, text(model.archive().path()), "does not say how many steps were done",
                   "a number as global_steps", kCopyAgain);
  }
  out_.step = *steps;
  out_.samples = std::max<int64_t>(0, model.integer(model.find("global_samples")).value_or(0));
  out_.loss_scale.skipped = std::max<int64_t>(0, model.integer(model.find("skipped_steps")).value_or(0));
  const Id zero = model.get(model.find("ds_config"), "zero_optimization");
  if (const Id robin = model.get(zero, "round_robin_gradients"); robin != kNothing)
    round_robin_ = model.tree().kind(robin) == TorchValues::Kind::kBool && model.tree().boolean(robin, "").value();
  const std::optional<int64_t> schedule = model.integer(model.get(model.find("lr_scheduler"), "last_batch_iteration"));
  if (schedule && *schedule + 1 != out_.step) {
    out_.notes.push_back(fmt::format(
        "its schedule has done {} of {}: it does not count steps that were skipped; the recipe's counts all",
        count_text(*schedule + 1, "step"), out_.step));
  }
  if (model.find("ds_autoep_layers") != kNothing) {
    return refusal(ErrorCode::kUnsupported, text(model.archive().path()), "has layers of AutoEP (ds_autoep_layers)",
                   "weights that are not cut by experts",
                   "save without AutoEP, or import a folder of save_16bit_model");
  }
  return {};
}

Status Reader::keep_text(const TorchValues& model) {
  static constexpr std::string_view kOwn[] = {
      "module",        "buffer_names",  "optimizer",  "param_shapes",  "frozen_param_shapes", "frozen_param_fragments",
      "shared_params", "data_sampler",  "random_ltd", "skipped_steps", "global_steps",        "global_samples",
      "dp_world_size", "mp_world_size", "ds_version"};
  int64_t opaque = 0;
  nlohmann::json kept = nlohmann::json::object();
  if (const Dict* all = model.dict(model.root()); all != nullptr) {
    for (const auto& [key, value] : *all) {
      const std::string name = model.text(key);
      if (name.empty() || std::ranges::count(kOwn, name) > 0) continue;
      nlohmann::json plain = model.json(value, &opaque);
      if (!plain.is_discarded()) kept[printable(name)] = std::move(plain);
    }
  }
  if (opaque > 0)
    out_.notes.push_back(
        fmt::format("{} of the client's state left out: no plain values", count_text(opaque, "value")));
  for (auto it = kept.begin(); it != kept.end() && std::ssize(json_text(kept)) > kMaxKeptBytes;) it = kept.erase(it);
  out_.kept["state"] = std::move(kept);
  return {};
}

void Reader::read_settings(const TorchValues& file, Id param_groups) {
  const std::vector<Id>* const groups = file.items(param_groups);
  if (groups == nullptr || groups->empty()) return;
  int64_t opaque = 0;
  nlohmann::json all = nlohmann::json::array();
  for (const Id group : *groups) {
    nlohmann::json one = file.json(group, &opaque);
    if (!one.is_object()) continue;
    one.erase("params");
    all.push_back(std::move(one));
  }
  if (std::ssize(json_text(all)) <= kMaxKeptBytes) out_.kept["param_groups"] = std::move(all);
  OptimizerConfig& to = out_.optimizer;
  const Id first = groups->front();
  const auto set = [&](std::string_view key, double* value) {
    const std::optional<double> found = file.number(file.get(first, key));
    if (found && *found >= 0) *value = *found;
  };
  set("lr", &to.peak_lr);
  set("eps", &to.eps);
  for (const Id group : *groups) {  // matrices have it, vectors none
    const double found = file.number(file.get(group, "weight_decay")).value_or(0);
    to.weight_decay = std::max(to.weight_decay, found);
  }
  if (const std::vector<Id>* betas = file.items(file.get(first, "betas")); betas != nullptr && betas->size() == 2) {
    to.beta1 = file.number((*betas)[0]).value_or(to.beta1);
    to.beta2 = file.number((*betas)[1]).value_or(to.beta2);
  }
}

/// The scale of fp16 runs. Theirs grows when (cur_iter - last_overflow_iter) is a multiple of the window, and counts
/// cur_iter up behind each step.
void Reader::read_scaler(const TorchValues& file, Id scaler) {
  if (out_.about.dtype != "F16") {
    out_.loss_scale = {};
    return;
  }
  const Dict* const fields = file.state(scaler);
  if (fields == nullptr) return;
  const auto number = [&](std::string_view key) { return file.number(file.tree().find(*fields, key)); };
  const double scale = number("cur_scale").value_or(0);
  if (!(scale > 0)) return;
  out_.loss_scale.scale = scale;
  const auto window = static_cast<int64_t>(std::clamp(number("scale_window").value_or(0), 0.0, 1e15));
  const double good = number("cur_iter").value_or(0) - number("last_overflow_iter").value_or(-1) - 1;
  if (window > 0 && good >= 0 && good < 1e15) out_.loss_scale.good_steps = static_cast<int64_t>(good) % window;
  if (number("delayed_shift").value_or(1) > 1) {
    out_.loss_scale.hysteresis_left =
        static_cast<int64_t>(std::clamp(number("cur_hysteresis").value_or(1) - 1, 0.0, 1e6));
  }
}

Status Reader::take_step(double step, const std::string& place) {
  if (step < 0 || step != std::floor(step) || step > 1e15) {
    return refusal(ErrorCode::kCorrupt, place, "the optimizer does not say how many updates it has done",
                   "a whole number as `step` of its state", kCopyAgain);
  }
  if (step_place_.empty()) {
    step_place_ = place;
    out_.adam_step = static_cast<int64_t>(step);
  } else if (static_cast<int64_t>(step) != out_.adam_step) {
    return refusal(
        ErrorCode::kCorrupt, place,
        fmt::format("its state is of update {}, and {} has that of update {}", step, step_place_, out_.adam_step),
        "one count of updates in all parameters", kCopyAgain);
  }
  return {};
}

Status Reader::add(const Parameter& parameter, const std::array<std::string, kKinds>& dtypes,
                   std::array<std::vector<FlatRun>, kKinds> runs) {
  if (out_.weights->find(parameter.name) != nullptr) {
    return refusal(ErrorCode::kCorrupt, dir().string(), fmt::format("has tensor {} twice", printable(parameter.name)),
                   "each once", kCopyAgain);
  }
  for (size_t k = 0; k < kKinds; ++k) kind(k).add(parameter.name, dtypes[k], parameter.shape, std::move(runs[k]));
  return {};
}

/// Frozen parameters and buffers: they have no moments.
Status Reader::add_untrained() {
  int64_t count = 0;
  const auto add_one = [&](const Parameter& one, const std::string& dtype, std::vector<FlatRun> runs) {
    const std::vector<FlatRun> zeros = {{-1, 0, one.elems}};
    out_.weights->add(one.name, dtype, one.shape, std::move(runs));
    if (out_.exp_avg != nullptr) {
      out_.exp_avg->add(one.name, "F32", one.shape, zeros);
      out_.exp_avg_sq->add(one.name, "F32", one.shape, zeros);
    }
    ++count;
  };
  for (Frozen& frozen : frozen_) {
    int64_t elems = 0;
    for (const FlatRun& run : frozen.runs) elems += run.count;
    if (out_.weights->find(frozen.parameter.name) != nullptr) continue;
    if (elems != frozen.parameter.elems) {
      return refusal(ErrorCode::kCorrupt, dir().string(),
                     fmt::format("frozen tensor {} has {} elements in the ranks' files", frozen.parameter.name, elems),
                     fmt::format("{}", frozen.parameter.elems), kCopyAgain);
    }
    add_one(frozen.parameter, frozen.dtype, std::move(frozen.runs));
  }
  if (count > 0) {
    out_.notes.push_back(fmt::format("{} frozen: moments begin at zero there, and Cairn trains all tensors",
                                     count == 1 ? "1 tensor was" : fmt::format("{} tensors were", count)));
  }
  for (const std::string& name : buffers_) {
    const auto found = module_.find(name);
    if (found == module_.end() || !is_float_dtype(found->second.dtype) || out_.weights->find(name) != nullptr) continue;
    const TorchTensor& tensor = found->second;
    add_one({name, tensor.shape, tensor.elems}, tensor.dtype, {{model_file_, tensor.offset, tensor.elems}});
  }
  return {};
}

// --- ZeRO-1 to 3 ----------------------------------------------------------------------------------------------------

Result<RankGroup> Reader::rank_group(const TorchValues& file, Id master, Id state, std::string_view what) const {
  RankGroup out;
  RT_TRY_SET(out.parts[0], file.tensor(master, fmt::format("{}, the master weights", what)));
  if (weights_only_) return out;
  const Dict* const fields = file.dict(state);
  const std::string place = fmt::format("{}: {}", file.archive().path().string(), what);
  if (fields == nullptr) {
    return refusal(ErrorCode::kInvalidInput, place, "has no optimizer state",
                   "exp_avg and exp_avg_sq (save_checkpoint without load_optimizer_states = False before)",
                   "`cairn import --weights-only` takes the weights");
  }
  std::vector<std::string> strange;
  for (const auto& [key, value] : *fields) {
    const std::string name = file.text(key);
    if (name != "step" && std::ranges::count(kMoments, name) == 0) strange.push_back(printable(name));
  }
  for (size_t k = 0; k < kMoments.size(); ++k) {
    const Id moment = file.tree().find(*fields, kMoments[k]);
    if (moment == kNothing || !strange.empty()) {
      std::vector<std::string> found;
      for (const auto& [key, value] : *fields) found.push_back(printable(file.text(key)));
      return refusal(ErrorCode::kUnsupported, place,
                     fmt::format("the optimizer is not Adam or AdamW: its state is {}", fmt::join(found, ", ")),
                     "step, exp_avg and exp_avg_sq", "`cairn import --weights-only` takes the weights");
    }
    RT_TRY_SET(out.parts[k + 1], file.tensor(moment, fmt::format("{}, {}", what, kMoments[k])));
  }
  out.step = file.number(file.tree().find(*fields, "step")).value_or(-1);
  for (const TorchTensor& part : out.parts) {
    if (is_float_dtype(part.dtype)) continue;
    return refusal(ErrorCode::kUnsupported, place, fmt::format("its elements are {}", part.dtype),
                   "F32, BF16 or F16: moments of eight bits are not read",
                   "`cairn import --weights-only` takes the weights");
  }
  return out;
}

Result<RankFile> Reader::read_rank(const fs::path& path, int64_t stage) {
  RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(path));
  RankFile out{.path = path};
  RT_TRY_SET(out.file, add_file(*file));
  const Id state = file->find("optimizer_state_dict");
  const int64_t found = zero_stage(*file);
  if (file->dict(state) == nullptr || found < 1 || found > 3 || (stage > 0 && found != stage)) {
    return refusal(ErrorCode::kCorrupt, path.string(),
                   file->dict(state) == nullptr ? "has no optimizer_state_dict" : fmt::format("is of ZeRO-{}", found),
                   stage > 0 ? fmt::format("ZeRO-{}, as the first rank's file", stage) : "ZeRO-1, -2 or -3",
                   kCopyAgain);
  }
  out.stage = found;
  const Id count = file->get(state, "partition_count");
  if (const std::vector<Id>* counts = file->items(count); counts != nullptr) {
    for (const Id one : *counts) out.partition_count.push_back(file->integer(one).value_or(-1));
  } else {
    out.partition_count.push_back(file->integer(count).value_or(-1));
  }
  if (const std::vector<Id>* said = file->items(file->get(state, "ds_zero_partition_groups")); said != nullptr) {
    for (const Id one : *said) {  // 2026 and later: of each sub-group, experts may have others
      if (const auto parts = file->integer(file->get(one, "partition_count"))) out.partition_count.push_back(*parts);
      if (const auto rank = file->integer(file->get(one, "partition_rank"))) out.said_rank = *rank;
    }
  }
  const bool cut = found == 3;
  const std::vector<Id>* const masters =
      file->items(file->get(state, cut ? "fp32_flat_groups" : "single_partition_of_fp32_groups"));
  if (masters == nullptr) {
    return refusal(ErrorCode::kUnsupported, path.string(), "has no float masters",
                   cut ? "fp32_flat_groups" : "single_partition_of_fp32_groups",
                   "`cairn import --weights-only` takes the model's weights");
  }
  const Id base = file->get(state, cut ? "optimizer_state_dict" : "base_optimizer_state");
  const std::vector<Id>* const elastic = file->items(base);
  const double common_step = file->number(file->get(state, "base_optimizer_state_step")).value_or(-1);
  for (size_t g = 0; g < masters->size(); ++g) {
    const Id of_group = elastic == nullptr    ? file->get(file->get(base, "state"), static_cast<int64_t>(g))
                        : g < elastic->size() ? (*elastic)[g]
                                              : kNothing;
    RT_TRY_SET(RankGroup group, rank_group(*file, (*masters)[g], of_group, fmt::format("group {}", g)));
    if (group.step < 0) group.step = common_step;
    const auto of = [&](std::string_view key) {
      const std::vector<Id>* const all = file->items(file->get(state, key));
      return all != nullptr && g < all->size() ? (*all)[g] : kNothing;
    };
    if (const std::vector<Id>* padding = file->items(of("param_alignment_paddings")); padding != nullptr) {
      for (const Id one : *padding) group.padding.push_back(file->integer(one).value_or(-1));
    }
    if (const Dict* slices = file->dict(of("param_slice_mappings")); slices != nullptr) {
      for (const auto& [name, fragment] : *slices) {
        const Dict* const fields = file->state(fragment);
        if (fields == nullptr) continue;
        group.slices[file->text(name)] = {file->integer(file->tree().find(*fields, "numel")).value_or(-1),
                                          file->integer(file->tree().find(*fields, "start")).value_or(-1)};
      }
    }
    out.groups.push_back(std::move(group));
  }
  if (stage > 0) return out;  // the first rank speaks for all
  read_settings(*file, file->get(base, "param_groups"));
  read_scaler(*file, file->get(state, "loss_scaler"));
  out_.optimizer.clip = std::max(0.0, file->number(file->get(state, "clip_grad")).value_or(0));
  return out;
}

Result<std::map<int64_t, fs::path>> Reader::rank_paths(const std::vector<std::string>& names) const {
  std::map<int64_t, fs::path> out;
  for (const std::string& name : names) {
    if (!matches("*_optim_states.pt", name)) continue;
    const int64_t rank = number_after(name, "zero_pp_rank_");
    if (rank < 0) {
      return refusal(ErrorCode::kInvalidInput, (dir() / name).string(), "is no name that DeepSpeed gives a rank's file",
                     "[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt", "give it the name that it was saved by");
    }
    const auto [at, is_new] = out.emplace(rank, dir() / name);
    if (!is_new) {
      return refusal(ErrorCode::kInvalidInput, (dir() / name).string(),
                     fmt::format("is rank {}'s file, and {} too", rank, at->second.filename().string()),
                     "one file a rank", "remove the one of the other save");
    }
  }
  return out;
}

Status Reader::check_steps(const std::vector<RankFile>& ranks) {
  if (weights_only_) return {};
  for (const RankFile& rank : ranks) {
    for (size_t g = 0; g < rank.groups.size(); ++g) {
      RT_TRY(take_step(rank.groups[g].step, fmt::format("{}: group {}", rank.path.string(), g)));
    }
  }
  return {};
}

Status Reader::read_ranks(const std::vector<std::string>& names) {
  RT_TRY_SET(const auto paths, rank_paths(names));
  std::vector<RankFile> ranks;
  int64_t stage = 0;
  for (const auto& [rank, path] : paths) {
    RT_TRY_SET(RankFile one, read_rank(path, stage));
    stage = one.stage;
    if (one.said_rank >= 0 && one.said_rank != rank) {
      return refusal(ErrorCode::kInvalidInput, path.string(),
                     fmt::format("is rank {}'s file by its name and rank {}'s by its content", rank, one.said_rank),
                     "the name that it was saved by", "give each file its own name again");
    }
    const auto world = static_cast<int64_t>(paths.size());
    for (const int64_t count : one.partition_count) {
      if (count == world && rank < world) continue;
      return refusal(ErrorCode::kInvalidInput, path.string(),
                     fmt::format("is rank {} of {} (partition_count), and the folder has the optimizer files of {}",
                                 rank, count, count_text(world, "rank")),
                     fmt::format("the files of {} of one save", count_text(count, "rank")),
                     "copy the others here, or remove those of another save");
    }
    if (!ranks.empty() && one.groups.size() != ranks.front().groups.size()) {
      return refusal(
          ErrorCode::kCorrupt, path.string(), fmt::format("has {}", count_text(std::ssize(one.groups), "group")),
          fmt::format("{}, as {}", ranks.front().groups.size(), ranks.front().path.filename().string()), kCopyAgain);
    }
    ranks.push_back(std::move(one));
  }
  RT_TRY(check_steps(ranks));
  return stage == 3 ? place_cut(ranks) : place_flat(ranks);
}

/// Checks that each rank has what `param_slice_mappings` says: parameter by parameter, from the first element of its
/// part on. With round_robin_gradients DeepSpeed writes them for another order than the buffer's (so ds_to_universal
/// mixes tensors up); there check_masters() is the proof.
Status Reader::check_slices(const std::vector<RankFile>& ranks, size_t group) const {
  int64_t rank_begin = 0;
  for (const RankFile& rank : ranks) {
    const RankGroup& mine = rank.groups[group];
    const int64_t rank_end = rank_begin + mine.parts[0].elems;
    int64_t at = 0;
    for (size_t p = 0; p < groups_[group].size() && !mine.slices.empty() && !round_robin_; ++p) {
      const Parameter& one = groups_[group][p];
      const int64_t begin = std::max(at, rank_begin), end = std::min(at + one.elems, rank_end);
      at += one.elems + (p < mine.padding.size() ? mine.padding[p] : 0);
      const auto said = mine.slices.find(one.name);
      const bool has = begin < end;
      if (!has && said == mine.slices.end()) continue;
      const std::pair<int64_t, int64_t> mapped =
          said == mine.slices.end() ? std::pair<int64_t, int64_t>{0, 0} : said->second;
      if (has && mapped == std::pair{end - begin, begin - rank_begin}) continue;
      if (!has && mapped.first <= 0) continue;
      return refusal(
          ErrorCode::kCorrupt, rank.path.string(),
          fmt::format("has {} elements of {} at {} (param_slice_mappings)", mapped.first, one.name, mapped.second),
          fmt::format("{} at {}, by param_shapes of the model's file", std::max<int64_t>(0, end - begin),
                      std::max<int64_t>(0, begin - rank_begin)),
          kCopyAgain);
    }
    rank_begin = rank_end;
  }
  return {};
}

Status Reader::place_flat(const std::vector<RankFile>& ranks) {
  const auto world = static_cast<int64_t>(ranks.size());
  if (groups_.size() != ranks.front().groups.size()) {
    return refusal(ErrorCode::kCorrupt, ranks.front().path.string(),
                   fmt::format("has {}", count_text(std::ssize(ranks.front().groups), "group")),
                   fmt::format("{}, as param_shapes of the model's file has", groups_.size()), kCopyAgain);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    RT_TRY(check_slices(ranks, g));
    std::vector<FlatBuffer> buffers;
    std::array<std::string, kKinds> dtypes;
    for (size_t k = 0; k < kKinds; ++k) {
      std::vector<FlatRun> parts;
      for (const RankFile& rank : ranks) {
        const TorchTensor& part = rank.groups[g].parts[k];
        if (dtypes[k].empty()) dtypes[k] = part.dtype;
        if (part.dtype != dtypes[k]) {
          return refusal(ErrorCode::kCorrupt, rank.path.string(), fmt::format("group {} is {}", g, part.dtype),
                         fmt::format("{}, as in the first rank's file", dtypes[k]), kCopyAgain);
        }
        if (part.elems > 0) parts.push_back({rank.file, part.offset, part.elems});
      }
      if (dtypes[k].empty()) dtypes[k] = "F32";
      buffers.emplace_back(std::move(parts), safetensors_dtype_bits(dtypes[k]) / 8);
      if (weights_only_) break;
    }
    const std::vector<int64_t>& padding = ranks.front().groups[g].padding;
    const auto left = [&](size_t k) { return buffers[k].left(); };
    for (size_t p = 0; p < groups_[g].size(); ++p) {
      const Parameter& one = groups_[g][p];
      std::array<std::vector<FlatRun>, kKinds> runs;
      for (size_t k = 0; k < buffers.size(); ++k) {
        if (left(k) < one.elems) {
          return refusal(ErrorCode::kCorrupt, dir().string(),
                         fmt::format("the {} of group {} end in {}: {} elements are left for its {}",
                                     k == 0 ? "masters" : kMoments[k - 1], g, one.name, left(k), one.elems),
                         "the elements of param_shapes in the files of all ranks", kCopyAgain);
        }
        runs[k] = buffers[k].take(one.elems);
        const int64_t behind = p < padding.size() ? padding[p] : 0;
        if (behind < 0 || behind > left(k)) {
          return refusal(ErrorCode::kCorrupt, ranks.front().path.string(),
                         fmt::format("has a padding of {} behind {}", behind, one.name),
                         fmt::format("0 to {}", left(k)), kCopyAgain);
        }
        buffers[k].take(behind);
      }
      if (weights_only_) {
        out_.weights->add(one.name, dtypes[0], one.shape, std::move(runs[0]));
      } else {
        RT_TRY(add(one, dtypes, std::move(runs)));
      }
    }
    for (size_t k = 0; k < buffers.size(); ++k) {
      if (left(k) < 2 * world) continue;  // groups are filled up to a multiple of twice the ranks
      return refusal(ErrorCode::kCorrupt, dir().string(),
                     fmt::format("{} elements of group {} are left behind the last parameter", left(k), g),
                     fmt::format("less than {}", 2 * world), kCopyAgain);
    }
  }
  return {};
}

Status Reader::place_cut(const std::vector<RankFile>& ranks) {
  const auto world = static_cast<int64_t>(ranks.size());
  std::vector<std::array<FlatBuffer, kKinds>> buffers;
  std::array<std::string, kKinds> dtypes;
  for (const RankFile& rank : ranks) {
    std::array<std::vector<FlatRun>, kKinds> parts;
    for (size_t k = 0; k < (weights_only_ ? 1 : kKinds); ++k) {
      for (const RankGroup& group : rank.groups) {
        const TorchTensor& part = group.parts[k];
        if (dtypes[k].empty()) dtypes[k] = part.dtype;
        if (part.dtype != dtypes[k]) {
          return refusal(ErrorCode::kCorrupt, rank.path.string(), fmt::format("a group is {}", part.dtype),
                         fmt::format("{}, as the first one", dtypes[k]), kCopyAgain);
        }
        if (part.elems > 0) parts[k].push_back({rank.file, part.offset, part.elems});
      }
    }
    const auto buffer = [&](size_t k) {
      if (dtypes[k].empty()) dtypes[k] = "F32";
      return FlatBuffer(std::move(parts[k]), safetensors_dtype_bits(dtypes[k]) / 8);
    };
    buffers.push_back({buffer(0), buffer(1), buffer(2)});
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (const Parameter& one : groups_[g]) {
      const int64_t share = (one.elems + world - 1) / world;
      std::array<std::vector<FlatRun>, kKinds> runs;
      for (int64_t r = 0; r < world; ++r) {
        for (size_t k = 0; k < (weights_only_ ? 1 : kKinds); ++k) {
          FlatBuffer& buffer = buffers[static_cast<size_t>(r)][k];
          if (buffer.left() < share) {
            return refusal(ErrorCode::kCorrupt, ranks[static_cast<size_t>(r)].path.string(),
                           fmt::format("the {} end in {}: {} elements are left for a share of {}",
                                       k == 0 ? "masters" : kMoments[k - 1], one.name, buffer.left(), share),
                           fmt::format("a share of 1 in {} of each of param_shapes", world), kCopyAgain);
          }
          int64_t wanted = std::clamp<int64_t>(one.elems - r * share, 0, share);
          for (FlatRun run : buffer.take(share)) {
            run.count = std::min(run.count, wanted);
            wanted -= run.count;
            if (run.count > 0) runs[k].push_back(run);
          }
        }
      }
      if (weights_only_) {
        out_.weights->add(one.name, dtypes[0], one.shape, std::move(runs[0]));
      } else {
        RT_TRY(add(one, dtypes, std::move(runs)));
      }
    }
  }
  for (size_t r = 0; r < buffers.size(); ++r) {
    for (size_t k = 0; k < (weights_only_ ? 1 : kKinds); ++k) {
      if (buffers[r][k].left() == 0) continue;
      return refusal(ErrorCode::kCorrupt, ranks[r].path.string(),
                     fmt::format("{} elements are left behind the last parameter", buffers[r][k].left()),
                     "the shares of param_shapes and nothing else", kCopyAgain);
    }
  }
  return {};
}

// --- universal ------------------------------------------------------------------------------------------------------

/// {param: tensor, cat_dim, ...}, or from ZeRO-3 a bare tensor, flat.
Result<TorchTensor> Reader::universal_tensor(const TorchValues& file, const std::string& name) const {
  const Id inner = file.find("param");
  RT_TRY_SET(TorchTensor out, file.tensor(inner == kNothing ? file.root() : inner, name));
  if (!is_float_dtype(out.dtype)) {
    return refusal(ErrorCode::kUnsupported, file.archive().path().string(), fmt::format("is {}", out.dtype),
                   "F32, BF16 or F16", "convert again with ds_to_universal");
  }
  for (const std::vector<Parameter>& group : groups_) {
    for (const Parameter& one : group) {
      if (one.name != name || out_.about.model_ranks > 1) continue;
      if (one.elems != out.elems || (out.shape.size() > 1 && out.shape != one.shape)) {
        return refusal(ErrorCode::kCorrupt, file.archive().path().string(), fmt::format("is {}", to_string(out.shape)),
                       fmt::format("{}, by param_shapes of the model's file", to_string(one.shape)),
                       "convert again with ds_to_universal");
      }
      out.shape = one.shape;
    }
  }
  return out;
}

Status Reader::read_universal() {
  const fs::path folder = dir() / "zero";
  RT_TRY_SET(const std::vector<std::string> names, sorted_names(folder));
  double common_step = -1;
  if (is_plain_file(folder / "optimizer_state.pt")) {
    RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / "optimizer_state.pt"));
    Id inner = file->find("optimizer_state_dict");
    if (inner == kNothing) inner = file->root();
    Id groups = file->find("param_groups");
    if (groups == kNothing) groups = file->get(inner, "param_groups");
    read_settings(*file, groups);
    read_scaler(*file, file->find("loss_scaler"));
    common_step = file->number(file->get(file->get(file->get(inner, "state"), int64_t{0}), "step")).value_or(-1);
    out_.optimizer.clip = std::max(0.0, file->number(file->find("clip_grad")).value_or(0));
  }
  std::map<std::string, Parameter> known;
  for (const std::vector<Parameter>& group : groups_) {
    for (const Parameter& one : group) known[one.name] = one;
  }
  int64_t found = 0;
  for (const std::string& name : names) {
    if (!fs::is_directory(folder / name) || shared_.contains(name)) continue;  // a tied name has no moments
    if (!is_plain_file(folder / name / "fp32.pt")) {
      return refusal(ErrorCode::kInvalidInput, (folder / name).string(), "has no fp32.pt",
                     "fp32.pt, exp_avg.pt and exp_avg_sq.pt", "copy it here, or convert again with ds_to_universal");
    }
    ++found;
    known.erase(name);
    Parameter one{.name = name};
    std::array<std::string, kKinds> dtypes;
    std::array<std::vector<FlatRun>, kKinds> runs;
    for (size_t k = 0; k < (weights_only_ ? 1 : kKinds); ++k) {
      const std::string stem(k == 0 ? "fp32" : kMoments[k - 1]);
      RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / name / (stem + ".pt")));
      RT_TRY_SET(const TorchTensor tensor, universal_tensor(*file, name));
      if (k > 0 && tensor.shape != one.shape) {
        return refusal(ErrorCode::kCorrupt, file->archive().path().string(),
                       fmt::format("is {}", to_string(tensor.shape)),
                       fmt::format("{}, as fp32.pt", to_string(one.shape)), "convert again with ds_to_universal");
      }
      RT_TRY_SET(const int64_t number, add_file(*file));
      one.shape = tensor.shape;
      one.elems = tensor.elems;
      dtypes[k] = tensor.dtype;
      runs[k] = {{number, tensor.offset, tensor.elems}};
    }
    if (weights_only_) {
      out_.weights->add(name, dtypes[0], one.shape, std::move(runs[0]));
      continue;
    }
    RT_TRY(add(one, dtypes, std::move(runs)));
    double step = common_step;
    if (is_plain_file(folder / name / "step.pt")) {
      RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / name / "step.pt"));
      step = file->number(file->root()).value_or(-1);
    }
    RT_TRY(take_step(step, (folder / name).string()));
  }
  for (const auto& [name, one] : known) {
    return refusal(ErrorCode::kInvalidInput, (folder / name).string(), fmt::format("is missing, found {}", found),
                   "a folder for each of param_shapes", "copy it here, or convert again with ds_to_universal");
  }
  if (found == 0) {
    return refusal(ErrorCode::kInvalidInput, folder.string(), "has no folder with fp32.pt", "one a parameter",
                   "convert again with ds_to_universal");
  }
  return {};
}

// --- ZeRO-0 ---------------------------------------------------------------------------------------------------------

/// The parameters of each group of torch's state, whose names it does not hold: each group has some of the model's in
/// their order. Two that could stand in either group are told apart by the masters, else refused.
Status Reader::group_names(const TorchValues& model, Id masters, const std::vector<std::vector<Shape>>& shapes,
                           std::vector<std::vector<std::string>>* names) const {
  const std::string place = model.archive().path().string();
  std::vector<std::string> order;
  std::set<std::string> seen;  // storages: of tied tensors the first one counts
  for (const std::string& name : module_names_) {
    if (buffers_.contains(name) || shared_.contains(name) || !seen.insert(storages_.at(name)).second) continue;
    order.push_back(name);
  }
  names->assign(shapes.size(), {});
  size_t expected = 0;
  for (const std::vector<Shape>& group : shapes) expected += group.size();
  if (expected != order.size()) {
    return refusal(ErrorCode::kUnsupported, place,
                   fmt::format("the optimizer has {}, the model {}",
                               count_text(static_cast<int64_t>(expected), "tensor"), order.size()),
                   "one for each: frozen parameters of ZeRO-0 cannot be distinguished",
                   "`cairn import --weights-only` takes the weights");
  }
  const std::vector<Id>* const groups = model.items(masters);
  const auto rounds = [&](size_t group, size_t index, const std::string& name) {  // the master to the weight
    const std::vector<Id>* const of_group =
        groups == nullptr || group >= groups->size() ? nullptr : model.items((*groups)[group]);
    if (of_group == nullptr || index >= of_group->size()) return false;
    const Result<TorchTensor> master = model.tensor((*of_group)[index], name);
    if (!master.ok()) return false;
    ForeignState one;
    one.weights = std::make_unique<FlatTensors>(dir(), out_.files);
    one.weights->add(name, master.value().dtype, master.value().shape,
                     {{model_file_, master.value().offset, master.value().elems}});
    one.model_copy = std::make_unique<FlatTensors>(dir(), out_.files);
    const TorchTensor& copy = module_.at(name);
    one.model_copy->add(name, copy.dtype, copy.shape, {{model_file_, copy.offset, copy.elems}});
    return check_masters(one).ok();
  };
  for (const std::string& name : order) {
    std::vector<size_t> fit;
    for (size_t g = 0; g < shapes.size(); ++g) {
      const size_t next = (*names)[g].size();
      if (next < shapes[g].size() && shapes[g][next] == module_.at(name).shape) fit.push_back(g);
    }
    if (fit.size() > 1) std::erase_if(fit, [&](size_t g) { return !rounds(g, (*names)[g].size(), name); });
    if (fit.size() != 1) {
      return refusal(ErrorCode::kUnsupported, place,
                     fmt::format("the optimizer's groups have no names, and {} {}", printable(name),
                                 fit.empty() ? "fits into none of them" : "fits into several"),
                     "groups of which each has tensors of shapes of its own, in the model's order",
                     "save once with ZeRO-1, or `cairn import --weights-only`");
    }
    (*names)[fit.front()].push_back(name);
  }
  return {};
}

Status Reader::read_plain(const TorchValues& model, int64_t file) {
  const std::string place = model.archive().path().string();
  const Id optimizer = model.find("optimizer");
  const Id wrapped = model.get(optimizer, "optimizer_state_dict");
  const Id torch = model.dict(wrapped) != nullptr ? wrapped : optimizer;
  if (model.get(optimizer, "fp32_groups_flat") != kNothing) {
    return refusal(ErrorCode::kUnsupported, place,
                   "its masters are flat buffers of a fused optimizer (fp32_groups_flat)",
                   "fp32_groups, a tensor a parameter", "save once with ZeRO-1, or `cairn import --weights-only`");
  }
  const Id states = model.get(torch, "state");
  const std::vector<Id>* const settings = model.items(model.get(torch, "param_groups"));
  if (model.dict(states) == nullptr || settings == nullptr) {
    return refusal(ErrorCode::kInvalidInput, place, "has no optimizer state", "torch's own, under `optimizer`",
                   "`cairn import --weights-only` takes the weights");
  }
  const Id masters = model.get(optimizer, "fp32_groups");
  std::vector<std::vector<Shape>> shapes;
  std::vector<std::vector<RankGroup>> found;
  for (size_t g = 0; g < settings->size(); ++g) {
    const std::vector<Id>* const members = model.items(model.get((*settings)[g], "params"));
    const std::vector<Id>* const all = model.items(masters);
    const std::vector<Id>* const of_group = all != nullptr && g < all->size() ? model.items((*all)[g]) : nullptr;
    shapes.emplace_back();
    found.emplace_back();
    for (size_t p = 0; members != nullptr && p < members->size(); ++p) {
      const int64_t index = model.integer((*members)[p]).value_or(-1);
      const Id state = model.get(states, index);
      const Id moment = model.get(state, "exp_avg");
      const Id master = of_group != nullptr && p < of_group->size() ? (*of_group)[p] : moment;  // replaced below
      RT_TRY_SET(RankGroup one, rank_group(model, master, state, fmt::format("parameter {}", index)));
      RT_TRY(take_step(one.step, fmt::format("{}: parameter {}", place, index)));
      shapes.back().push_back(one.parts[1].shape);
      found.back().push_back(std::move(one));
    }
  }
  std::vector<std::vector<std::string>> names;
  RT_TRY(group_names(model, masters, shapes, &names));
  const bool own = model.items(masters) != nullptr;
  for (size_t g = 0; g < names.size(); ++g) {
    for (size_t p = 0; p < names[g].size(); ++p) {
      RankGroup& one = found[g][p];
      const TorchTensor& weight = module_.at(names[g][p]);
      if (!own) one.parts[0] = weight;
      std::array<std::string, kKinds> dtypes;
      std::array<std::vector<FlatRun>, kKinds> runs;
      for (size_t k = 0; k < kKinds; ++k) {
        if (one.parts[k].shape != weight.shape) {
          return refusal(ErrorCode::kCorrupt, place,
                         fmt::format("the optimizer's {} for {} is {}", k == 0 ? "master" : kMoments[k - 1],
                                     names[g][p], to_string(one.parts[k].shape)),
                         to_string(weight.shape), kCopyAgain);
        }
        dtypes[k] = one.parts[k].dtype;
        runs[k] = {{file, one.parts[k].offset, one.parts[k].elems}};
      }
      RT_TRY(add({names[g][p], weight.shape, weight.elems}, dtypes, std::move(runs)));
    }
  }
  read_settings(model, model.get(torch, "param_groups"));
  read_scaler(model, optimizer);
  if (const std::optional<double> clip = model.number(model.get(model.find("ds_config"), "gradient_clipping")))
    out_.optimizer.clip = std::max(0.0, *clip);
  return {};
}

Status Reader::read_model_files(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (matches("*_model_states.pt", name)) model_files_.push_back(dir() / name);
  }
  std::ranges::sort(model_files_, {}, [](const fs::path& path) {
    return number_after(path.filename().string(), "zero_pp_rank_");  // numbers, not their digits
  });
  if (model_files_.empty()) {
    return refusal(ErrorCode::kInvalidInput, dir().string(), "*_model_states.pt is missing",
                   "the model's file beside those of the optimizer", "copy it here, or save again");
  }
  return {};
}

Result<ForeignState> Reader::read() {
  if (!out_.about.problems.empty()) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: is a training state of DeepSpeed ({}{}) that is not complete:\n  {}", dir().string(),
                             out_.about.layout, out_.about.step < 0 ? "" : fmt::format(", step {}", out_.about.step),
                             fmt::join(out_.about.problems, "\n  "))};
  }
  RT_TRY_SET(const std::vector<std::string> names, sorted_names(dir()));
  RT_TRY(refuse_layouts(names));
  RT_TRY(read_model_files(names));
  out_.files = std::make_shared<FilePool>();
  const auto empty = [&] { return std::make_unique<FlatTensors>(dir(), out_.files); };
  out_.weights = empty();
  if (!weights_only_) {
    out_.exp_avg = empty();
    out_.exp_avg_sq = empty();
  }
  std::unique_ptr<TorchValues> model;
  for (const fs::path& path : model_files_) {
    RT_TRY_SET(std::unique_ptr<TorchValues> one, read_archive(path));
    RT_TRY_SET(const int64_t file, add_file(*one));
    RT_TRY(read_frozen(*one, file));
    if (model != nullptr) continue;
    model = std::move(one);
    model_file_ = file;
    RT_TRY(read_position(*model));
    RT_TRY(read_shapes(*model));
    RT_TRY(read_module(*model, file));
    RT_TRY(keep_text(*model));
  }
  const bool universal = fs::is_directory(dir() / "zero");
  const bool ranks =
      std::ranges::any_of(names, [](const std::string& name) { return matches("*_optim_states.pt", name); });
  if (weights_only_ && out_.model_copy != nullptr) {
    out_.weights = std::move(out_.model_copy);
    return std::move(out_);
  }
  if (universal) {
    RT_TRY(read_universal());
  } else if (ranks) {
    RT_TRY(read_ranks(names));
  } else {
    RT_TRY(read_plain(*model, model_file_));
  }
  RT_TRY(add_untrained());
  if (universal && out_.about.model_ranks > 1) {
    out_.model_copy = nullptr;
    out_.notes.emplace_back("the masters are not compared with the model's weights, which are cut by model ranks");
  } else if (out_.model_copy == nullptr) {
    out_.notes.emplace_back("no 16-bit weights are saved to compare the masters with");
  }
  for (const SafeTensor& tensor : out_.weights->tensors()) {
    if (tensor.dtype == "F32" || buffers_.contains(tensor.name)) continue;
    if (std::ranges::any_of(frozen_, [&](const Frozen& one) { return one.parameter.name == tensor.name; })) continue;
    out_.notes.push_back(
        fmt::format("{} is stored as {}: no float masters were kept, the weights are taken as they are", tensor.name,
                    tensor.dtype));
    break;
  }
  return std::move(out_);
}

}  // namespace

int64_t zero_stage(const TorchValues& file) {
  const Id stage = file.get(file.find("optimizer_state_dict"), "zero_stage");
  if (stage == kNothing || file.tree().kind(stage) != TorchValues::Kind::kObject)
    return file.integer(stage).value_or(-1);
  const std::vector<Id>* arguments = file.items(file.tree().object(stage, "").value()->arguments);
  return arguments != nullptr && arguments->size() == 1 ? file.integer(arguments->front()).value_or(-1) : -1;
}

Result<ForeignState> open_deepspeed(TrainingState about, bool weights_only) {
  return Reader(std::move(about), weights_only).read();
}

}  // namespace cairn::convert
