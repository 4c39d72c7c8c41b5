// One list of rules: what `cairn check --world N` accepts is what make_plan(recipe, N) plans, whatever the recipe.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "dsl/schema.h"
#include "dsl/stages.h"
#include "runtime/plan/activations.h"
#include "runtime/plan/plan.h"
#include "runtime/plan/recipe_rules.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(const std::vector<T>& values) {
    return values[static_cast<size_t>(below(std::ssize(values)))];
  }

 private:
  std::mt19937_64 random_;
};

int64_t small_int(Dice& dice) { return dice.of<int64_t>({0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64}); }

Json some_value(const Field& field, Dice& dice) {
  switch (field.type) {
    case Type::kInt:
    case Type::kSeed:
      return small_int(dice);
    case Type::kNumber:
      return dice.of<double>({0.0, 0.001, 0.1, 0.5, 1.0, 2.0, 50.0});
    case Type::kBool:
      return dice.one_in(2);
    case Type::kEnum:
      return dice.of(field.choices);
    case Type::kString:
      return dice.of<std::string>({"", "a", "a b", "s3://b/p", "layers.0.*", "*.nothing"});
    case Type::kSpan:
      return Json{{"unit", dice.of<std::string>({"steps", "samples", "tokens", "fraction"})},
                  {"value", dice.of<double>({0.0, 0.5, 1.0, 3.0, 10.0, 500.0, 1000.0, 40000.0})}};
    case Type::kIntList: {
      Json out = Json::array();
      for (int64_t n = dice.below(5); n > 0; --n) out.push_back(small_int(dice));
      return out;
    }
    case Type::kNumberList: {
      Json out = Json::array();
      for (int64_t n = dice.below(4); n > 0; --n) out.push_back(dice.of<double>({0.0, 5.0, 95.0}));
      return out;
    }
    case Type::kEnumList: {
      std::vector<std::string> names = field.choices;
      Json out = Json::array();
      for (int64_t n = 2 + dice.below(3); n > 0 && !names.empty(); --n) {
        const int64_t k = dice.below(std::ssize(names));
        out.push_back(names[static_cast<size_t>(k)]);
        if (!dice.one_in(20)) names.erase(names.begin() + k);
      }
      return out;
    }
    case Type::kStringList:
      return Json::array({"*"});
    case Type::kBlock:
    case Type::kItems:
    case Type::kObject:
      break;
  }
  return {};
}

/// Another value in one field of `block`, which lies in `json`.
void change(const Block& block, Json& json, Dice& dice) {
  std::vector<const Field*> fields;
  for (const Field& field : block.fields) {
    const bool empty_list = field.element && (!json.contains(field.key) || json[field.key].empty());
    if (field.stored() && !empty_list) fields.push_back(&field);
  }
  const Field& field = *dice.of(fields);
  if (field.member)
    return change(*field.block, json[field.key].is_null() ? json[field.key] = Json::object() : json[field.key], dice);
  if (!field.element) {
    json[field.key] = some_value(field, dice);
    return;
  }
  Json& list = json[field.key];
  const auto at = static_cast<size_t>(dice.below(std::ssize(list)));
  if (dice.one_in(4)) {
    list.erase(at);
  } else if (dice.one_in(4)) {
    list.push_back(Json(list[at]));
  } else {
    change(*field.block, list[at], dice);
  }
}

/// Another value in one of the fields that most rules are about.
void change_layout(Json& json, Dice& dice) {
  const auto [block, key] = dice.of<std::pair<const char*, const char*>>({{"mesh", "tp"},
                                                                          {"mesh", "pp"},
                                                                          {"mesh", "cp"},
                                                                          {"mesh", "ep"},
                                                                          {"mesh", "shard"},
                                                                          {"mesh", "dp"},
                                                                          {"mesh", "virtual_stages"},
                                                                          {"mesh", "micro_batch_group"},
                                                                          {"mesh", "sequence_parallel"},
                                                                          {"batch", "samples"},
                                                                          {"batch", "micro"},
                                                                          {"batch", "tokens"},
                                                                          {"model", "heads"},
                                                                          {"model", "kv_heads"},
                                                                          {"model", "ffn"},
                                                                          {"model", "context"},
                                                                          {"model", "layers"},
                                                                          {"optimizer", "zero"}});
  json[block][key] = some_value(*find_field(fmt::format("{}.{}", block, key)), dice);
}

