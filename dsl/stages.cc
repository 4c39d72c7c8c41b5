#include "dsl/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "dsl/change_rules.h"
#include "dsl/compare.h"
#include "dsl/dsl.h"
#include "runtime/json/json.h"

namespace cairn::dsl {
namespace {

constexpr const char* kLrFrom = "optimizer.lr_from";

// What changes nothing that is trained, and no layout or memory hangs on it; whole blocks end with a dot.
constexpr std::array kFree = {"checkpoint.", "eval.", "recompute.", "watch.", "data."};
constexpr std::array kFixed = {"checkpoint.snapshot_by", "checkpoint.in_flight", "checkpoint.copy_to", "data.seed"};

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
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
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
    Result<Recipe> after = decode_recipe(json.dump(-1, ' ', false, Json::error_handler_t::replace));
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
    Span at = recipe.stages[i].at;
    if (at.unit == Span::Unit::kFraction) at = {recipe.stop.unit, recipe.stop.value * at.value};
    double steps = at.value - now.step;
    if (known && at.unit != Span::Unit::kSteps) {
      const auto context = static_cast<double>(std::max<int64_t>(recipe.model.context, 1));
      const double wanted = at.unit == Span::Unit::kSamples ? at.value : at.value / context;
      steps = (wanted - now.samples) / static_cast<double>(batch.samples);
    }
    steps = std::ceil(steps);
    now.before_last = steps < 0;
    steps = std::max(steps, 0.0);
    now.step += steps;
    now.samples += steps * static_cast<double>(batch.samples);
    out.push_back(known ? std::optional(now) : std::nullopt);
  }
  return out;
}

std::optional<double> schedule_beginning(const Recipe& recipe, const std::vector<Recipe>& segments, size_t i) {
  for (size_t other = 0; other < i; ++other)
    if (segments[other].batch.samples != segments[i].batch.samples) return std::nullopt;
  if (segments[i].optimizer.lr_from == LrFrom::kStart) return 0;
  const std::vector<std::optional<StageBeginning>> begins = stage_beginnings(recipe, segments);
  for (; i > 0; --i) {
    if (!schedule_set(recipe.stages[i - 1])) continue;
    return begins[i - 1] ? std::optional(begins[i - 1]->samples) : std::nullopt;
  }
  return 0;
}

std::optional<std::pair<size_t, std::string>> stage_out_of_order(const Recipe& recipe,
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
      return std::pair(i, fmt::format("stages[{}] begins at {}, which is not behind the beginning of stages[{}], {}",
                                      i + 1, text(here), i, text(before)));
  }
  return std::nullopt;
}

}  // namespace cairn::dsl
