#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "dsl/schema.h"
#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

TEST_SUITE("dsl/reference") {
  TEST_CASE("docs/recipe.md is what the schema generates (CAIRN_UPDATE_DOCS=1 rewrites it)") {
    const std::string path = std::string(CAIRN_SOURCE_DIR) + "/docs/recipe.md";
    if (std::getenv("CAIRN_UPDATE_DOCS") != nullptr) std::ofstream(path, std::ios::binary) << reference_markdown();
    std::ifstream in(path, std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    CHECK_MESSAGE(text.str() == reference_markdown(),
                  "run this test with CAIRN_UPDATE_DOCS=1 and commit docs/recipe.md");
  }

  TEST_CASE("each field has a line of documentation, help, and a place in the page and the editor file") {
    const std::string page = reference_markdown(), types = editor_types();
    visit_fields([&](const std::string& path, const Field& field) {
      CAPTURE(path);
      CHECK(!field.doc.empty());
      const Result<std::string> help = help_text(path);
      REQUIRE(help.ok());
      CHECK(help.value().find(field.doc) != std::string::npos);
      CHECK(help.value().find("  type     ") != std::string::npos);
      CHECK(page.find("| `" + field.name + "` |") != std::string::npos);
      CHECK(types.find("---@field " + field.name + "? ") != std::string::npos);
    });
    for (const std::string& name : constructor_names()) {
      CAPTURE(name);
      CHECK(help_text("T." + name).ok());
      CHECK(page.find("T." + name) != std::string::npos);
      CHECK(types.find("---@field " + name + " ") != std::string::npos);
    }
  }

  TEST_CASE("every default of the schema passes its own check, and every field can be set to it") {
    visit_fields([&](const std::string& path, const Field& field) {
      CAPTURE(path);
      if (field.required || !field.rule.empty() || field.fallback.is_null()) return;
      CHECK(!check_value(field, field.fallback).has_value());
      if (field.llama) CHECK(!check_value(field, *field.llama).has_value());
    });
  }

  TEST_CASE("help of an unknown field names the nearest") {
    CHECK(help_text("optimizer.peak_rl").error().message.find("did you mean optimizer.peak_lr") != std::string::npos);
    CHECK(help_text("peak_lr").error().message.find("optimizer.peak_lr") != std::string::npos);
    CHECK(help_text("T.cosin").error().message.find("T.cosine") != std::string::npos);
    CHECK(help_text("zzzzzz").error().message == "no field \"zzzzzz\"");
    CHECK(help_text("").ok());
    CHECK(help_text("megatron.prefix").ok());
    CHECK(help_text("model.ffn").value().find("rounded up to a multiple of 64") != std::string::npos);
  }

  TEST_CASE("the examples in the reference are accepted") {
    visit_fields([&](const std::string& path, const Field& field) {
      if (field.example.empty()) return;
      CAPTURE(path);
      std::string changes = field.example;
      if (path == "mesh.stages") changes += ", pp = 4";
      const size_t dot = path.find('.');
      changes = dot == std::string::npos
                    ? path + " = " + changes
                    : path.substr(0, dot) + " = { " + path.substr(dot + 1) + " = " + changes + " }";
      if (path == "mesh.stages") changes += ", model = { layers = 14 }";
      if (path == "mesh.virtual_stages") changes = "mesh = { pp = 2, virtual_stages = 2 }, schedule = \"interleaved\"";
      if (path == "mesh.micro_batch_group")
        changes = "mesh = { pp = 2, virtual_stages = 2, micro_batch_group = 4 }, schedule = \"interleaved\"";
      if (path == "mesh.shard") changes += ", optimizer = { zero = 1 }";
      if (path == "optimizer.keep_after_forward") changes = "optimizer = { zero = 3, keep_after_forward = true }";
      if (path == "watch.on_sdc") changes = "watch = { on_sdc = { \"stop\" }, audit = T.every { steps = 100 } }";
      if (path.starts_with("eval.tasks"))
        changes =
            "tokenizer = T.bytes, eval = { tasks_at = T.every { steps = 9 }, tasks = { T.task { \"a.jsonl\" } } }";
      if (path == "watch.early_stop") changes += ", eval = { at = T.every { steps = 9 } }";
      if (path == "model.heads") changes = "model = { heads = 12, width = 768 }";
      load_good(with(changes));
    });
  }

  TEST_CASE("quantities carry units where the field has one") {
    CHECK(parse_quantity("450B", Unit::kCount) == 450e9);
    CHECK(parse_quantity(" 1.5 M ", Unit::kCount) == 1.5e6);
    CHECK(parse_quantity("30min", Unit::kSeconds) == 1800);
    CHECK(parse_quantity("250ms", Unit::kSeconds) == 0.25);
    CHECK(parse_quantity("11h30min", Unit::kSeconds) == 41400);
    CHECK(parse_quantity(" 1d 2 h 3min4.5s", Unit::kSeconds) == 93784.5);
    CHECK(parse_quantity("2GiB", Unit::kBytes) == 2147483648.0);
    CHECK(parse_quantity("7", Unit::kNone) == 7);
    for (const char* text : {"",        "B",    "4 5",   "1e",      "min",     "3 minutes", "2gib",   "1,5",
                             "30min1h", "1h1h", "1h30",  "1h-5min", "1h+5min", "h",         "1h min", "5 5min",
                             "nan",     "inf",  "nan s", "inf h",   "-inf",    "1e308d",    "1e999"})
      CHECK(!parse_quantity(text, Unit::kSeconds).has_value());
  }

  TEST_CASE("nearest names are near") {
    const std::vector<std::string> names = {"weight_decay", "layers", "width", "tp"};
    CHECK(nearest("weight_deacy", names) == "weight_decay");
    CHECK(nearest("layer", names) == "layers");
    CHECK(nearest("tpp", names) == "tp");
    CHECK(nearest("completely", names).empty());
    CHECK(nearest(std::string(100000, 'x'), names).empty());
  }
}