/// One of the mistakes that random values seldom hit, in some recipes.
void spoil(Recipe& recipe, Dice& dice) {
  switch (dice.below(5)) {
    case 4:
      recipe.model.mla = {.kv_rank = 8, .nope_dim = 6, .rope_dim = dice.of<int64_t>({2, 3}), .value_dim = 8};
      recipe.model.head_dim = 8;
      break;
    case 0:
      recipe.eval.every_steps = 0;
      break;
    case 1:
      recipe.batch.phases.push_back({.at = {Span::Unit::kSteps, 5}, .rope_theta = 100});
      break;
    case 2:
      recipe.optimizer.qk_clip = 50;
      recipe.model.qk_norm = QkNorm::kHead;
      break;
    default:
      if (!recipe.checkpoint.copy_to.empty()) recipe.checkpoint.copy_to.push_back(recipe.checkpoint.copy_to[0]);
  }
}

/// Recipes that between them have something in every block.
std::vector<Recipe> starting_points() {
  const std::string moe =
      "model = { ffn = 32, activation = \"swiglu\", bias = false, moe = T.moe { experts = 8, groups = 4, "
      "groups_per_token = 2 } }";
  const std::string narrow =
      "model = { ffn = 32, activation = \"swiglu\", bias = false, moe = T.moe { experts = 4, ffn = 16, dense_layers = "
      "{ 0 "
      "}, shared_ffn = 24, shared_gate = true, router = \"sigmoid\", choice_bias = true } }";
  const std::string latent =
      "model = { positions = \"rotary\", mla = { kv_rank = 12, q_rank = 6, nope_dim = 8, rope_dim = 4, value_dim = 7 } "
      "}";
  const std::string further = "model = { positions = \"rotary\", mtp = { depth = 2 } }";
  const std::string ids = "mask_token = 1, gmask_token = 2, start_token = 3, end_token = 4";
  std::vector<Recipe> out;
  for (const std::string& changes : std::vector<std::string>{
           std::string("mesh = { tp = 2, pp = 2 }"),
           std::string("model = { heads = 12, kv_heads = 6, head_dim = 16 }, mesh = { tp = 2 }"),
           std::string("mesh = { pp = 2, virtual_stages = 2 }, schedule = \"interleaved\""),
           std::string("mesh = { tp = 3, sequence_parallel = true }, model = { heads = 3, head_dim = 16, ffn = 96, "
                       "context = 24 }, "
                       "batch = { micro = 4 }"),

           "optimizer = { zero = 3, keep_after_forward = true, qk_clip = 50 }, mesh = { shard = 2 }",
           moe + ", mesh = T.mesh { ep = 2, cp = 2 }, optimizer = { zero = 1 }",
           narrow + ", mesh = T.mesh { tp = 2, pp = 2, ep = 2 }",
           further + ", mesh = T.mesh { tp = 2, pp = 2, sequence_parallel = true }",
           latent + ", mesh = T.mesh { tp = 2, sequence_parallel = true }, recompute = { mode = \"full\" }",
           std::string("mesh = { pp = 2, virtual_stages = 2, micro_batch_group = 4 }, schedule = \"interleaved\""),
           std::string("mesh = { pp = 2, virtual_stages = 2, stages = { 1, 1, 1, 1 } }, schedule = \"zb-v\""),
           std::string("mesh = { tp = 2, sequence_parallel = true }, recompute = { mode = \"full\", layers = 1 }"),
           std::string("mesh = { tp = 2 }, recompute = { mode = \"full\", distribute = true }"),
           std::string("batch = { tokens = 16, ramp = T.ramp { from = 8, by = 4, over = T.samples(100) }, phases = { "
                       "T.phase { T.samples(500), micro = 4, tokens = 32 }, T.phase { T.steps(90), samples = 32 } } }"),
           std::string(
               "deterministic = \"layout\", optimizer = { zero = 1 }, model = { context = 512, head_dim = 16 }, "
               "mesh = { tp = 2, cp = 2 }"),
           std::string("model = { mask = \"prefix\" }, objective = { kind = \"prefix\" }"),
           "model = { mask = \"prefix\" }, objective = { kind = \"infill\", " + ids + ", mask_windows = 2 }",
           std::string(
               "optimizer = { groups = { T.group { \"embed.*\", lr = 0.5 } } }, eval = { at = T.every { steps = "
               "5 } }, checkpoint = { keep = { T.best { metric = \"valid_loss\" } }, copy_to = { T.place { "
               "\"/a\", keep_last = 2, keep_every = 4 }, T.place { \"s3://b/p\" } } }"),
       }) {
    out.push_back(load_good(with(changes)));
  }
  return out;
}

