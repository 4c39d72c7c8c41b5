#include "converters/deepspeed.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "converters/deepspeed_parts.h"
#include "runtime/core/glob.h"

namespace cairn::convert {
namespace deepspeed {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUniversal =
    "python -m deepspeed.checkpoint.ds_to_universal joins the ranks; give the folder that it writes";

Status refuse_layouts(const Opening& o, const std::vector<std::string>& names) {
  const auto any = [&](std::string_view pattern) {
    return std::ranges::any_of(names, [&](const std::string& name) { return matches(pattern, name); });
  };
  const auto unsupported = [&](std::string_view wrong, std::string_view expected, std::string_view remedy) {
    return refusal(ErrorCode::kUnsupported, o.dir().string(), wrong, expected, remedy);
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
  const bool universal = fs::is_directory(o.dir() / "zero");
  const auto of_other_rank = [](const std::string& name) {
    return name.ends_with("_states.pt") && number_after(name, "mp_rank_") > 0;
  };
  if (!universal && std::ranges::any_of(names, of_other_rank))
    return unsupported(fmt::format("is of several model ranks ({})", std::max<int64_t>(2, o.out.about.model_ranks)),
                       "only mp_rank_00", kUniversal);
  return {};
}

/// The model's files of all ranks, in the order of the ranks.
Result<std::vector<fs::path>> model_files(const Opening& o, const std::vector<std::string>& names) {
  std::vector<fs::path> out;
  for (const std::string& name : names) {
    if (matches("*_model_states.pt", name)) out.push_back(o.dir() / name);
  }
  std::ranges::sort(out, {}, [](const fs::path& path) {
    return number_after(path.filename().string(), "zero_pp_rank_");  // numbers, not their digits
  });
  if (out.empty()) {
    return refusal(ErrorCode::kInvalidInput, o.dir().string(), "*_model_states.pt is missing",
                   "the model's file beside those of the optimizer", "copy it here, or save again");
  }
  return out;
}

Result<ForeignState> read(Opening& o) {
  if (!o.out.about.problems.empty()) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("{}: is a training state of DeepSpeed ({}{}) that is not complete:\n  {}", o.dir().string(),
                    o.out.about.layout, o.out.about.step < 0 ? "" : fmt::format(", step {}", o.out.about.step),
                    fmt::join(o.out.about.problems, "\n  "))};
  }
  RT_TRY_SET(const std::vector<std::string> names, sorted_names(o.dir()));
  RT_TRY(refuse_layouts(o, names));
  RT_TRY_SET(const std::vector<fs::path> paths, model_files(o, names));
  RT_TRY_SET(const std::unique_ptr<TorchValues> model, read_model(o, paths));
  const bool universal = fs::is_directory(o.dir() / "zero");
  const bool ranks =
      std::ranges::any_of(names, [](const std::string& name) { return matches("*_optim_states.pt", name); });
  if (o.weights_only && o.out.model_copy != nullptr) {
    o.out.weights = std::move(o.out.model_copy);
    return std::move(o.out);
  }
  if (universal) {
    RT_TRY(read_universal(o));
  } else if (ranks) {
    RT_TRY(read_ranks(o, names));
  } else {
    RT_TRY(read_plain(o, *model, o.model_file));
  }
  RT_TRY(add_untrained(o));
  if (universal && o.out.about.model_ranks > 1) {
    o.out.model_copy = nullptr;
    o.out.notes.emplace_back("the masters are not compared with the model's weights, which are cut by model ranks");
  } else if (o.out.model_copy == nullptr) {
    o.out.notes.emplace_back("no 16-bit weights are saved to compare the masters with");
  }
  for (const SafeTensor& tensor : o.out.weights->tensors()) {
    if (tensor.dtype == "F32" || o.buffers.contains(tensor.name)) continue;
    if (std::ranges::any_of(o.frozen, [&](const Frozen& one) { return one.parameter.name == tensor.name; })) continue;
    o.out.notes.push_back(
        fmt::format("{} is stored as {}: no float masters were kept, the weights are taken as they are", tensor.name,
                    tensor.dtype));
    break;
  }
  return std::move(o.out);
}

}  // namespace
}  // namespace deepspeed

int64_t zero_stage(const TorchValues& file) {
  using deepspeed::Id;
  const Id stage = file.get(file.find("optimizer_state_dict"), "zero_stage");
  if (stage == TorchValues::kNothing || file.tree().kind(stage) != TorchValues::Kind::kObject)
    return file.integer(stage).value_or(-1);
  const std::vector<Id>* arguments = file.items(file.tree().object(stage, "").value()->arguments);
  return arguments != nullptr && arguments->size() == 1 ? file.integer(arguments->front()).value_or(-1) : -1;
}

Result<ForeignState> open_deepspeed(TrainingState about, bool weights_only) {
  deepspeed::Opening opening(std::move(about), weights_only);
  return deepspeed::read(opening);
}

}  // namespace cairn::convert
