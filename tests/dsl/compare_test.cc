#include "dsl/compare.h"

#include <doctest/doctest.h>

#include <set>

#include "dsl/stages.h"
#include "tests/dsl/random_recipe.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

namespace {

/// "optimizer.peak_lr: 0.001 -> 0.002", one a line.
std::string told(const Recipe& before, const Recipe& after) {
  std::string out;
  for (const FieldChange& change : compare_recipes(before, after))
    out += change.path + ": " + change.before + " -> " + change.after + "\n";
  return out;
}

const std::string kBlend = R"(data = T.blend { sources = {
  T.megatron { prefix = "d/web", weight = 70 }, T.token_files { train = "d/code.bin", name = "code", weight = 30 } } })";

}  // namespace

TEST_SUITE("dsl/compare") {
  TEST_CASE("every stored field of the schema is compared, under the path that a recipe writes") {
    std::set<std::string> schema, compared;
    visit_fields([&](const std::string& path, const Field& field) {
      const bool block = field.type == Type::kBlock && field.form == Form::kPlain;
      if (field.stored() && !block && field.form != Form::kSegments) schema.insert(path);
    });
    for (const StoredValue& value : stored_values(load_good(kBase))) {
      const std::string top = value.path.substr(0, value.path.find('.'));
      compared.insert(top == "data" || top == "tokenizer" ? top : value.path);
      CHECK(find_stored(value.key) == value.field);
    }
    CHECK(compared == schema);
    CHECK(find_stored("optimizer") == nullptr);
    CHECK(find_stored("stages") == nullptr);
    CHECK(find_stored("optimizer.peak_lr.x") == nullptr);
    CHECK(find_stored("checkpoint.snapshot") == nullptr);  // how it is written, not stored
    CHECK(find_stored("") == nullptr);
  }

  TEST_CASE("two recipes are equal in canonical JSON if and only if nothing is told, over changes of every field") {
    RandomValues random(1);
    const Recipe base = load_good(kBase);
    const std::vector<StoredValue> values = stored_values(base);
    int64_t differ = 0;
    for (const StoredValue& value : values) {
      CAPTURE(value.key);
      bool changed_once = false;
      for (int i = 0; i < 12; ++i) {
        const auto other = changed(base, value.key, random.value(value.key, *value.field));
        if (!other) continue;
        const std::vector<FieldChange> changes = compare_recipes(base, *other);
        const bool equal = encode_recipe(base) == encode_recipe(*other);
        CHECK(equal == changes.empty());
        if (equal) continue;
        changed_once = true;
        ++differ;
        for (const FieldChange& change : changes) {
          CHECK((change.before != change.after || change.path == "tokenizer"));  // a path without a kind is not told
          CHECK(change.before_json != change.after_json);
          CHECK((change.path == value.path || change.path.rfind("data.", 0) == 0 || change.path == "tokenizer"));
        }
        // Back, and both ways.
        CHECK(compare_recipes(*other, base).size() == changes.size());
      }
      CHECK(changed_once);
    }
    CHECK(differ > 1000);
    for (int i = 0; i < 300; ++i) {  // several at once, on both sides
      Recipe left = base, right = base;
      for (int n = 0; n < 3; ++n) {
        const StoredValue& value = random.one_of(values);
        const Json json = random.value(value.key, *value.field);
        Recipe& side = random.chance(0.5) ? left : right;
        if (const auto other = changed(side, value.key, json)) side = *other;
        if (random.chance(0.5))
          if (const auto other = changed(right, value.key, json)) right = *other;
      }
      CHECK((encode_recipe(left) == encode_recipe(right)) == compare_recipes(left, right).empty());
    }
  }

  TEST_CASE("values are told as a recipe writes them, in the schema's order") {
    const Recipe base = load_good(kBase);
    CHECK(told(base, base).empty());
    CHECK(told(base, load_good(with("optimizer = { peak_lr = 2e-3, beta2 = 0.99 }, batch = { samples = 32 }, "
                                    "eval = { at = T.every { steps = 5 } }, tokenizer = T.bytes, "
                                    "checkpoint = { keep = { T.last(1) }, snapshot = T.every { steps = 2 } }"))) ==
          "tokenizer: none -> T.bytes\n"
          "batch.samples: 16 -> 32\n"
          "optimizer.peak_lr: 0.001 -> 0.002\n"
          "optimizer.lr: T.schedule { T.warmup { over = T.steps(10) }, T.cosine { to = 0.0001 } } -> "
          "T.schedule { T.warmup { over = T.steps(10) }, T.cosine { to = 0.0002 } }\n"
          "optimizer.beta2: 0.95 -> 0.99\n"
          "checkpoint.snapshot: T.every { steps = 1 } -> T.every { steps = 2 }\n"
          "checkpoint.keep: { T.last(3) } -> { T.last(1) }\n"
          "eval.at: never -> T.every { steps = 5 }\n");
    CHECK(told(base, load_good(with("model = { rope = { dims = 8 } }"))) == "model.rope.dims: 0 -> 8\n");
    CHECK(told(base, load_good(with("stages = { T.stage { at = T.steps(5), batch = { samples = 32 } } }"))) ==
          "stages: none -> { T.stage { at = T.steps(5), batch = { samples = 32 } } }\n");
  }

  TEST_CASE("sources of data are told one by one, by name") {
    const Recipe base = load_good(with(kBlend));
    const auto to = [&](const std::string& sources) {
      return told(base, load_good(with("data = T.blend { sources = { " + sources + " } }")));
    };
    const std::string web = "T.megatron { prefix = \"d/web\", weight = 70 }";
    const std::string code = "T.token_files { train = \"d/code.bin\", name = \"code\", weight = 30 }";
    CHECK(to(web + ", " + code).empty());
    CHECK(to(code + ", " + web) == "data.sources: { \"web\", \"code\" } -> { \"code\", \"web\" }\n");
    CHECK(to(web + ", T.token_files { train = \"e/code.bin\", name = \"code\", valid = \"v\", weight = 5 }") ==
          "data.code.train: \"d/code.bin\" -> \"e/code.bin\"\n"
          "data.code.valid: \"\" -> \"v\"\n"
          "data.code.weight: 30 -> 5\n");
    CHECK(to("T.megatron { prefix = \"d/web\", split = { 9, 1 }, weight = 70 }, T.megatron { prefix = \"d/ift\" }") ==
          "data.web.split: { 1 } -> { 9, 1 }\n"
          "data.code: T.token_files { train = \"d/code.bin\", dtype = \"uint16\", weight = 30 } -> \n"
          "data.ift:  -> T.megatron { prefix = \"d/ift\", split = { 1 }, weight = 1 }\n");
    CHECK(to(web + ", T.megatron { prefix = \"d/code\", weight = 30 }").find("data.code: T.token_files {") == 0);
    const Recipe limited = load_good(with("data = T.megatron { prefix = \"d/web\", tokens = 5 }"));
    const Recipe all = load_good(with("data = T.megatron { prefix = \"d/web\" }"));
    CHECK(told(limited, all) == "data.web.tokens: 5 -> 0\n");
    CHECK(told(all, limited) == "data.web.tokens: 0 -> 5\n");
    const auto chats = [](const std::string& more) {
      return load_good(with("data = T.instruct { prefix = \"d/ift\"" + more + " }"));
    };
    CHECK(told(chats(""), chats(", overlong = \"drop\"")) == "data.ift.overlong: \"refuse\" -> \"drop\"\n");
    CHECK(told(chats(""), chats(", weigh = \"sample\"")) == "data.ift.weigh: \"token\" -> \"sample\"\n");
    const auto masked = [](const std::string& repeats) {
      return load_good(with("data = T.blend { sources = { T.megatron { prefix = \"d/web\" } }" + repeats + " }"));
    };
    CHECK(told(masked(""), masked(", mask_repeats = T.repeats { period = 5 }")) ==
          "data.mask_repeats.period: 0 -> 5\ndata.mask_repeats.count: 0 -> 32\n");
    CHECK(told(all, chats("")).find("data.ift:  -> T.instruct { prefix = \"d/ift\"") != std::string::npos);
    CHECK(told(base, load_good(with(kBlend + ", seed = 3"))) == "seed: 7 -> 3\n");
    Recipe twice = base, other;  // of one name, as stored recipes may have them: the second has the second as partner
    twice.data.sources[1] = twice.data.sources[0];
    other = twice;
    other.data.sources[1].weight = 6;
    CHECK(told(twice, other) == "data.web#2.weight: 70 -> 6\n");
  }
}