/// Any position of a run that has trained by other recipes too, a new one among them.
RunPast some_past(Dice& dice) {
  RunPast out;
  PastPoint at;
  for (int64_t n = dice.below(3); n > 0; --n) {
    const int64_t steps = 1 + dice.below(200), samples = steps * (1 + dice.below(40));
    at = {at.step + steps, at.samples + samples, at.tokens + samples * dice.of<int64_t>({16, 32, 512})};
    out.points.push_back(at);
  }
  if (dice.one_in(2)) out.lr_step = at.step + dice.of<int64_t>({0, 1, 400, 900, 989, 990, 991, 1500});
  return out;
}

/// Steps that the schedule of rates takes, by the clock of the run, where no stage takes what the others leave.
int64_t schedule_steps(const Plan& plan) {
  const RunClock clock(plan.recipe, plan.past);
  const int64_t begin = plan.recipe.optimizer.lr_from == LrFrom::kStage ? plan.past.lr_step : 0;
  double end = static_cast<double>(begin);
  for (const LrStage& stage : plan.recipe.optimizer.lr) {
    if (stage.over.value == 0) return 0;
    const auto step = static_cast<int64_t>(end);
    switch (stage.over.unit) {
      case Span::Unit::kSteps:
        end += std::floor(stage.over.value);
        break;
      case Span::Unit::kSamples:
        end =
            static_cast<double>(clock.step_of_samples(static_cast<double>(clock.samples(step)) + stage.over.value)) - 1;
        break;
      case Span::Unit::kTokens:
        end = static_cast<double>(clock.step_of_tokens(static_cast<double>(clock.tokens(step)) + stage.over.value)) - 1;
        break;
      case Span::Unit::kFraction:
        end += std::floor(stage.over.value * static_cast<double>(plan.steps - begin));
        break;
    }
  }
  return static_cast<int64_t>(end) - begin;
}

/// What a plan must be, by counting: a rule that is missing shows here.
void check_plan(const Plan& plan) {
  int64_t layers = 0, saved = 0;
  for (const Stage& stage : plan.stages) {
    REQUIRE(stage.first_layer == layers);
    REQUIRE(stage.end_layer > layers);
    layers = stage.end_layer;
  }
  REQUIRE(layers == plan.recipe.model.layers);
  for (size_t k = 0; k < plan.step_stages.size(); ++k) {
    const StepStage& stage = plan.step_stages[k];
    const Plan then = plan.at(k);
    const int64_t slice = stage.micro * plan.mesh.dp(), over = then.micro_batches * slice - stage.samples;
    REQUIRE((plan.recipe.batch.uneven ? over >= 0 && over < slice : over == 0));
    REQUIRE(then.micro_batches > 0);
    REQUIRE(plan.recipe.model.context % stage.tokens == 0);
    REQUIRE(stage.tokens % (plan.mesh.cp() > 1 ? 2 * plan.mesh.cp() : 1) == 0);
    const int64_t rows = stage.micro * plan.recipe.model.context / plan.mesh.cp();
    if (plan.recipe.mesh.sequence_parallel) REQUIRE(rows % plan.mesh.tp() == 0);
    if (plan.recipe.schedule == PipelineKind::kInterleaved && plan.recipe.mesh.micro_batch_group == 0)
      REQUIRE(then.micro_batches % plan.mesh.pp() == 0);
    if (then.micro_batches <= 64 && plan.mesh.pp() <= 16) REQUIRE(bubble_fraction(then.schedule()) >= 0);
  }
  const int64_t left = plan.steps - (plan.recipe.optimizer.lr_from == LrFrom::kStage ? plan.past.lr_step : 0);
  if (plan.recipe.batch.phases.empty() && plan.recipe.batch.ramp.from == 0 && plan.recipe.batch.tokens == 0 &&
      plan.past.points.empty() && left > 0)
    REQUIRE(schedule_steps(plan) <= left);
  if (plan.mesh.world() > 32) return;
  for (int64_t rank = 0; rank < plan.mesh.world(); ++rank) {
    const RankPlan mine = plan.rank(rank);
    for (const StatePiece& piece : mine.pieces) saved += piece.primary ? piece.count_elems() : 0;
    int64_t held = 0;
    for (const Bucket& bucket : mine.buckets) {
      REQUIRE(bucket.shard.size() * plan.shard_size(bucket.experts) == bucket.range.size());
      held += bucket.range.size();
    }
    REQUIRE(held == mine.flat_elems);
    REQUIRE(stage_buffers_bytes(plan, mine) > 0);
  }
  REQUIRE(saved == plan.parameters);
}

