#include "dsl/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "dsl/change_rules.h"
#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "runtime/json/json.h"
#include "runtime/plan/recipe_rules.h"

namespace cairn::dsl {
namespace {

constexpr const char* kLrFrom = "optimizer.lr_from";

// What changes nothing that is trained, and no layout or memory hangs on it; whole blocks end with a dot.
constexpr std::array kFree = {"checkpoint.", "eval.", "recompute.", "watch.", "data."};
constexpr std::array kFixed = {"checkpoint.snapshot_by", "checkpoint.in_flight", "checkpoint.replicate_steps",
                               "checkpoint.copy_to", "data.seed"};

Json parsed(const std::string& changes) {
  return changes.empty() ? Json::object() : json_or_nothing(changes);  // discarded when it is none
}

Json::json_pointer pointer_of(std::string key) {
  std::replace(key.begin(), key.end(), '.', '/');
  return Json::json_pointer("/" + key);
}

std::vector<std::string> stored_keys(const Recipe& recipe) {
  std::vector<std::string> out;
  for (const StoredValue& value : stored_values(recipe)) out.push_back(value.key);
  return out;
}

}  // namespace

bool may_change_in_stage(const std::string& path) {
  const ChangeRule* const rule = find_change_rule(path);
  if (rule == nullptr || path == "stages" || std::ranges::find(kFixed, path) != kFixed.end()) return false;
  if (rule->change == ChangeClass::kRule || path == "model.rope_theta" || path.starts_with("model.rope.")) return true;
  return rule->change == ChangeClass::kExact &&
         std::ranges::any_of(kFree, [&](const char* block) { return path.starts_with(block); });
}

bool schedule_set(const RecipeStage& stage) { return parsed(stage.changes).contains(kLrFrom); }

std::string stage_changes(const Recipe& before, const Recipe& after, bool sets_schedule) {
  Json out = Json::object();
  const std::vector<StoredValue> left = stored_values(before), right = stored_values(after);
  for (size_t i = 0; i < left.size(); ++i)
    if (left[i].value != right[i].value || (sets_schedule && left[i].key == kLrFrom))
      out[right[i].key] = right[i].value;
  return json_text(out);
}

Result<std::vector<Recipe>> recipe_segments(const Recipe& recipe) {
  if (recipe.stages.size() > kMaxStages)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("recipe JSON: stages has {} entries, more than {}", recipe.stages.size(), kMaxStages)};
  Recipe base = recipe;
  base.stages.clear();
  std::vector<Recipe> out;
  RT_TRY_SET(base, decode_recipe(encode_recipe(base)));
  out.push_back(std::move(base));
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    const auto bad = [&](const std::string& message) {
      return Error{ErrorCode::kInvalidInput, fmt::format("recipe JSON: stages[{}].changes{}", i + 1, message)};
    };
    Json json = json_or_nothing(encode_recipe(out.back()));
    const Json changes = parsed(recipe.stages[i].changes);
    if (!changes.is_object()) return bad(" must be an object, got " + recipe.stages[i].changes);
    for (const auto& [key, value] : changes.items()) {
      if (find_stored(key) == nullptr) {
        const std::string near = nearest(key, stored_keys(out.back()));
        return bad(fmt::format(".{}: no such field{}", key, near.empty() ? "" : "; did you mean " + near + "?"));
      }
      json[pointer_of(key)] = value;
    }
    Result<Recipe> after = decode_recipe(json_text(json));
    if (!after.ok()) {
      std::string message = after.error().message;
      if (const std::string head = "recipe JSON: "; message.rfind(head, 0) == 0) message.erase(0, head.size());
      return bad("." + message);
    }
    for (const FieldChange& change : compare_recipes(out.back(), after.value()))
      if (!may_change_in_stage(change.path))
        return bad(fmt::format(".{} cannot change in the middle of a run", change.path));
    out.push_back(std::move(after).value());
  }
  return out;
}

std::vector<std::optional<StageBeginning>> stage_beginnings(const Recipe& recipe, const std::vector<Recipe>& segments) {
  std::vector<std::optional<StageBeginning>> out;
  StageBeginning now;
  bool known = true;
  for (size_t i = 0; i < recipe.stages.size() && i < segments.size(); ++i) {
    const BatchConfig& batch = segments[i].batch;
    known = known && batch.samples > 0 && batch.ramp.from == 0 && batch.phases.empty();
    if (!known) {
      out.push_back(std::nullopt);
      continue;
    }
    const auto steps_to = [&](const Span& span) {  // from here
      if (span.unit == Span::Unit::kSteps) return std::ceil(span.value - now.step);
      const auto context = static_cast<double>(std::max<int64_t>(recipe.model.context, 1));
      const double wanted = span.unit == Span::Unit::kSamples ? span.value : span.value / context;
      return std::ceil((wanted - now.samples) / static_cast<double>(batch.samples));
    };
    const Span& at = recipe.stages[i].at;
    double steps = 0;
    if (at.unit == Span::Unit::kFraction) {  // of the run as it would end by then, as RunClock::step_of takes it
      steps = std::round(at.value * (now.step + steps_to(segments[i].stop))) - now.step;
    } else {
      steps = steps_to(at);
    }
    now.before_last = steps < 0;
    steps = std::max(steps, 0.0);
    now.step += steps;
    now.samples += steps * static_cast<double>(batch.samples);
    out.push_back(now);
  }
  return out;
}

