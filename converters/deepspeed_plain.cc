#include <fmt/format.h>

#include <algorithm>

#include "converters/deepspeed_parts.h"
#include "runtime/core/count_text.h"

namespace cairn::convert::deepspeed {
namespace {

/// The parameters of each group of torch's state, whose names it does not hold: each group has some of the model's in
/// their order. Two that could stand in either group are told apart by the masters, else refused.
Status group_names(const Opening& o, const TorchValues& model, Id masters,
                   const std::vector<std::vector<Shape>>& shapes, std::vector<std::vector<std::string>>* names) {
  const std::string place = model.archive().path().string();
  std::vector<std::string> order;
  std::set<std::string> seen;  // storages: of tied tensors the first one counts
  for (const std::string& name : o.module_names) {
    if (o.buffers.contains(name) || o.shared.contains(name) || !seen.insert(o.storages.at(name)).second) continue;
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
    one.weights = std::make_unique<FlatTensors>(o.dir(), o.out.files);
    one.weights->add(name, master.value().dtype, master.value().shape,
                     {{o.model_file, master.value().offset, master.value().elems}});
    one.model_copy = std::make_unique<FlatTensors>(o.dir(), o.out.files);
    const TorchTensor& copy = o.module.at(name);
    one.model_copy->add(name, copy.dtype, copy.shape, {{o.model_file, copy.offset, copy.elems}});
    return check_masters(one).ok();
  };
  for (const std::string& name : order) {
    std::vector<size_t> fit;
    for (size_t g = 0; g < shapes.size(); ++g) {
      const size_t next = (*names)[g].size();
      if (next < shapes[g].size() && shapes[g][next] == o.module.at(name).shape) fit.push_back(g);
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

}  // namespace

Status read_plain(Opening& o, const TorchValues& model, int64_t file) {
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
      RT_TRY_SET(RankGroup one, rank_group(o, model, master, state, fmt::format("parameter {}", index)));
      RT_TRY(o.take_step(one.step, fmt::format("{}: parameter {}", place, index)));
      shapes.back().push_back(one.parts[1].shape);
      found.back().push_back(std::move(one));
    }
  }
  std::vector<std::vector<std::string>> names;
  RT_TRY(group_names(o, model, masters, shapes, &names));
  const bool own = model.items(masters) != nullptr;
  for (size_t g = 0; g < names.size(); ++g) {
    for (size_t p = 0; p < names[g].size(); ++p) {
      RankGroup& one = found[g][p];
      const TorchTensor& weight = o.module.at(names[g][p]);
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
      RT_TRY(o.add({names[g][p], weight.shape, weight.elems}, dtypes, std::move(runs)));
    }
  }
  read_settings(o, model, model.get(torch, "param_groups"));
  read_scaler(o, model, optimizer);
  if (const std::optional<double> clip = model.number(model.get(model.find("ds_config"), "gradient_clipping")))
    o.out.optimizer.clip = std::max(0.0, *clip);
  return {};
}

}  // namespace cairn::convert::deepspeed