/// A stage, mostly behind those before it, that changes what the rules are about.
RecipeStage some_stage(const Recipe& before, Dice& dice) {
  RecipeStage out;
  const double steps = static_cast<double>(dice.below(300) + 300 * std::ssize(before.stages) + 1);
  const auto samples = static_cast<double>(before.batch.samples), context = static_cast<double>(before.model.context);
  out.at = dice.of<Span>({{Span::Unit::kSteps, steps},
                          {Span::Unit::kSamples, std::floor(steps * samples * 0.7)},
                          {Span::Unit::kTokens, std::floor(steps * samples * context)},
                          {Span::Unit::kFraction, steps / 1001}});
  Json changes = Json::object();
  const auto span = [&] {
    const double n = dice.of<double>({5, 40, 150, 400, 600});
    return dice.of<Json>({{{"unit", "steps"}, {"value", n}},
                          {{"unit", "samples"}, {"value", n * samples}},
                          {{"unit", "tokens"}, {"value", n * samples * context}},
                          {{"unit", "fraction"}, {"value", n / 1000}},
                          {{"unit", "steps"}, {"value", 0.0}}});
  };
  for (int64_t n = 1 + dice.below(3); n > 0; --n) {
    switch (dice.below(9)) {
      case 0:
        changes["batch.samples"] = dice.of<int64_t>({8, 16, 24, 32, 48});
        break;
      case 1:
        changes["batch.micro"] = dice.of<int64_t>({1, 2, 3, 4, 8});
        break;
      case 2:
        changes["batch.ramp"] = {{"from", dice.of<int64_t>({0, 4, 8})}, {"by", 4}, {"over", span()}};
        break;
      case 3:
        changes["batch.tokens"] = dice.of<int64_t>({0, 16, 32});
        break;
      case 4:
        changes["stop"] = {{"unit", "steps"}, {"value", 200.0 + static_cast<double>(dice.below(1000))}};
        break;
      case 5:
        changes["batch.phases"] = Json::array();
        if (dice.one_in(2))
          changes["batch.phases"].push_back({{"at", span()},
                                             {"samples", dice.of<int64_t>({0, 16, 32})},
                                             {"micro", dice.of<int64_t>({0, 1, 4})},
                                             {"tokens", 0},
                                             {"rope_theta", 0.0}});
        break;
      case 6:
        changes["eval.every_steps"] = dice.below(3);
        break;
      default:
        changes["optimizer.lr"] = Json::array();
        for (int64_t k = 1 + dice.below(2); k > 0; --k)
          changes["optimizer.lr"].push_back({{"kind", "linear"}, {"over", span()}, {"to", 0.0}});
        if (!dice.one_in(4)) changes["optimizer.lr_from"] = dice.one_in(4) ? "start" : "stage";
    }
  }
  out.changes = changes.dump();
  return out;
}

/// Why the planner would stop a run on the way through its stages: "" where it trains to its end.
std::string refusal_on_the_way(const Recipe& recipe, int64_t world) {
  const std::vector<Recipe> segments = recipe_segments(recipe).value();
  PastPoint at;
  RunPast past;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Recipe& segment = segments[i];
    if (at.step > 0 && RunClock(segment, past).at(at.step) != at) past.points.push_back(at);
    if (segment.optimizer.lr_from == LrFrom::kStart) past.lr_step = 0;
    if (segment.optimizer.lr_from == LrFrom::kStage && i > 0 && schedule_set(recipe.stages[i - 1]))
      past.lr_step = at.step;
    const Result<Plan> plan = make_plan(segment, world, past);
    if (!plan.ok()) return fmt::format("stages[{}]: {}", i, plan.error().message);
    check_plan(plan.value());
    if (i + 1 == segments.size()) break;
    const RunClock clock(segment, past);
    const int64_t next = clock.step_of(recipe.stages[i].at, plan.value().steps);
    if (next > plan.value().steps) break;  // the run ends before that
    at = clock.at(std::max(at.step, next));
  }
  return "";
}

