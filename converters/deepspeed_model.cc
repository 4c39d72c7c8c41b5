#include <fmt/format.h>

#include <algorithm>

#include "converters/deepspeed_parts.h"
#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "runtime/core/count_text.h"
#include "runtime/core/glob.h"
#include "runtime/json/json.h"

namespace cairn::convert::deepspeed {
namespace {

namespace fs = std::filesystem;

Status read_shapes(Opening& o, const TorchValues& model) {
  const auto add_group = [&](const Dict& shapes) -> Status {
    std::vector<Parameter> group;
    for (const auto& [name, size] : shapes) {
      RT_TRY_SET(Parameter one, parameter(model, name, size));
      group.push_back(std::move(one));
    }
    o.groups.push_back(std::move(group));
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

Status read_module(Opening& o, const TorchValues& model, int64_t file) {
  if (const std::vector<Id>* buffers = model.items(model.find("buffer_names")); buffers != nullptr) {
    for (const Id name : *buffers) o.buffers.insert(model.text(name));
  }
  if (const Dict* shared = model.dict(model.find("shared_params")); shared != nullptr) {
    for (const auto& [alias, name] : *shared) o.shared[model.text(alias)] = model.text(name);
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
    o.storages[name] = model.storage_key(value);
    if (o.module.emplace(name, std::move(tensor).value()).second) o.module_names.push_back(name);
  }
  if (strided > 0) {
    o.out.notes.push_back(fmt::format("{} of the model's copy {} strided: the masters are not compared with {}",
                                      count_text(strided, "tensor"), strided == 1 ? "is" : "are",
                                      strided == 1 ? "it" : "them"));
  }
  if (o.module.empty()) return {};
  o.out.model_copy = std::make_unique<FlatTensors>(o.dir(), o.out.files);
  for (const std::string& name : o.module_names) {
    const TorchTensor& tensor = o.module[name];
    if (!is_float_dtype(tensor.dtype)) continue;
    o.out.model_copy->add(name, tensor.dtype, tensor.shape, {{file, tensor.offset, tensor.elems}});
  }
  return {};
}

/// ZeRO-1, -2: whole tensors in one file. ZeRO-3: a fragment in each rank's, padded to the same length.
Status read_frozen(Opening& o, const TorchValues& model, int64_t file) {
  const Dict* const shapes = model.dict(model.find("frozen_param_shapes"));
  if (shapes == nullptr) return {};
  size_t k = 0;
  for (const auto& [name, size] : *shapes) {
    RT_TRY_SET(Parameter one, parameter(model, name, size));
    RT_TRY_SET(const TorchTensor fragment,
               model.tensor(model.get(model.find("frozen_param_fragments"), one.name), "frozen " + one.name));
    if (k == o.frozen.size()) o.frozen.push_back({one, fragment.dtype, {}});
    Frozen& frozen = o.frozen[k++];
    if (frozen.parameter.name != one.name || frozen.dtype != fragment.dtype) {
      return refusal(ErrorCode::kCorrupt, model.archive().path().string(),
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

Status read_position(Opening& o, const TorchValues& model) {
  const std::optional<int64_t> steps = model.integer(model.find("global_steps"));
  if (!steps || *steps < 0) {
    return refusal(ErrorCode::kCorrupt, model.archive().path().string(), "does not say how many steps were done",
                   "a number as global_steps", kCopyAgain);
  }
  o.out.step = *steps;
  o.out.samples = std::max<int64_t>(0, model.integer(model.find("global_samples")).value_or(0));
  o.out.loss_scale.skipped = std::max<int64_t>(0, model.integer(model.find("skipped_steps")).value_or(0));
  const Id zero = model.get(model.find("ds_config"), "zero_optimization");
  if (const Id robin = model.get(zero, "round_robin_gradients"); robin != kNothing)
    o.round_robin = model.tree().kind(robin) == TorchValues::Kind::kBool && model.tree().boolean(robin, "").value();
  const std::optional<int64_t> schedule = model.integer(model.get(model.find("lr_scheduler"), "last_batch_iteration"));
  if (schedule && *schedule + 1 != o.out.step) {
    o.out.notes.push_back(fmt::format(
        "its schedule has done {} of {}: it does not count steps that were skipped; the recipe's counts all",
        count_text(*schedule + 1, "step"), o.out.step));
  }
  if (model.find("ds_autoep_layers") != kNothing) {
    return refusal(ErrorCode::kUnsupported, model.archive().path().string(), "has layers of AutoEP (ds_autoep_layers)",
                   "weights that are not cut by experts",
                   "save without AutoEP, or import a folder of save_16bit_model");
  }
  return {};
}

Status keep_text(Opening& o, const TorchValues& model) {
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
    o.out.notes.push_back(
        fmt::format("{} of the client's state left out: no plain values", count_text(opaque, "value")));
  for (auto it = kept.begin(); it != kept.end() && std::ssize(json_text(kept)) > kMaxKeptBytes;) it = kept.erase(it);
  o.out.kept["state"] = std::move(kept);
  return {};
}

}  // namespace

Result<std::unique_ptr<TorchValues>> read_model(Opening& o, const std::vector<fs::path>& paths) {
  std::unique_ptr<TorchValues> model;
  for (const fs::path& path : paths) {
    RT_TRY_SET(std::unique_ptr<TorchValues> one, read_archive(path));
    RT_TRY_SET(const int64_t file, add_file(o, *one));
    RT_TRY(read_frozen(o, *one, file));
    if (model != nullptr) continue;
    model = std::move(one);
    o.model_file = file;
    RT_TRY(read_position(o, *model));
    RT_TRY(read_shapes(o, *model));
    RT_TRY(read_module(o, *model, file));
    RT_TRY(keep_text(o, *model));
  }
  return model;
}

Status add_untrained(Opening& o) {
  int64_t count = 0;
  const auto add_one = [&](const Parameter& one, const std::string& dtype, std::vector<FlatRun> runs) {
    const std::vector<FlatRun> zeros = {{-1, 0, one.elems}};
    o.out.weights->add(one.name, dtype, one.shape, std::move(runs));
    if (o.out.exp_avg != nullptr) {
      o.out.exp_avg->add(one.name, "F32", one.shape, zeros);
      o.out.exp_avg_sq->add(one.name, "F32", one.shape, zeros);
    }
    ++count;
  };
  for (Frozen& frozen : o.frozen) {
    int64_t elems = 0;
    for (const FlatRun& run : frozen.runs) elems += run.count;
    if (o.out.weights->find(frozen.parameter.name) != nullptr) continue;
    if (elems != frozen.parameter.elems) {
      return refusal(ErrorCode::kCorrupt, o.dir().string(),
                     fmt::format("frozen tensor {} has {} elements in the ranks' files", frozen.parameter.name, elems),
                     fmt::format("{}", frozen.parameter.elems), kCopyAgain);
    }
    add_one(frozen.parameter, frozen.dtype, std::move(frozen.runs));
  }
  if (count > 0) {
    o.out.notes.push_back(fmt::format("{} frozen: moments begin at zero there, and Cairn trains all tensors",
                                      count == 1 ? "1 tensor was" : fmt::format("{} tensors were", count)));
  }
  for (const std::string& name : o.buffers) {
    const auto found = o.module.find(name);
    if (found == o.module.end() || !is_float_dtype(found->second.dtype) || o.out.weights->find(name) != nullptr)
      continue;
    const TorchTensor& tensor = found->second;
    add_one({name, tensor.shape, tensor.elems}, tensor.dtype, {{o.model_file, tensor.offset, tensor.elems}});
  }
  return {};
}

}  // namespace cairn::convert::deepspeed
