#include "dsl/stages.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "dsl/schema.h"
#include "tests/dsl/random_recipe.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

/// kBase with stages, each on a line of its own from line 4 on.
std::string staged(const std::string& stages, const std::string& more = "") {
  return with(more + "stages = {\n" + stages + "\n}");
}

std::string changes_of(const std::string& stages, const std::string& more = "") {
  std::string out;
  for (const RecipeStage& stage : load_good(staged(stages, more)).stages) out += stage.changes + "\n";
  return out;
}

std::string error_of(const Recipe& recipe, const std::string& stages) {
  Json json = Json::parse(encode_recipe(recipe));
  json["stages"] = Json::parse(stages);
  const Result<Recipe> result = decode_recipe(json.dump());
  return result.ok() ? "" : result.error().message;
}

const std::string kBlend = R"(data = T.blend { sources = { T.megatron { prefix = "d/web", weight = 70 },
  T.megatron { prefix = "d/code", weight = 30 } } },
)";

}  // namespace

TEST_SUITE("dsl/stages") {
  TEST_CASE("a stage is what differs from the recipe before it, and its segment is a whole recipe") {
    const Recipe r = load_good(staged(R"(
      T.stage { at = T.tokens "8K", batch = { samples = 32 }, model = { rope_theta = 5e5 } },
      T.stage { at = T.steps(500), batch = { samples = 32, micro = 4 }, eval = { at = T.every { steps = 9 }, steps = 3 },
                optimizer = { peak_lr = 5e-4, lr = T.linear { to = 0 } } })"));
    REQUIRE(r.stages.size() == 2);
    CHECK(r.stages[0].at.unit == Span::Unit::kTokens);
    CHECK(r.stages[0].at.value == 8000);
    CHECK(r.stages[0].changes == R"({"batch.samples":32,"model.rope_theta":500000.0})");
    CHECK(r.stages[1].changes ==
          R"({"batch.micro":4,"eval.every_steps":9,"eval.steps":3,"optimizer.lr":[{"kind":"linear","over":)"
          R"({"unit":"steps","value":0.0},"to":0.0}],"optimizer.lr_from":"stage","optimizer.peak_lr":0.0005})");
    const std::vector<Recipe> segments = recipe_segments(r).value();
    REQUIRE(segments.size() == 3);
    CHECK(encode_recipe(segments[0]) == encode_recipe(load_good(kBase)));
    CHECK(encode_recipe(segments[1]) ==
          encode_recipe(load_good(with("batch = { samples = 32 }, model = { rope_theta = 5e5 }"))));
    CHECK(segments[2].batch.samples == 32);
    CHECK(segments[2].batch.micro == 4);
    CHECK(segments[2].optimizer.lr.size() == 1);
    CHECK(segments[2].optimizer.lr_from == LrFrom::kStage);
    CHECK(segments[2].model.rope_theta == 5e5);
    CHECK(segments[2].stages.empty());
  }

  TEST_CASE("the segments of a run end where the next stage begins, and the last one where its own stop lies") {
    // 614,400 tokens are 300 steps of 8 samples of 256 tokens; behind the stage at 0.8 a step has twice as many.
    const std::string base =
        R"(stop = T.tokens(614400), model = { context = 256 }, batch = { samples = 8, micro = 1 },)";
    const Recipe r = load_good(staged("T.stage { at = T.fraction(0.8), batch = { samples = 16 } }", base));
    const std::vector<RunSegment> all = segments_ahead(r).value();
    REQUIRE(all.size() == 2);
    CHECK(all[0].stages == 0);
    CHECK(all[0].begin == PastPoint{0, 0, 0});
    CHECK(all[0].end == PastPoint{240, 1920, 491520});
    CHECK(all[1].stages == 1);
    CHECK(all[1].begin == all[0].end);
    CHECK(all[1].end == PastPoint{270, 2400, 614400});
    CHECK(all[1].recipe.batch.samples == 16);
    CHECK(step_stages(all[1].recipe, all[1].past).front().samples_before == 1920);
    // From the middle of a segment on.
    const std::vector<RunSegment> resumed = segments_ahead(r, {}, 100).value();
    CHECK(resumed[0].begin == PastPoint{100, 800, 204800});
    CHECK(resumed[0].end == all[0].end);
    CHECK(resumed[1].end == all[1].end);
    Recipe second = all[1].recipe;
    const std::vector<RunSegment> rest = segments_ahead(second, all[1].past, 250).value();
    REQUIRE(rest.size() == 1);
    CHECK(rest[0].begin == PastPoint{250, 2080, 532480});
    CHECK(rest[0].end == all[1].end);
    // A stage behind the end never begins; one at the end has no step unless it moves the stop.
    CHECK(segments_ahead(load_good(staged("T.stage { at = T.steps(301), batch = { samples = 16 } }", base)))
              .value()
              .size() == 1);
    const auto at_end =
        segments_ahead(load_good(staged("T.stage { at = T.steps(300), batch = { samples = 16 } }", base))).value();
    REQUIRE(at_end.size() == 2);
    CHECK(at_end[1].begin == at_end[1].end);
    CHECK(segments_ahead(load_good(kBase)).value().size() == 1);
  }

  TEST_CASE("T.epochs becomes the samples of its passes over the recipe's own data, wherever samples may stand") {
    const std::string epochs =
        R"(stop = T.epochs(3), batch = { ramp = { from = 8, by = 8, over = T.epochs(0.25) } },
           optimizer = { lr = T.schedule { T.warmup { over = T.epochs(0.011) }, T.hold {} } },
           data = T.blend { sources = { T.megatron { prefix = "web" }, T.megatron { prefix = "code", weight = 0 } } },
           stages = { T.stage { at = T.epochs(1.5), data = { weights = { code = 2 } },
                                optimizer = { lr = T.schedule { T.linear { to = 0, over = T.epochs(1) } } } } })";
    int64_t asked = 0;
    const auto count = [&](const Recipe& recipe) -> Result<int64_t> {
      ++asked;
      CHECK(recipe.model.context == 32);
      CHECK(recipe.model.vocab == 257);
      CHECK(recipe.data.sources[1].weight == 0);
      return 640;
    };
    const Recipe r = load_good(with(epochs), {.epoch_samples = count});
    const Recipe same =
        load_good(with(R"(stop = T.samples(1920), batch = { ramp = { from = 8, by = 8, over = T.samples(160) } },
           optimizer = { lr = T.schedule { T.warmup { over = T.samples(8) }, T.hold {} } },
           data = T.blend { sources = { T.megatron { prefix = "web" }, T.megatron { prefix = "code", weight = 0 } } },
           stages = { T.stage { at = T.samples(960), data = { weights = { code = 2 } },
                                optimizer = { lr = T.schedule { T.linear { to = 0, over = T.samples(640) } } } } })"));
    CHECK(encode_recipe(r) == encode_recipe(same));
    CHECK(asked == 1);
    CHECK(load_good(kBase, {.epoch_samples = [](const Recipe&) -> Result<int64_t> {
                      FAIL("asked");
                      return 0;
                    }})
              .stop.value == 1000);  // no data are opened where nothing counts by them
    const auto wrong = [](const std::string& stop) {
      return only_mistake(with("stop = " + stop), {.epoch_samples = [](const Recipe&) -> Result<int64_t> {
                            return Error{ErrorCode::kInvalidInput, "web.idx: no such file"};
                          }});
    };
    CHECK(wrong("T.epochs(2)") == "main.lua:3: stop: T.epochs(2): web.idx: no such file");
    CHECK(wrong("T.epochs(0)") == "main.lua:3: stop must be a number of epochs > 0, got 0");
    CHECK(wrong("T.epochs \"3K\"") == "main.lua:3: stop: T.epochs takes a number, got \"3K\"");
    CHECK(only_mistake(with("stop = T.epochs(2)")) ==
          "main.lua:3: stop: T.epochs(2): samples of an epoch are not known here");
  }

  TEST_CASE("a recipe without stages has none in its JSON, and with stages goes through JSON and back") {
    CHECK(encode_recipe(load_good(kBase)).find("stages\":[{") == std::string::npos);
    CHECK(encode_recipe(load_good(kBase)) == encode_recipe(load_good(with("stages = {}"))));
    const Recipe r = load_good(staged("T.stage { at = T.fraction(0.5), seed = 7, batch = { samples = 32 } }"));
    const std::string json = encode_recipe(r);
    CHECK(json.find(R"("stages":[{"at":{"unit":"fraction","value":0.5},"changes":{"batch.samples":32}}])") !=
          std::string::npos);
    CHECK(encode_recipe(decode_recipe(json).value()) == json);
    // Stored by someone else: an integer where a field is a number, and a key that changes nothing.
    Json other = Json::parse(json);
    other["stages"][0]["changes"] = {{"batch.samples", 32}, {"optimizer.clip", 1}, {"batch.micro", 2}};
    CHECK(decode_recipe(other.dump()).value().stages[0].changes == R"({"batch.samples":32,"optimizer.clip":1.0})");
  }

  TEST_CASE("decode of stages is strict and names the stage and the field") {
    const Recipe base = load_good(kBase);
    const auto of = [&](const std::string& changes) {
      return error_of(base, R"([{"at":{"unit":"steps","value":5},"changes":)" + changes + "}]");
    };
    CHECK(of("{}").empty());
    CHECK(of(R"({"batch.smaples":3})") ==
          "recipe JSON: stages[1].changes.batch.smaples: no such field; did you mean batch.samples?");
    CHECK(of(R"({"batch.samples":"x"})") ==
          "recipe JSON: stages[1].changes.batch.samples must be an integer >= 1, got \"x\"");
    CHECK(of(R"({"model.layers":8})") ==
          "recipe JSON: stages[1].changes.model.layers cannot change in the middle of a run");
    CHECK(of(R"({"optimizer":{}})").find("stages[1].changes.optimizer: no such field") != std::string::npos);
    CHECK(of(R"({"stages":[]})").find("stages[1].changes.stages: no such field") != std::string::npos);
    CHECK(of("[]").find("stages[1].changes must be an object") != std::string::npos);
    CHECK(of("3").find("stages[1].changes must be") != std::string::npos);
    CHECK(error_of(base, R"([{"changes":{}}])") == "recipe JSON: stages[1].at is missing");
    CHECK(error_of(base, R"([{"at":{"unit":"steps","value":0},"changes":{}}])").find("stages[1].at must be") !=
          std::string::npos);
    CHECK(error_of(base, R"([{"at":{"unit":"steps","value":5}}])") == "recipe JSON: stages[1].changes is missing");
    CHECK(error_of(base, R"({})").find("stages must be a list") != std::string::npos);
  }

  TEST_CASE("bytes of stored stages that are none give an error, never a crash; and there are not too many") {
    const std::string good = encode_recipe(load_good(
        staged("T.stage { at = T.steps(5), batch = { samples = 32 }, optimizer = { lr = T.linear { to = 0 } } }")));
    const size_t from = good.find("\"stages\":[{"), to = good.find("}}]", from) + 3;
    REQUIRE(from != std::string::npos);
    RandomValues random(4);
    int64_t refused = 0;
    for (int i = 0; i < 1500; ++i) {
      std::string text = good;
      for (int64_t n = 1 + random.below(2); n > 0; --n)
        text[from + static_cast<size_t>(random.below(static_cast<int64_t>(to - from)))] =
            static_cast<char>(32 + random.below(95));
      const Result<Recipe> result = decode_recipe(text);
      refused += result.ok() ? 0 : 1;
      if (result.ok()) CHECK(decode_recipe(encode_recipe(result.value())).ok());
    }
    CHECK(refused > 1000);
    const std::string many =
        "local T = require \"cairn\"\nlocal list = {}\n"
        "for i = 1, N do list[i] = T.stage { at = T.steps(i), eval = { steps = i } } end\n"
        "return require \"base\":with { stages = list }\n";
    const auto times = [&](const std::string& n) { return std::string(many).replace(many.find(", N ") + 2, 1, n); };
    CHECK(load_good(times("1000")).stages.size() == 1000);
    CHECK(only_mistake(times("1001")).find("stages has 1001 entries, more than 1000") != std::string::npos);
  }

  TEST_CASE("a mistake in a stage is told with its line and the usual checks") {
    CHECK(only_mistake(staged("T.stage { at = T.steps(5),\n batch = { samples = 15 } }")) ==
          "main.lua:5: stages[1]: batch.samples = 15 is not divisible by batch.micro = 2 (base.lua:6)");
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), batch = { samples = \"many\" } }")) ==
          "main.lua:4: stages[1]: batch.samples must be an integer >= 1, got \"many\"");
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), btach = { samples = 15 } }")) ==
          "main.lua:4: stages[1]: btach: no such field in recipe; did you mean `batch`?");
    CHECK(only_mistake(staged("T.stage { batch = { samples = 32 } }")) ==
          "main.lua:4: stages[1].at is missing; it must be T.steps(n), T.samples(n), T.tokens(n), T.epochs(n) or "
          "T.fraction(x)");
    CHECK(only_mistake(staged("T.stage { at = T.steps(0), batch = { samples = 32 } }")) ==
          "main.lua:4: stages[1].at must be a whole number of steps > 0, got 0");
    CHECK(only_mistake(staged("{ at = T.steps(5) }")).find("main.lua:4: stages must be a list of T.stage {...}, got") ==
          0);
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), stages = {} }")) ==
          "main.lua:4: stages[1]: stages: a stage has no stages of its own");
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), eval = { at = T.every { steps = 1 } },\n"
                              "data = T.token_files { train = \"x\" } }")) ==
          "main.lua:4: stages[1]: eval.at asks for evaluation, but data (main.lua:5) has no validation part");
    // What only the recipe wrote is the stage's mistake where the stage breaks it.
    CHECK(only_mistake(staged("T.stage { at = T.steps(5),\n mesh = T.unset, batch = { micro = 3 } }")) ==
          "main.lua:4: stages[1]: batch.samples = 16 is not divisible by batch.micro = 3 (main.lua:5)");
    // A mistake of the recipe is told once, and those of two stages each.
    const LoadResult result =
        load_text(staged("T.stage { at = T.steps(5), optimizer = { peak_lr = -1 } },\nT.stage { at = T.steps(6), batch "
                         "= { micro = 5 } }",
                         "optimizer = { beta1 = 2 }, "));
    CHECK(result.diagnostics.size() == 3);
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), eval = { steps = 1 } },\nT.stage { at = T.steps(6) }",
                              "batch = { samples = 15 }, ")) ==
          "main.lua:3: batch.samples = 15 is not divisible by batch.micro = 2 (base.lua:6)");
  }

  TEST_CASE("shapes, seed, name and layout stay; the closed list says what may change") {
    const auto refused = [](const std::string& fields) {
      return only_mistake(staged("T.stage { at = T.steps(5), " + fields + " }"));
    };
    CHECK(refused("model = { layers = 8 }") ==
          "main.lua:4: stages[1]: model.layers cannot change in the middle of a run: 4 before, 8 here");
    CHECK(refused("name = \"other\"").find("name cannot change in the middle of a run") != std::string::npos);
    CHECK(refused("seed = 8").find("seed cannot change") != std::string::npos);
    load_good(staged("T.stage { at = T.steps(5), stop = T.steps(100) }"));
    CHECK(refused("mesh = { tp = 2 }").find("mesh.tp cannot change") != std::string::npos);
    CHECK(refused("optimizer = { zero = 1 }").find("optimizer.zero cannot change") != std::string::npos);
    CHECK(refused("init = { path = \"x\" }").find("init.path cannot change") != std::string::npos);
    CHECK(refused("log = { tensorboard = false }").find("log.tensorboard cannot change") != std::string::npos);
    load_good(staged("T.stage { at = T.steps(5), name = \"base\", model = { layers = 4 } }"));  // the same: no change
    int64_t may = 0, may_not = 0;
    visit_fields([&](const std::string& path, const Field&) { ++(may_change_in_stage(path) ? may : may_not); });
    CHECK(may > 60);
    CHECK(may_not > 60);
    CHECK(may_change_in_stage("data.web.weight"));
    CHECK(may_change_in_stage("data.sources"));
    CHECK(may_change_in_stage("model.rope_theta"));
    CHECK(may_change_in_stage("model.rope.scaling"));
    CHECK(!may_change_in_stage("stages"));
    for (const char* fixed : {"checkpoint.snapshot_by", "checkpoint.in_flight", "checkpoint.copy_to", "data.seed"}) {
      CAPTURE(fixed);
      CHECK(!may_change_in_stage(fixed));
    }
  }

  TEST_CASE("a schedule that a stage sets counts from the stage, unless it says otherwise") {
    const std::string lr = "lr = T.linear { to = 0 }";
    const auto of = [](const std::string& optimizer, const std::string& more = "") {
      return changes_of("T.stage { at = T.steps(5), optimizer = { " + optimizer + " } }" + more);
    };
    CHECK(of(lr).find(R"("optimizer.lr_from":"stage")") != std::string::npos);
    CHECK(of(lr + ", lr_from = \"start\"").find(R"("optimizer.lr_from":"start")") != std::string::npos);
    CHECK(of(lr + ", lr_from = T.unset").find("lr_from") == std::string::npos);
    CHECK(of("peak_lr = 1e-4").find("lr_from") == std::string::npos);
    CHECK(of("lr = T.unset").find("lr_from") == std::string::npos);
    // The same schedule again is a change: it begins anew.
    const std::string again = ",\nT.stage { at = T.steps(9), optimizer = { " + lr + " } },\n" +
                              "T.stage { at = T.steps(11), batch = { samples = 32 } }";
    CHECK(of(lr, again).find("}\n{\"optimizer.lr_from\":\"stage\"}\n{\"batch.samples\":32}\n") != std::string::npos);
    // What follows by T.ref from another field does not begin anew.
    const std::string follows = changes_of(
        "T.stage { at = T.steps(5), optimizer = { lr = T.cosine { to = T.ref \"optimizer.peak_lr\" * 0.1 } } },\n"
        "T.stage { at = T.steps(9), optimizer = { peak_lr = 1e-4 } }");
    const std::string second = follows.substr(follows.find('\n') + 1);
    CHECK(second.find("\"optimizer.lr\":[") != std::string::npos);
    CHECK(second.find("lr_from") == std::string::npos);
    // Its length is that of what remains.
    CHECK(
        only_mistake(staged("T.stage { at = T.steps(900), optimizer = {\n"
                            "lr = T.schedule { T.linear { to = 0, over = T.steps(101) } } } }"))
            .find("main.lua:5: stages[1]: optimizer.lr: its stages take 101 steps, but the run stops after 100 more") ==
        0);
    load_good(staged("T.stage { at = T.steps(900), optimizer = { lr = T.linear { to = 0, over = T.steps(100) } } }"));
    load_good(
        staged("T.stage { at = T.samples(14400), optimizer = { lr = T.linear { to = 0, over = T.steps(100) } } }"));
    // From the stage that sets it on, whatever stages follow, or from the run's beginning; behind another batch
    // its beginning is not known in samples of this one, and nothing is said.
    const std::string over = "lr = T.linear { to = 0, over = T.steps(900) }";
    load_good(staged("T.stage { at = T.steps(100), optimizer = { " + over +
                     " } }, T.stage { at = T.steps(900), eval = { steps = 3 } }"));
    load_good(staged("T.stage { at = T.steps(900), optimizer = { " + over + ", lr_from = \"start\" } }"));
    load_good(
        staged("T.stage { at = T.steps(500), batch = { samples = 14 } }, T.stage { at = T.steps(600), optimizer = { "
               "lr = T.linear { to = 0, over = T.steps(400) } } }"));
    CHECK(
        !load_text(staged("T.stage { at = T.samples(14416), optimizer = { lr = T.linear { to = 0, over = T.steps(100) "
                          "} } }"))
             .ok());
  }

  TEST_CASE("stages stand in the order of their beginnings") {
    const auto at = [](const std::string& first, const std::string& second, const std::string& batch = "") {
      return load_text(staged("T.stage { at = " + first + ", eval = { steps = 1 } },\nT.stage { at = " + second +
                              batch + ", eval = { steps = 2 } }"));
    };
    const LoadResult wrong = at("T.steps(9)", "T.steps(9)");
    REQUIRE(wrong.diagnostics.size() == 1);
    CHECK(to_text(wrong.diagnostics)
              .find("main.lua:5: stages[2] begins at T.steps(9), which is not behind the beginning of stages[1], "
                    "T.steps(9)\n") == 0);
    CHECK(at("T.steps(9)", "T.steps(10)").ok());
    CHECK(at("T.steps(9)", "T.samples(161)").ok());  // 16 a step: behind step 10
    CHECK(!at("T.steps(9)", "T.samples(100)").ok());
    CHECK(!at("T.tokens(32000)", "T.samples(900)").ok());  // 1,000 samples of 32 tokens
    CHECK(at("T.tokens(32000)", "T.samples(1100)").ok());
    CHECK(!at("T.fraction(0.5)", "T.steps(400)").ok());
    CHECK(at("T.fraction(0.5)", "T.steps(501)").ok());
    // Behind a ramp steps and samples do not compare: nothing is said.
    CHECK(load_text(staged("T.stage { at = T.steps(9) }, T.stage { at = T.samples(1) }",
                           "batch = { ramp = { from = 8, by = 8, over = T.samples(800) } }, "))
              .ok());
    CHECK(load_text(staged("T.stage { at = T.steps(9) }, T.stage { at = T.samples(100) }",
                           "batch = { phases = { T.phase { T.steps(2), samples = 8 } } }, "))
              .ok());
  }

  TEST_CASE("recipe stages begin where they say: steps, samples, tokens and parts of the run") {
    const Recipe r =
        load_good(staged("T.stage { at = T.samples(100), batch = { samples = 32 } },\n"
                         "T.stage { at = T.steps(10), batch = { samples = 8 } },\n"
                         "T.stage { at = T.tokens(9600) },\nT.stage { at = T.fraction(0.5) }"));
    const auto begins = stage_beginnings(r, recipe_segments(r).value());
    REQUIRE(begins.size() == 4);
    CHECK(begins[0]->step == 7);  // 7 * 16 = 112: the first step behind 100
    CHECK(begins[0]->samples == 112);
    CHECK(begins[1]->samples == 112 + 3 * 32);
    CHECK(begins[2]->step == 10 + 12);  // 300 samples: 92 more
    CHECK(begins[2]->samples == 208 + 12 * 8);
    CHECK(begins[3]->step == 500);
  }

  TEST_CASE("a part of the run is one of the run as it would end by then") {
    const Recipe r =
        load_good(staged("T.stage { at = T.steps(100), stop = T.steps(400) },\nT.stage { at = T.fraction(0.5) },\n"
                         "T.stage { at = T.steps(300), stop = T.samples(4801) }, T.stage { at = T.fraction(0.999) }"));
    const auto begins = stage_beginnings(r, recipe_segments(r).value());
    REQUIRE(begins.size() == 4);
    CHECK(begins[1]->step == 200);
    CHECK(begins[3]->step == 301);  // of 301 steps: 300 of 16 samples and one begun
  }

  TEST_CASE("a run comes to its segments with what it has consumed and with where its schedule began") {
    const std::string lr = "optimizer = { lr = T.linear { to = 0 } }";
    const Recipe r = load_good(staged("T.stage { at = T.steps(100), " + lr +
                                      " },\nT.stage { at = T.samples(3200), batch = { samples = 32 } },\n" +
                                      "T.stage { at = T.steps(201), " + lr + ", batch = { micro = 4 } },\n" +
                                      "T.stage { at = T.steps(300), optimizer = { lr_from = \"start\" } }"));
    const std::vector<Recipe> segments = recipe_segments(r).value();
    PastWalk walk(segments[0]);
    const PastPoint at_200{200, 3200, 3200 * 32};
    CHECK(walk.enter(r.stages[0], segments[1]) == RunPast{.lr_step = 100});
    CHECK(walk.enter(r.stages[1], segments[2]) == RunPast{.points = {at_200}, .lr_step = 100});
    CHECK(walk.enter(r.stages[2], segments[3]) == RunPast{.points = {at_200}, .lr_step = 201});
    CHECK(walk.enter(r.stages[3], segments[4]) == RunPast{.points = {at_200}});
    // Behind a ramp too, and at one step two stages are one position.
    Recipe ramp = segments[0], plain = segments[0];
    ramp.batch.ramp = {.from = 8, .by = 8, .over = {Span::Unit::kSteps, 10}};
    PastWalk behind(ramp);
    const RunPast past{.points = {{100, 80 + 90 * 16, (80 + 90 * 16) * 32}}};
    plain.batch.samples = 64;
    CHECK(behind.enter({{Span::Unit::kSteps, 100}, "{}"}, plain) == past);
    CHECK(behind.enter({{Span::Unit::kSteps, 100}, "{}"}, ramp) == RunPast{});
    ramp.batch.ramp.by = 3;
    CHECK_FALSE(behind.enter({{Span::Unit::kSteps, 200}, "{}"}, ramp).has_value());
    CHECK_FALSE(behind.enter({{Span::Unit::kSteps, 300}, "{}"}, plain).has_value());
  }

  TEST_CASE("weights of a blend by name, over those of the sources") {
    const Recipe r =
        load_good(staged("T.stage { at = T.steps(5), data = { weights = { web = 30 } } },\n"
                         "T.stage { at = T.steps(6), data = { weights = { code = 70 } } },\n"
                         "T.stage { at = T.steps(7), data = T.blend { sources = {\n"
                         "T.megatron { prefix = \"d/code\", weight = 1 } } } }",
                         kBlend));
    const std::vector<Recipe> segments = recipe_segments(r).value();
    const auto weights = [&](size_t i) {
      std::vector<double> out;
      for (const DataSource& source : segments[i].data.sources) out.push_back(source.weight);
      return out;
    };
    CHECK(weights(0) == std::vector<double>{70, 30});
    CHECK(weights(1) == std::vector<double>{30, 30});
    CHECK(weights(2) == std::vector<double>{30, 70});
    CHECK(weights(3) == std::vector<double>{1});
    const Recipe set = load_good(with(kBlend), {.sets = {"data.weights.code=5"}});
    CHECK(set.data.sources[1].weight == 5);
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), data = { weights = { wbe = 30 } } }", kBlend)) ==
          "main.lua:6: stages[1]: data.weights.wbe: no source has this name; did you mean `web`?");
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), data = { weights = { web = -1 } } }", kBlend)) ==
          "main.lua:6: stages[1]: data.weights.web must be a number >= 0, got -1");
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), data = { weights = { web = 0, code = 0 } } }", kBlend))
              .find("every source has weight 0") != std::string::npos);
    load_good(staged("T.stage { at = T.steps(5), data = { weights = { web = 0 } } }", kBlend));
    CHECK(only_mistake(staged("T.stage { at = T.steps(5), data = { weights = 3 } }", kBlend)) ==
          "main.lua:6: stages[1]: data.weights must be a table of numbers by name, got 3");
  }

  TEST_CASE("--set and --with reach below the stages, and can set or take them away") {
    const std::string text = staged("T.stage { at = T.steps(5), batch = { samples = 32 } }");
    const Recipe under = load_good(text, {.sets = {"batch.samples=64", "optimizer.clip=1"}});
    CHECK(under.batch.samples == 64);
    CHECK(under.stages[0].changes == R"({"batch.samples":32})");
    CHECK(recipe_segments(under).value()[1].optimizer.clip == 1);
    CHECK(load_good(text, {.sets = {"stages-"}}).stages.empty());
    const Recipe set = load_good(kBase, {.sets = {"stages={ T.stage { at = T.steps(9), batch = { micro = 1 } } }"}});
    REQUIRE(set.stages.size() == 1);
    CHECK(set.stages[0].changes == R"({"batch.micro":1})");
    CHECK(load_good(kBase, {.sets = {"stages=T.stage { at = T.steps(9) }"}}).stages.size() == 1);
    const LoadResult wrong = load_text(kBase, {.sets = {"stages=T.stage { at = T.steps(9), batch = { micro = 7 } }"}});
    CHECK(to_text(wrong.diagnostics)
              .find("--set stages=T.stage { at = T.steps(9), batch = { micro = 7 } }: stages[1]: "
                    "batch.samples = 16 is not divisible by batch.micro = 7") == 0);
  }

  TEST_CASE("explain names the line of each change; help and the editor know T.stage") {
    const LoadResult loaded = load_text(staged("T.stage { at = T.steps(5),\n optimizer = { peak_lr = 1e-4 } }"));
    REQUIRE(loaded.ok());
    const std::string one = explain_text(loaded.loaded, "optimizer.peak_lr").value();
    CHECK(one.find("optimizer.peak_lr = 0.001  ") == 0);
    CHECK(one.find("stages[1].optimizer.peak_lr = 0.0001  ") != std::string::npos);
    CHECK(one.find("main.lua:5\n") != std::string::npos);
    CHECK(explain_text(loaded.loaded, "stages")
              .value()
              .find("stages = { T.stage { at = T.steps(5), optimizer = { "
                    "lr = ") == 0);
    CHECK(help_text("stages").value().find("type     a list of T.stage {...}") != std::string::npos);
    CHECK(help_text("T.stage").value().find("at  ") != std::string::npos);
    CHECK(editor_types().find("---@class cairn.Stage : cairn.Recipe\n---@field at? cairn.Span") != std::string::npos);
    CHECK(editor_types().find("---@field stages? cairn.Stage[]") != std::string::npos);
  }

  TEST_CASE("a stored recipe is checked in each of its segments") {
    Recipe r = load_good(staged("T.stage { at = T.steps(5), batch = { samples = 32 } }"));
    CHECK(check_recipe(r, 1).empty());
    r.stages[0].changes = R"({"batch.samples":33})";
    const std::vector<Diagnostic> found = check_recipe(r, 1);
    REQUIRE(found.size() == 1);
    CHECK(found[0].message.find("stages[1]: batch.samples = 33 cannot be cut") == 0);
    r.stages[0].changes = R"({"batch.samples":32})";
    CHECK(check_recipe(r, 3).size() == 2);  // 16 and 32 over three replicas
    r.stages.push_back(r.stages[0]);
    CHECK(check_recipe(r, 1).size() == 1);
  }
}