std::string all_of(const std::vector<Diagnostic>& diagnostics) {
  std::string out;
  for (const Diagnostic& d : diagnostics) out += d.path + ": " + d.message + "\n";
  return out;
}

}  // namespace

TEST_SUITE("dsl/rules") {
  TEST_CASE("of any recipe, the checks and the planner say the same") {
    Dice dice(27);
    const std::vector<Recipe> points = starting_points();
    int64_t planned = 0, refused = 0, later_planned = 0;
    const std::set<std::string> wanted = {"name",
                                          "model.kv_heads",
                                          "model.ffn",
                                          "model.mask",
                                          "objective.mask_token",
                                          "batch",
                                          "batch.samples",
                                          "batch.ramp",
                                          "batch.phases",
                                          "mesh.tp",
                                          "mesh.pp",
                                          "mesh.dp",
                                          "mesh.cp",
                                          "mesh.ep",
                                          "mesh.shard",
                                          "mesh.stages",
                                          "mesh.sequence_parallel",
                                          "schedule",
                                          "mesh.virtual_stages",
                                          "mesh.micro_batch_group",
                                          "recompute.distribute",
                                          "deterministic",
                                          "optimizer.keep_after_forward",
                                          "optimizer.qk_clip",
                                          "optimizer.lr",
                                          "eval.at",
                                          "checkpoint.keep",
                                          "checkpoint.copy_to"};
    std::set<std::string> fields;
    // Some are rare: what is drawn last may take longer.
    for (int64_t trial = 0; trial < 6000 || (trial < 30000 && !std::ranges::includes(fields, wanted)); ++trial) {
      Recipe recipe = dice.of(points);
      for (int64_t n = dice.below(4); n > 0; --n) {
        Json json = Json::parse(encode_recipe(recipe));
        dice.one_in(3) ? change_layout(json, dice) : change(recipe_block(), json, dice);
        if (Result<Recipe> changed = decode_recipe(json.dump()); changed.ok()) recipe = std::move(changed).value();
      }
      if (dice.one_in(20)) spoil(recipe, dice);
      const int64_t world = dice.one_in(8) ? 1 + dice.below(16) : wanted_world(recipe.mesh) * (1 + dice.below(4));
      const std::string text = encode_recipe(recipe);
      CAPTURE(text);
      CAPTURE(world);
      const std::vector<Diagnostic> found = check_recipe(recipe, world);
      const Result<Plan> plan = make_plan(recipe, world);
      CAPTURE(all_of(found));
      if (const Result<Plan> later = make_plan(recipe, world, some_past(dice)); later.ok()) {
        ++later_planned;
        check_plan(later.value());
      }
      REQUIRE_MESSAGE(found.empty() == plan.ok(), (plan.ok() ? "" : plan.error().message));
      std::set<std::string> messages;
      for (const Diagnostic& d : found) {
        REQUIRE_MESSAGE(messages.insert(d.message).second, d.message);
        fields.insert(d.path.substr(0, d.path.find('[')));
      }
      if (plan.ok()) {
        ++planned;
        check_plan(plan.value());
      } else {
        ++refused;
        REQUIRE(plan.error().code == ErrorCode::kInvalidInput);
        REQUIRE(plan.error().message.find(found.front().message) == 0);
        // Without a world nothing is found that is not found with one: what no world would help.
        if (check_recipe(recipe, 0).empty()) continue;
        REQUIRE(!make_plan(recipe, wanted_world(recipe.mesh)).ok());
      }
    }
    MESSAGE(planned << " planned, " << refused << " refused, for " << fields.size() << " fields");
    CHECK(planned > 1000);
    CHECK(refused > 1000);
    CHECK(later_planned > 1000);
    for (const std::string& field : wanted) CHECK_MESSAGE(fields.count(field) == 1, field);
  }

  TEST_CASE("a recipe with stages that passes the checks is planned where each of them begins") {
    Dice dice(29);
    const std::vector<Recipe> points = starting_points();
    int64_t passed = 0, refused = 0, refused_rates = 0;
    for (int64_t trial = 0; trial < 2000; ++trial) {
      Recipe recipe = dice.of(points);
      for (int64_t n = 1 + dice.below(3); n > 0; --n) {
        recipe.stages.push_back(some_stage(recipe, dice));
        if (Result<Recipe> stored = decode_recipe(encode_recipe(recipe)); stored.ok()) {
          recipe = std::move(stored).value();
        } else {
          recipe.stages.pop_back();
        }
      }
      const int64_t world = wanted_world(recipe.mesh) * (dice.one_in(4) ? 2 : 1);
      const std::string text = encode_recipe(recipe);
      CAPTURE(text);
      CAPTURE(world);
      const std::vector<Diagnostic> found = check_recipe(recipe, world);
      CAPTURE(all_of(found));
      found.empty() ? ++passed : ++refused;
      refused_rates += std::any_of(found.begin(), found.end(), [](const Diagnostic& d) {
        return d.path.starts_with("optimizer.lr") && d.message.starts_with("stages[");
      });
      if (found.empty()) REQUIRE(refusal_on_the_way(recipe, world) == "");
    }
    MESSAGE(passed << " passed, " << refused << " refused, " << refused_rates << " for their rates");
    CHECK(passed > 1000);
    CHECK(refused > 200);
    CHECK(refused_rates > 50);
  }

  TEST_CASE("a recipe in Lua with changes on the command line that passes the checks is planned") {
    const RecipeFolder folder;
    folder.write("base.lua", kBase);
    Dice dice(28);
    int64_t planned = 0, refused = 0;
    const std::vector<std::string> fields = {"mesh.tp",     "mesh.pp",       "mesh.cp",      "mesh.dp",
                                             "model.heads", "model.layers",  "model.ffn",    "model.head_dim",
                                             "batch.micro", "batch.samples", "batch.tokens", "optimizer.zero",
                                             "mesh.shard",  "model.width",   "model.context"};
    for (int64_t trial = 0; trial < 300; ++trial) {
      LoadOptions options;
      options.world = dice.of<int64_t>({1, 2, 3, 4, 6, 8});
      std::string said;
      for (int64_t n = dice.below(4); n > 0; --n) {
        options.sets.push_back(dice.of(fields) + (dice.one_in(6) ? "-" : fmt::format("={}", small_int(dice))));
        said += options.sets.back() + " ";
      }
      CAPTURE(said);
      CAPTURE(options.world);
      const LoadResult result = load_recipe("base.lua", options);
      CAPTURE(to_text(result.diagnostics));
      std::set<std::string> messages;
      for (const Diagnostic& d : result.diagnostics) REQUIRE(messages.insert(d.message).second);
      result.ok() ? ++planned : ++refused;
      if (result.ok()) REQUIRE(make_plan(result.loaded.recipe, options.world).ok());
    }
    CHECK(planned > 50);
    CHECK(refused > 50);
  }

  TEST_CASE("a field that is missing is told once, and no rule speaks of it") {
    const RecipeFolder folder;
    folder.write("base.lua", kBase);
    for (const std::string field : {"model.layers", "model.width", "model.heads", "model.context", "model.vocab",
                                    "batch.samples", "optimizer.peak_lr", "stop", "name", "data"}) {
      const LoadResult result = load_recipe("base.lua", {.sets = {field + "-"}, .world = 4});
      CAPTURE(field);
      CAPTURE(to_text(result.diagnostics));
      REQUIRE(result.diagnostics.size() == 1);
      CHECK(result.diagnostics[0].code == "missing");
      CHECK(result.diagnostics[0].path == field);
    }
  }

  TEST_CASE("sizes that no rule may divide by are refused, not divided by") {
    const Recipe good = load_good(kBase);
    REQUIRE(find_mistakes(good, 4).empty());
    for (const auto& [field, break_it] : std::vector<std::pair<std::string, void (*)(Recipe&)>>{
             {"model.heads", [](Recipe& r) { r.model.heads = 0; }},
             {"model.width", [](Recipe& r) { r.model.width = -1; }},
             {"model.context", [](Recipe& r) { r.model.context = 0; }},
             {"batch.micro", [](Recipe& r) { r.batch.micro = 0; }},
             {"mesh.tp", [](Recipe& r) { r.mesh.tp = 0; }},
             {"mesh.ep", [](Recipe& r) { r.mesh.ep = 0; }}}) {
      Recipe bad = good;
      break_it(bad);
      const std::vector<Mistake> found = find_mistakes(bad, 4);
      CAPTURE(field);
      REQUIRE(found.size() == 1);
      CHECK(found[0].field == field);
      CHECK(found[0].message.find("must be 1 or more") != std::string::npos);
      CHECK(!make_plan(bad, 4).ok());
    }
  }
}
