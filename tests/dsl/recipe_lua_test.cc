#include "dsl/recipe_lua.h"

#include <doctest/doctest.h>

#include <set>

#include "dsl/stages.h"
#include "tests/dsl/random_recipe.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

/// The canonical JSON that the printed program resolves to, or what is wrong with it.
std::string read_back(const Recipe& recipe) {
  const LoadResult loaded = load_text(recipe_lua(recipe));
  return loaded.ok() ? loaded.loaded.canonical_json : to_text(loaded.diagnostics);
}

/// That a recipe file can say it: no path of a tokenizer that has no file.
bool valid(const Recipe& recipe) {
  const TokenizerConfig& tokenizer = recipe.tokenizer;
  const bool file =
      tokenizer.kind == TokenizerConfig::Kind::kSentencePiece || tokenizer.kind == TokenizerConfig::Kind::kHf;
  return (file || tokenizer.path.empty()) && check_recipe(recipe, 0).empty();
}

}  // namespace

TEST_SUITE("dsl/recipe_lua") {
  TEST_CASE("a recipe is printed as a person writes it") {
    const Recipe r = load_good(with(R"(
      model = T.llama { layers = 2, width = 64, heads = 4, context = 32, vocab = 300, positions = T.rotary { theta = 5e5 } },
      tokenizer = T.bytes, mesh = { tp = 2 }, checkpoint = { copy_to = { T.place { "/mnt/a", keep_last = 2 } } },
      data = T.blend { sources = { T.megatron { prefix = "d/web" }, T.megatron { prefix = "d/code", name = "my code" } } },
      stages = {
        T.stage { at = T.tokens "8K", batch = { samples = 32 }, eval = T.unset, data = { weights = { ["my code"] = 3 } } },
        T.stage { at = T.steps(900), optimizer = { lr = T.schedule { T.linear { to = 0 } } } } })"));
    CHECK(recipe_lua(r) == R"(local T = require "cairn"

return T.recipe {
  name = "base",
  seed = 7,
  stop = T.steps(1000),
  model = T.llama {
    layers = 2,
    width = 64,
    heads = 4,
    context = 32,
    vocab = 300,
    positions = T.rotary { theta = 500000 },
  },
  tokenizer = T.bytes,
  data = T.blend {
    sources = {
      T.megatron { prefix = "d/web", split = { 1 }, weight = 1 },
      T.megatron { prefix = "d/code", split = { 1 }, weight = 1, name = "my code" },
    },
  },
  batch = { samples = 16, micro = 2 },
  optimizer = T.adamw {
    peak_lr = 0.001,
    lr = T.schedule { T.warmup { over = T.steps(10) }, T.cosine { to = 0.0001 } },
  },
  mesh = { tp = 2 },
  checkpoint = {
    save = { T.every { steps = 5 }, T.every { seconds = 600 } },
    keep = { T.last(3) },
    copy_to = { T.place { "/mnt/a", keep_last = 2 } },
  },
  stages = {
    T.stage { at = T.tokens(8000), batch = { samples = 32 }, data = { weights = { ["my code"] = 3 } } },
    T.stage { at = T.steps(900), optimizer = { lr = T.schedule { T.linear { to = 0 } } } },
  },
}
)");
    CHECK(read_back(r) == encode_recipe(r));
  }

  TEST_CASE("masks and weights of the loss are printed, and a stage changes them, of one source too") {
    const Recipe one = load_good(with(R"(
      data = T.instruct { prefix = "d/ift", weigh = "sample" },
      stages = {
        T.stage { at = T.steps(10),
                  data = T.blend { sources = { T.instruct { prefix = "d/ift", weigh = "sample" } },
                                   mask_repeats = T.repeats { period = 3 } } },
        T.stage { at = T.steps(20), data = { mask_repeats = { period = 3, count = 9 } } },
        T.stage { at = T.steps(30), data = { mask_repeats = T.unset } } })"));
    CHECK(one.data.sources[0].weigh == DataSource::Weigh::kSample);
    CHECK(one.data.mask_repeats.period == 0);
    CHECK(read_back(one) == encode_recipe(one));
    const auto segments = recipe_segments(one);
    REQUIRE(segments.ok());
    REQUIRE(segments.value().size() == 4);
    CHECK(segments.value()[1].data.mask_repeats.count == 32);
    CHECK(segments.value()[2].data.mask_repeats.count == 9);
    CHECK(segments.value()[3].data.mask_repeats.count == 0);
    for (const Recipe& segment : segments.value()) CHECK(read_back(segment) == encode_recipe(segment));
  }

  TEST_CASE("every shipped recipe, printed and read, is the same") {
    for (const auto& [name, recipe] : shipped_recipes()) {
      CAPTURE(name);
      CHECK(read_back(recipe) == encode_recipe(recipe));
    }
  }

  TEST_CASE("random recipes, printed and read, are the same, over every field that a recipe can say") {
    RandomValues random(2);
    std::vector<Recipe> bases = {load_good(kBase), load_good(with("tokenizer = T.hf_tokenizer \"t\""))};
    for (const auto& [name, recipe] : shipped_recipes()) bases.push_back(recipe);
    std::set<std::string> tried;
    for (const StoredValue& value : stored_values(bases[0])) {
      CAPTURE(value.key);
      for (int i = 0, good = 0; i < 40 && good < 3; ++i) {
        const Recipe& base = random.one_of(bases);
        const auto other = changed(base, value.key, random.value(value.key, *value.field));
        if (!other || encode_recipe(*other) == encode_recipe(base) || !valid(*other)) continue;
        CHECK(read_back(*other) == encode_recipe(*other));
        tried.insert(value.key);
        ++good;
      }
    }
    CHECK(tried.size() > 100);
  }

  TEST_CASE("random stages, printed and read, are the same") {
    RandomValues random(3);
    std::vector<Recipe> bases = {load_good(kBase)};
    for (const auto& [name, recipe] : shipped_recipes()) {
      bases.push_back(recipe);
      bases.back().stages.clear();  // it gets others
    }
    const std::vector<StoredValue> values = stored_values(bases[0]);
    std::set<std::string> tried;
    int64_t staged = 0;
    for (int i = 0; i < 250; ++i) {
      Recipe recipe = random.one_of(bases);
      Recipe last = recipe;
      for (int64_t n = 1 + random.below(3), at = 0; n > 0; --n) {
        Recipe next = last;
        std::set<std::string> touched;
        for (int j = 0; j < 6; ++j) {
          const StoredValue& value = random.one_of(values);
          if (!may_change_in_stage(value.path)) continue;
          const auto other = changed(next, value.key, random.value(value.key, *value.field));
          if (!other || !valid(*other)) continue;
          next = *other;
          touched.insert(value.key);
        }
        at += 1 + random.below(9);
        const bool sets = touched.count("optimizer.lr_from") != 0 || random.chance(0.1);
        Recipe more = recipe;
        more.stages.push_back({{Span::Unit::kSteps, static_cast<double>(at)}, stage_changes(last, next, sets)});
        if (!valid(more)) continue;
        recipe = more;
        last = next;
        tried.insert(touched.begin(), touched.end());
      }
      if (recipe.stages.empty()) continue;
      ++staged;
      CAPTURE(recipe_lua(recipe));
      CHECK(read_back(recipe) == encode_recipe(recipe));
      const Result<Recipe> decoded = decode_recipe(encode_recipe(recipe));
      REQUIRE(decoded.ok());
      CHECK(encode_recipe(decoded.value()) == encode_recipe(recipe));
      const std::vector<Recipe> segments = recipe_segments(recipe).value();
      CHECK(encode_recipe(segments.back()) == encode_recipe(last));
    }
    CHECK(staged > 150);
    CHECK(tried.size() > 40);
  }
}
