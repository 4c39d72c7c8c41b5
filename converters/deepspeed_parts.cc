#include "converters/deepspeed_parts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "converters/elements.h"
#include "converters/foreign_file.h"
#include "runtime/json/json.h"

namespace cairn::convert::deepspeed {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostNames = size_t{1} << 22;

}  // namespace

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

Result<Parameter> parameter(const TorchValues& file, Id name, Id size) {
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

Result<int64_t> add_file(Opening& o, const TorchValues& file) {
  o.out.archives.push_back({file.archive().path()});
  return o.out.files->add(file.archive().path());
}

Result<RankGroup> rank_group(const Opening& o, const TorchValues& file, Id master, Id state, std::string_view what) {
  RankGroup out;
  RT_TRY_SET(out.parts[0], file.tensor(master, fmt::format("{}, the master weights", what)));
  if (o.weights_only) return out;
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

void read_settings(Opening& o, const TorchValues& file, Id param_groups) {
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
  if (std::ssize(json_text(all)) <= kMaxKeptBytes) o.out.kept["param_groups"] = std::move(all);
  OptimizerConfig& to = o.out.optimizer;
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

/// Theirs grows when (cur_iter - last_overflow_iter) is a multiple of the window, and counts
/// cur_iter up behind each step.
void read_scaler(Opening& o, const TorchValues& file, Id scaler) {
  if (o.out.about.dtype != "F16") {
    o.out.loss_scale = {};
    return;
  }
  const Dict* const fields = file.state(scaler);
  if (fields == nullptr) return;
  const auto number = [&](std::string_view key) { return file.number(file.tree().find(*fields, key)); };
  const double scale = number("cur_scale").value_or(0);
  if (!(scale > 0)) return;
  o.out.loss_scale.scale = scale;
  const auto window = static_cast<int64_t>(std::clamp(number("scale_window").value_or(0), 0.0, 1e15));
  const double good = number("cur_iter").value_or(0) - number("last_overflow_iter").value_or(-1) - 1;
  if (window > 0 && good >= 0 && good < 1e15) o.out.loss_scale.good_steps = static_cast<int64_t>(good) % window;
  if (number("delayed_shift").value_or(1) > 1) {
    o.out.loss_scale.hysteresis_left =
        static_cast<int64_t>(std::clamp(number("cur_hysteresis").value_or(1) - 1, 0.0, 1e6));
  }
}

}  // namespace cairn::convert::deepspeed
