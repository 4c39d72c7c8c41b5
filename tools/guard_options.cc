#include "tools/guard_options.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "runtime/config/skipped_positions.h"
#include "runtime/json/json.h"
#include "tools/number_option.h"

namespace cairn::tools {
namespace {

constexpr int64_t kMostSkipped = 10'000;  // steps of one --skip
constexpr int64_t kMostSteps = 1'000'000'000;

}  // namespace

void add_guard_options(CLI::App& command, GuardArgs& args) {
  command
      .add_option("--skip", args.skip,
                  "steps=A..B: leave the updates of these steps out, as watch.skip_steps of the recipe does")
      ->type_name("steps=A..B");
  command
      .add_option("--lower-lr", args.lower_lr,
                  "BY,over=N,back=N: the rate is times BY for N steps from here on, then rises to its schedule over "
                  "`back` steps (default: 0); nothing while the same is under way already")
      ->type_name("BY,over=N");
}

Result<std::optional<Lowering>> lowering_by_hand(const GuardArgs& args) {
  if (args.lower_lr.empty()) return std::optional<Lowering>();
  const auto refuse = [&](const std::string& why) {
    return Error{
        ErrorCode::kInvalidInput,
        fmt::format("--lower-lr {}: {}; expected BY,over=N or BY,over=N,back=N, as 0.5,over=500", args.lower_lr, why)};
  };
  Lowering out{.why = "by hand"};
  std::string_view rest = args.lower_lr;
  const auto word = [&] {
    const std::string_view next = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), next.size() + 1));
    return next;
  };
  const auto by = number_of<double>(word());
  if (!by || !(*by > 0) || !(*by < 1)) return refuse("BY is not a number above 0 and below 1");
  out.by = *by;
  while (!rest.empty()) {
    const std::string_view next = word();
    const std::string_view name = next.substr(0, next.find('='));
    const auto steps = number_of<int64_t>(next.substr(std::min(next.size(), name.size() + 1)));
    int64_t* const into = name == "over" ? &out.over : name == "back" ? &out.back : nullptr;
    if (into == nullptr || !steps || *steps < 0 || *steps > kMostSteps) return refuse(fmt::format("\"{}\"", next));
    *into = *steps;
  }
  if (out.over + out.back == 0) return refuse("it lasts no step");
  return std::optional(out);
}

Status skip_steps(const GuardArgs& args, Recipe* recipe) {
  if (args.skip.empty()) return {};
  constexpr std::string_view kPrefix = "steps=";
  const auto refuse = [&](const std::string& why) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("--skip {}: {}; expected steps=A..B, as steps=14..14", args.skip, why)};
  };
  if (!args.skip.starts_with(kPrefix)) return refuse("it does not begin with steps=");
  const Result<PositionRange> range = parse_positions(args.skip.substr(kPrefix.size()));
  if (!range.ok()) return refuse(range.error().message);
  const auto [first, last] = range.value();
  if (first < 1) return refuse("the first step of a run is 1");
  if (last - first >= kMostSkipped) return refuse(fmt::format("more than {} steps", kMostSkipped));
  const auto add = [first, last](std::vector<int64_t>& steps) {
    std::set<int64_t> all(steps.begin(), steps.end());
    for (int64_t step = first; step <= last; ++step) all.insert(step);
    steps.assign(all.begin(), all.end());
  };
  add(recipe->watch.skip_steps);
  for (RecipeStage& stage : recipe->stages) {  // one that sets the same field
    nlohmann::json changes = json_or_nothing(stage.changes);
    if (!changes.contains("watch.skip_steps")) continue;
    auto steps = changes["watch.skip_steps"].get<std::vector<int64_t>>();
    add(steps);
    changes["watch.skip_steps"] = steps;
    stage.changes = json_text(changes);
  }
  return {};
}

}  // namespace cairn::tools