std::optional<RunPast> PastWalk::enter(const RecipeStage& stage, const Recipe& segment) {
  constexpr double kMostTokens = 1e18;  // that can be counted
  // What steps are counted with must be sound.
  const auto counts = [](const Recipe& recipe) {
    return recipe.batch.samples > 0 && recipe.model.context > 0 &&
           std::ranges::none_of(find_mistakes(recipe, 0), [](const Mistake& mistake) {
             return mistake.field.starts_with("batch.ramp") || mistake.field.starts_with("batch.phases");
           });
  };
  known_ = known_ && counts(before_) && counts(segment);
  if (!known_) return std::nullopt;
  const RunClock clock(before_, entered_);
  const int64_t next = clock.step_of(stage.at, clock.step_of(before_.stop, 0));
  known_ = static_cast<double>(next) * static_cast<double>(before_.batch.samples * before_.model.context) < kMostTokens;
  if (!known_) return std::nullopt;
  if (next > at_.step) {
    past_ = entered_;
    at_ = clock.at(next);
  }
  const int64_t lr_step = entered_.lr_step;
  entered_ = past_;
  if (at_.step > 0 && RunClock(segment, past_).at(at_.step) != at_) entered_.points.push_back(at_);
  const bool from_stage = segment.optimizer.lr_from == LrFrom::kStage;
  entered_.lr_step = !from_stage ? 0 : schedule_set(stage) ? at_.step : lr_step;
  before_ = segment;
  return entered_;
}

Result<std::vector<RunSegment>> segments_ahead(const Recipe& recipe, const RunPast& past, int64_t step) {
  std::vector<Recipe> recipes = {recipe};
  if (!recipe.stages.empty()) {
    RT_TRY_SET(recipes, recipe_segments(recipe));
  }
  PastWalk walk(recipes.front(), past);
  std::vector<RunSegment> out = {{.recipe = recipes.front(), .past = past}};
  for (int64_t begin = step;;) {
    RunSegment& now = out.back();
    const RunClock clock(now.recipe, now.past);
    const int64_t steps = clock.step_of(now.recipe.stop, 0);
    const bool more = now.stages < recipe.stages.size();
    const int64_t next = more ? clock.step_of(recipe.stages[now.stages].at, steps) : steps;
    const int64_t end = std::clamp(next, std::min(begin, steps), steps);
    now.begin = clock.at(begin);
    now.end = clock.at(end);
    if (!more || next > steps) return out;
    RunSegment then{.stages = now.stages + 1, .recipe = std::move(recipes[now.stages + 1])};
    const std::optional<RunPast> entered = walk.enter(recipe.stages[now.stages], then.recipe);
    if (!entered)
      return Error{ErrorCode::kInvalidInput,
                   fmt::format("stages[{}]: the step at which it begins cannot be counted", then.stages)};
    then.past = *entered;
    begin = end;
    out.push_back(std::move(then));
  }
}

std::optional<std::pair<size_t, Mistake>> stage_out_of_order(const Recipe& recipe,
                                                             const std::vector<Recipe>& segments) {
  const std::vector<std::optional<StageBeginning>> begins = stage_beginnings(recipe, segments);
  const Field& at = *find_constructor("stage")->find("at");
  const auto text = [&](const Span& span) { return lua_text(at, span_json(span)); };
  for (size_t i = 1; i < recipe.stages.size() && i < begins.size(); ++i) {
    const Span &before = recipe.stages[i - 1].at, &here = recipe.stages[i].at;
    if (before.value <= 0 || here.value <= 0) continue;  // refused already
    const bool wrong =
        before.unit == here.unit ? here.value <= before.value : begins[i].has_value() && begins[i]->before_last;
    if (wrong)
      return std::pair(i, Mistake{.field = "stages",
                                  .message = fmt::format("stages[{}] begins at {}, which is not behind the beginning "
                                                         "of stages[{}], {}",
                                                         i + 1, text(here), i, text(before)),
                                  .accepted = "stages in the order of their beginnings"});
  }
  return std::nullopt;
}

}  // namespace cairn::dsl
