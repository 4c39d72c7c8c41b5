#include "converters/state_builder.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "converters/pickle_reader.h"

namespace cairn::convert {

Error refusal(ErrorCode code, std::string_view place, std::string_view wrong, std::string_view expected,
              std::string_view remedy) {
  return Error{code, fmt::format("{}: {}\n  expected {}\n  {}", place, wrong, expected, remedy)};
}

StateBuilder::StateBuilder(TrainingState about, bool only_weights) : weights_only(only_weights) {
  out.about = std::move(about);
  out.files = std::make_shared<FilePool>();
  const auto empty = [&] { return std::make_unique<FlatTensors>(dir(), out.files); };
  out.weights = empty();
  if (weights_only) return;
  out.exp_avg = empty();
  out.exp_avg_sq = empty();
}

Status StateBuilder::take_step(double step, const std::string& place) {
  if (step < 0 || step != std::floor(step) || step > 1e15) {
    return refusal(ErrorCode::kCorrupt, place, "the optimizer does not say how many updates it has done",
                   "a whole number as `step` of its state", kCopyAgain);
  }
  if (step_place_.empty()) {
    step_place_ = place;
    out.adam_step = static_cast<int64_t>(step);
  } else if (static_cast<int64_t>(step) != out.adam_step) {
    return refusal(
        ErrorCode::kCorrupt, place,
        fmt::format("its state is of update {}, and {} has that of update {}", step, step_place_, out.adam_step),
        "one count of updates in all parameters", kCopyAgain);
  }
  return {};
}

Status StateBuilder::add(const Parameter& parameter, const std::array<std::string, kKinds>& dtypes,
                         std::array<std::vector<FlatRun>, kKinds> runs) {
  if (out.weights->find(parameter.name) != nullptr) {
    return refusal(ErrorCode::kCorrupt, dir().string(), fmt::format("has tensor {} twice", printable(parameter.name)),
                   "each once", kCopyAgain);
  }
  FlatTensors* const kinds[kKinds] = {out.weights.get(), out.exp_avg.get(), out.exp_avg_sq.get()};
  for (size_t k = 0; k < (weights_only ? 1 : kKinds); ++k) {
    kinds[k]->add(parameter.name, dtypes[k], parameter.shape, std::move(runs[k]));
  }
  return {};
}

}  // namespace cairn::convert
