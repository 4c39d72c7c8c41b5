#include <fmt/format.h>

#include <algorithm>

#include "converters/deepspeed_parts.h"
#include "converters/elements.h"
#include "converters/foreign_file.h"

namespace cairn::convert::deepspeed {
namespace {

namespace fs = std::filesystem;

/// {param: tensor, cat_dim, ...}, or from ZeRO-3 a bare tensor, flat.
Result<TorchTensor> universal_tensor(const Opening& o, const TorchValues& file, const std::string& name) {
  const Id inner = file.find("param");
  RT_TRY_SET(TorchTensor out, file.tensor(inner == kNothing ? file.root() : inner, name));
  if (!is_float_dtype(out.dtype)) {
    return refusal(ErrorCode::kUnsupported, file.archive().path().string(), fmt::format("is {}", out.dtype),
                   "F32, BF16 or F16", "convert again with ds_to_universal");
  }
  for (const std::vector<Parameter>& group : o.groups) {
    for (const Parameter& one : group) {
      if (one.name != name || o.out.about.model_ranks > 1) continue;
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

}  // namespace

Status read_universal(Opening& o) {
  const fs::path folder = o.dir() / "zero";
  RT_TRY_SET(const std::vector<std::string> names, sorted_names(folder));
  double common_step = -1;
  if (is_plain_file(folder / "optimizer_state.pt")) {
    RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / "optimizer_state.pt"));
    Id inner = file->find("optimizer_state_dict");
    if (inner == kNothing) inner = file->root();
    Id groups = file->find("param_groups");
    if (groups == kNothing) groups = file->get(inner, "param_groups");
    read_settings(o, *file, groups);
    read_scaler(o, *file, file->find("loss_scaler"));
    common_step = file->number(file->get(file->get(file->get(inner, "state"), int64_t{0}), "step")).value_or(-1);
    o.out.optimizer.clip = std::max(0.0, file->number(file->find("clip_grad")).value_or(0));
  }
  std::map<std::string, Parameter> known;
  for (const std::vector<Parameter>& group : o.groups) {
    for (const Parameter& one : group) known[one.name] = one;
  }
  int64_t found = 0;
  for (const std::string& name : names) {
    if (!fs::is_directory(folder / name) || o.shared.contains(name)) continue;  // a tied name has no moments
    if (!is_plain_file(folder / name / "fp32.pt")) {
      return refusal(ErrorCode::kInvalidInput, (folder / name).string(), "has no fp32.pt",
                     "fp32.pt, exp_avg.pt and exp_avg_sq.pt", "copy it here, or convert again with ds_to_universal");
    }
    ++found;
    known.erase(name);
    Parameter one{.name = name};
    std::array<std::string, kKinds> dtypes;
    std::array<std::vector<FlatRun>, kKinds> runs;
    for (size_t k = 0; k < (o.weights_only ? 1 : kKinds); ++k) {
      const std::string stem(k == 0 ? "fp32" : kMoments[k - 1]);
      RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / name / (stem + ".pt")));
      RT_TRY_SET(const TorchTensor tensor, universal_tensor(o, *file, name));
      if (k > 0 && tensor.shape != one.shape) {
        return refusal(ErrorCode::kCorrupt, file->archive().path().string(),
                       fmt::format("is {}", to_string(tensor.shape)),
                       fmt::format("{}, as fp32.pt", to_string(one.shape)), "convert again with ds_to_universal");
      }
      RT_TRY_SET(const int64_t number, add_file(o, *file));
      one.shape = tensor.shape;
      one.elems = tensor.elems;
      dtypes[k] = tensor.dtype;
      runs[k] = {{number, tensor.offset, tensor.elems}};
    }
    RT_TRY(o.add(one, dtypes, std::move(runs)));
    if (o.weights_only) continue;
    double step = common_step;
    if (is_plain_file(folder / name / "step.pt")) {
      RT_TRY_SET(const std::unique_ptr<TorchValues> file, read_archive(folder / name / "step.pt"));
      step = file->number(file->root()).value_or(-1);
    }
    RT_TRY(o.take_step(step, (folder / name).string()));
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

}  // namespace cairn::convert::deepspeed
