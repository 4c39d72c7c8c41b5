#include <doctest/doctest.h>

#include "tests/dsl/recipe_text.h"

using namespace cairn;
using namespace cairn::dsl;

TEST_SUITE("dsl/recipe") {
  TEST_CASE("a recipe fills the struct, defaults and derived values included") {
    const Recipe r = load_good(kBase);
    CHECK(r.name == "base");
    CHECK(r.seed == 7);
    CHECK(r.stop.unit == Span::Unit::kSteps);
    CHECK(r.stop.value == 1000);
    CHECK(r.model.layers == 4);
    CHECK(r.model.kv_heads == 4);
    CHECK(r.model.head_dim == 16);
    CHECK(r.model.ffn == 256);
    CHECK(r.model.vocab == 257);
    CHECK(r.model.positions == Positions::kLearned);
    CHECK(r.model.bias);
    CHECK(r.model.tied_embeddings);
    REQUIRE(r.data.sources.size() == 1);
    CHECK(r.data.sources[0].path == "data/text_document");
    CHECK(r.data.sources[0].name == "text_document");
    CHECK(r.data.sources[0].split == std::vector<double>{95, 5});
    REQUIRE(r.optimizer.lr.size() == 2);
    CHECK(r.optimizer.lr[0].kind == LrStage::Kind::kWarmup);
    CHECK(r.optimizer.lr[0].over.value == 10);
    CHECK(r.optimizer.lr[1].over.value == 0);
    CHECK(r.optimizer.lr[1].to == doctest::Approx(1e-4).scale(0));
    CHECK(r.optimizer.beta2 == 0.95);
    REQUIRE(r.checkpoint.save.size() == 2);
    CHECK(r.checkpoint.save[0].steps == 5);
    CHECK(r.checkpoint.save[1].seconds == 600);
    CHECK(r.checkpoint.keep == std::vector<Keep>{{.kind = Keep::Kind::kLast, .count = 3}});
    CHECK(r.log.every_steps == 1);
    CHECK(r.restart.deadline_s == 60);
    CHECK(r.precision == Precision::kF32);
    CHECK(r.schedule == PipelineKind::k1F1B);
  }

  TEST_CASE("T.hf is T.init_from of weights alone; T.hf_tokenizer names a tokenizer.json") {
    const auto with = [](const std::string& entries) {
      return "local T = require \"cairn\"\nreturn require(\"base\"):with { " + entries + " }\n";
    };
    const Recipe hf = load_good(with("init = T.hf \"models/llama\", tokenizer = T.hf_tokenizer \"m/tokenizer.json\""));
    CHECK(hf.init.path == "models/llama");
    CHECK(hf.init.weights_only);
    CHECK(hf.tokenizer.kind == TokenizerConfig::Kind::kHf);
    CHECK(hf.tokenizer.path == "m/tokenizer.json");
    const std::string written = R"(init = T.init_from { path = "a", weights_only = true, except = { "head.*" } })";
    CHECK(encode_recipe(load_good(with(R"(init = T.hf { "a", except = { "head.*" } })"))) ==
          encode_recipe(load_good(with(written))));
    const Result<Recipe> again = decode_recipe(encode_recipe(hf));
    REQUIRE(again.ok());
    CHECK(encode_recipe(again.value()) == encode_recipe(hf));
    for (const auto& [entries, message] : std::vector<std::pair<std::string, std::string>>{
             {"init = T.hf { \"a\", wieghts = 1 }", "init.wieghts: no such field in hf"},
             {"init = T.hf {}", "init: T.hf must begin with the folder"},
             {"init = T.hf(5)", "init.path must be"},
             {"tokenizer = T.hf_tokenizer {}", "tokenizer.path is missing"},
             {"tokenizer = T.sentencepiece {}", "tokenizer.path is missing"}}) {
      CAPTURE(entries);
      const LoadResult result = load_text(with(entries));
      CHECK(to_text(result.diagnostics).find("main.lua:2: " + message) != std::string::npos);
    }
  }

  TEST_CASE("the shipped recipes load, and fit the worlds that they are meant for") {
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(CAIRN_SOURCE_DIR);
    LoadOptions eight;
    eight.world = 8;
    const LoadResult quick = load_recipe("recipes/quickstart.lua", eight);
    INFO(to_text(quick.diagnostics));
    CHECK(quick.ok());
    CHECK(quick.loaded.recipe.mesh.sequence_parallel);
    LoadOptions one;
    one.world = 1;
    for (const auto& entry : std::filesystem::directory_iterator("recipes")) {
      if (entry.path().extension() != ".lua" || entry.path().stem() == "quickstart") continue;
      one.world = entry.path().stem() == "experts_tiny" ? 2 : 1;
      const LoadResult result = load_recipe(entry.path().string(), one);
      INFO(to_text(result.diagnostics));
      CHECK(result.ok());
    }
    std::filesystem::current_path(before);
  }

  TEST_CASE("T.llama has Llama's defaults, and replaces a T.gpt as a whole") {
    const Recipe r = load_good(
        with("model = T.llama { layers = 2, width = 96, heads = 6, kv_heads = 2, context = 16, vocab = \"32K\" }"));
    CHECK(r.model.positions == Positions::kRotary);
    CHECK(r.model.norm == NormKind::kRmsNorm);
    CHECK(r.model.activation == Activation::kSwiGlu);
    CHECK(!r.model.bias);
    CHECK(!r.model.tied_embeddings);
    CHECK(r.model.kv_heads == 2);
    CHECK(r.model.ffn == 256);  // 8/3 * 96 = 256, a multiple of 64
    CHECK(r.model.vocab == 32000);
    const LoadResult partial = load_text(with("model = T.llama { layers = 2 }"));
    CHECK(partial.diagnostics.size() == 4);  // width, heads, context and vocab of the T.gpt are gone
  }

  TEST_CASE("with merges blocks, replaces lists, and T.replace and T.unset do what they say") {
    const Recipe merged =
        load_good(with("model = { layers = 8 }, checkpoint = { keep = { T.last(1) } }, mesh = { tp = 2 }"));
    CHECK(merged.model.layers == 8);
    CHECK(merged.model.width == 64);
    CHECK(merged.checkpoint.keep == std::vector<Keep>{{.kind = Keep::Kind::kLast, .count = 1}});
    CHECK(merged.checkpoint.save.size() == 2);
    CHECK(load_good(with("log = { at = T.every { steps = 1 } }")).log.every_steps == 0);  // each: 1 is stored for none
    CHECK(load_good(with("log = { at = T.every { steps = 2 } }")).log.every_steps == 2);
    CHECK(load_good(with("log = { at = T.unset }")).log.every_steps == 1);
    const Recipe list = load_good(with("checkpoint = { save = { T.every { steps = 1 } } }"));
    CHECK(list.checkpoint.save.size() == 1);
    const Recipe replaced = load_good(with("checkpoint = T.replace { direct_io = false }"));
    CHECK(replaced.checkpoint.save.empty());
    CHECK(replaced.checkpoint.keep.empty());
    CHECK(!replaced.checkpoint.direct_io);
    const Recipe unset = load_good(with("checkpoint = T.unset, seed = T.unset"));
    CHECK(unset.checkpoint.save.empty());
    CHECK(unset.seed == 0);
    const Recipe data = load_good(with("data = { prefix = \"other/text\" }"));
    CHECK(data.data.sources[0].path == "other/text");
    CHECK(data.data.sources[0].split == std::vector<double>{95, 5});
    CHECK(load_good(with("model = { positions = T.rotary { theta = 5e5 } }")).model.rope_theta == 5e5);
    const Recipe same = load_good(with("optimizer = T.adamw { clip = 2 }"));
    CHECK(same.optimizer.clip == 2);
    CHECK(same.optimizer.peak_lr == 1e-3);
    CHECK(only_mistake(with("name = T.unset")) == "base.lua:2: name is missing; it must be a string");
  }

  TEST_CASE("precedence of values: default < recipe < with < --with < --set") {
    const RecipeFolder folder;
    folder.write("base.lua", kBase);
    folder.write("main.lua", with("seed = 8, batch = { samples = 32 }, eval = { steps = 3 }"));
    folder.write("a.lua", "return { seed = 9, eval = { steps = 4 } }");
    folder.write("b.lua", "return { seed = 10 }");
    LoadOptions options;
    CHECK(load_recipe("main.lua", options).loaded.recipe.seed == 8);
    options.with_files = {"a.lua", "b.lua"};
    CHECK(load_recipe("main.lua", options).loaded.recipe.seed == 10);
    options.sets = {"seed=11", "seed=12"};
    const LoadResult result = load_recipe("main.lua", options);
    REQUIRE(result.ok());
    CHECK(result.loaded.recipe.seed == 12);
    CHECK(result.loaded.recipe.eval.steps == 4);
    CHECK(result.loaded.recipe.batch.samples == 32);
    std::vector<std::string> names;
    for (const auto& [name, text] : result.loaded.sources) names.push_back(name);
    CHECK(names == std::vector<std::string>{"main.lua", "base.lua", "a.lua", "b.lua"});
  }

  TEST_CASE("rules of retention, and what a run begins with") {
    const std::string rules =
        "checkpoint = { keep = { T.last(2), T.every { steps = 1000 }, T.every { hours = 24 }, T.within { hours = 2 },"
        " T.best { metric = \"valid_loss\", count = 3 }, T.at { steps = { 5, 70 } }, T.fractions(10) } }";
    const Recipe r = load_good(with("eval = T.eval { at = T.every { steps = 5 } }, " + rules));
    using Kind = Keep::Kind;
    CHECK(r.checkpoint.keep == std::vector<Keep>{{.kind = Kind::kLast, .count = 2},
                                                 {.kind = Kind::kEvery, .steps = 1000},
                                                 {.kind = Kind::kEvery, .seconds = 86400},
                                                 {.kind = Kind::kWithin, .seconds = 7200},
                                                 {.kind = Kind::kBest, .metric = "valid_loss", .count = 3},
                                                 {.kind = Kind::kAt, .at = {5, 70}},
                                                 {.kind = Kind::kFractions, .count = 10}});
    CHECK(encode_recipe(decode_recipe(encode_recipe(r)).value()) == encode_recipe(r));
    CHECK(only_mistake(with(rules)) ==
          "main.lua:3: checkpoint.keep asks for the best valid_loss, but nothing is evaluated");
    CHECK(only_mistake(with("checkpoint = { keep = { T.best { metric = \"acc\" } } }")).find("names no metric") !=
          std::string::npos);
    CHECK(only_mistake(with("checkpoint = { keep = { T.within { hours = 1, minutes = 2 } } }")) ==
          "main.lua:3: checkpoint.keep: T.within takes exactly one of seconds, minutes and hours");
    CHECK(only_mistake(with("checkpoint = { keep = { 3 } }")) ==
          "main.lua:3: checkpoint.keep must be a list of T.last(n), T.every {...}, T.best {...}, T.at {...}, "
          "T.within {...} and T.fractions(n), got 3");
    const Recipe from = load_good(with("init = T.init_from { path = \"runs/a\", only = { \"layers.*\" } }"),
                                  {.sets = {"init.weights_only=true", "init.allow_extra={ 'head.*' }"}});
    CHECK(from.init.path == "runs/a");
    CHECK(from.init.only == std::vector<std::string>{"layers.*"});
    CHECK(from.init.allow_extra == std::vector<std::string>{"head.*"});
    CHECK(from.init.weights_only);
    CHECK(only_mistake(with("init = { path = \"a\", only = { 3 } }")) ==
          "main.lua:3: init.only must be a list of strings, got { 3 }");
    CHECK(load_good(with("checkpoint = { on_failure = \"stop\", space = \"warn\" }")).checkpoint.on_failure ==
          OnSaveFailure::kStop);
  }

  TEST_CASE("references follow overrides") {
    LoadOptions options;
    options.sets = {"optimizer.peak_lr=5e-3"};
    CHECK(load_good(kBase, options).optimizer.lr[1].to == doctest::Approx(5e-4).scale(0));
    const Recipe chain =
        load_good(with("model = { width = T.ref \"model.heads\" * 32, ffn = T.ref \"model.width\" * 2 },"
                       "optimizer = { eps = (1 - T.ref \"optimizer.peak_lr\" ^ 2) / 1e6, clip = -T.ref "
                       "\"optimizer.zero\" + 3 // 2 }"));
    CHECK(chain.model.width == 128);
    CHECK(chain.model.ffn == 256);
    CHECK(chain.optimizer.eps == doctest::Approx(1e-6).scale(0));
    CHECK(chain.optimizer.clip == 1);
    CHECK(load_good(with("model = { ffn = T.ref \"model.head_dim\" * 8 }")).model.ffn == 128);  // a derived default
    CHECK(only_mistake(with("model = { ffn = T.ref \"model.width\" / 7 }"))
              .find("main.lua:3: model.ffn must be an integer") == 0);
    CHECK(only_mistake(with("model = { ffn = T.ref \"model.ffn\" * 2 }")) ==
          "main.lua:3: model.ffn: T.ref goes in a circle: model.ffn -> model.ffn");
  }

  TEST_CASE("--set is typed by the field") {
    LoadOptions options;
    options.sets = {"precision=bf16",
                    "schedule=gpipe",
                    "restart.deadline=2min",
                    "mesh.order={\"pp\", \"tp\", \"dp\"}",
                    "mesh.sequence_parallel=false",
                    "optimizer.betas={ 0.8, 0.9 }",
                    "stop=T.tokens \"1M\"",
                    "checkpoint.save={ T.every { minutes = 1 } }",
                    "name=12",
                    "data.prefix=other/path_document",
                    "model.layers=2*3",
                    "tokenizer=T.bytes"};
    const Recipe r = load_good(kBase, options);
    CHECK(r.precision == Precision::kBf16);
    CHECK(r.schedule == PipelineKind::kGpipe);
    CHECK(r.restart.deadline_s == 120);
    CHECK(r.mesh.order == std::vector<MeshAxis>{MeshAxis::kPp, MeshAxis::kTp, MeshAxis::kDp});
    CHECK(r.optimizer.beta1 == 0.8);
    CHECK(r.optimizer.beta2 == 0.9);
    CHECK(r.stop.unit == Span::Unit::kTokens);
    CHECK(r.stop.value == 1e6);
    CHECK(r.checkpoint.save[0].seconds == 60);
    CHECK(r.name == "12");
    CHECK(r.data.sources[0].path == "other/path_document");
    CHECK(r.model.layers == 6);
    CHECK(r.tokenizer.kind == TokenizerConfig::Kind::kBytes);
    options.sets = {"seed-", "checkpoint.save-"};
    CHECK(load_good(kBase, options).seed == 0);
    CHECK(load_good(kBase, options).checkpoint.save.empty());
  }

  TEST_CASE("a seed has the range that it is said to have, in Lua and in --set") {
    const std::string last = "9223372036854775807", beyond = "9223372036854775808";
    const std::string says = "seed must be an integer from 0 to " + last + ", got ";
    LoadOptions options;
    CHECK(load_good(with("seed = " + last)).seed == (uint64_t{1} << 63) - 1);
    options.sets = {"seed=" + last};
    CHECK(load_good(kBase, options).seed == (uint64_t{1} << 63) - 1);
    CHECK(only_mistake(with("seed = " + beyond)).find(says) != std::string::npos);
    options.sets = {"seed=" + beyond};
    CHECK(only_mistake(kBase, options).find(says) != std::string::npos);
  }

  TEST_CASE("a number keeps its digits, or is refused") {
    CHECK(load_good(with("stop = T.tokens(1e15)")).stop.value == 1e15);
    CHECK(load_good(with("stop = T.tokens(1000000000000000)")).stop.value == 1e15);
    for (const auto& [entries, message] : std::vector<std::pair<std::string, std::string>>{
             {"stop = T.steps(9007199254740993)",
              "stop must be a whole number of steps > 0, at most 1e15, got 9007199254740993"},
             {"stop = T.tokens(1e18)", "stop must be a whole number of tokens > 0, at most 1e15, got 1e+18"},
             {"stop = T.samples(-9007199254740993)",
              "stop must be a whole number of samples > 0, got -9007199254740993"},
             {"optimizer = { peak_lr = 9007199254740993 }",
              "optimizer.peak_lr is an integer beyond 2^53, which loses digits as a number; write it as 9.0072e+15, "
              "got "
              "9007199254740993"},
             {"loss_scale = { initial = -9223372036854775807 }", "loses digits"}}) {
      CAPTURE(entries);
      const std::string said = to_text(load_text(with(entries)).diagnostics);
      CHECK_MESSAGE(said.find(message) != std::string::npos, said);
    }
  }

  TEST_CASE("--param reaches what T.params declares, typed by its default") {
    const std::string text = R"(local T = require "cairn"
local p = T.params {
  seed = T.param { 1, min = 0 }, root = T.param { "data" }, deep = T.param { false }, lr = T.param { 1e-3 },
}
return require "base":with {
  seed = p.seed, data = { prefix = p.root .. "/x" }, model = { layers = p.deep and 8 or 4 }, optimizer = { peak_lr = p.lr },
})";
    LoadOptions options;
    CHECK(load_good(text).seed == 1);
    options.params = {"seed=2K", "root=/lustre=a", "deep=true", "lr=2e-4"};
    const Recipe r = load_good(text, options);
    CHECK(r.seed == 2000);
    CHECK(r.data.sources[0].path == "/lustre=a/x");
    CHECK(r.model.layers == 8);
    CHECK(r.optimizer.peak_lr == 2e-4);
    options.params = {"seed=-1"};
    CHECK(only_mistake(text, options) == "--param seed=-1: seed must be >= 0, got -1");
    CHECK(only_mistake("local T = require 'cairn'\nlocal p = T.params { a = T.param { 1 } }\nreturn p.b") ==
          "main.lua:3: no parameter `b` is declared in this T.params");
  }

  TEST_CASE("lines are those of the field, whatever stands around it") {
    CHECK(only_mistake(with("  -- layers = 3,\n  model = { --[[ layers ]] width = 64,\n\n    [\"layers\"] =\n 0 },"))
              .find("main.lua:6: model.layers must be") == 0);
    CHECK(only_mistake(with("eval = {\n  at =\n    T.every {\n      stps = 3 } }"))
              .find("main.lua:6: eval.at.stps: no such") == 0);
    // A constructor in a tail call, in a function, in another file.
    CHECK(
        only_mistake("local T = require 'cairn'\nlocal function make(n)\n  return T.adamw {\n    clip = n,\n  }\nend\n"
                     "return require 'base':with { optimizer = make(-1) }")
            .find("main.lua:4: optimizer.clip must be") == 0);
    // A value that comes from a local variable is told at the field that takes it.
    CHECK(only_mistake(
              "local T = require 'cairn'\nlocal m = { layers = 0 }\nreturn require 'base':with {\n  model = m,\n}")
              .find("main.lua:4: model.layers must be") == 0);
    CHECK(
        only_mistake(
            with(
                "optimizer = { lr = T.schedule {\n T.warmup { over = T.steps(5) },\n T.hold { over = T.steps(0) } } }"))
            .find("main.lua:5: optimizer.lr[2].over must be") == 0);
  }

  TEST_CASE("a value that fails its own check leaves the old one to the checks across fields") {
    // heads = 0 is refused; width 64 is then checked against the base's 4 heads, not against 0.
    const LoadResult result = load_text(with("model = { heads = 0, width = 66 }"));
    REQUIRE(result.diagnostics.size() == 2);
    CHECK(result.diagnostics[1].message == "model.heads must be an integer from 1 to 65536, got 0");
    CHECK(result.diagnostics[0].message == "model.heads = 4 does not divide model.width = 66 (main.lua:3)");
  }

  TEST_CASE("the stages of the learning rate fit the run") {
    const auto lr = [](const std::string& stages) {
      return only_mistake(with("optimizer = { lr = T.schedule { " + stages + " } }"));
    };
    CHECK(lr("T.hold {}, T.linear { to = 0 }").find("optimizer.lr[2] has no `over`, and nor has stage 1") !=
          std::string::npos);
    CHECK(lr("T.hold { over = T.steps(5) }, T.warmup { over = T.steps(5) }").find("only be the first stage") !=
          std::string::npos);
    // Where the batch grows their lengths do not add up, but their order is as wrong.
    const auto ramped = [](const std::string& stages) {
      return only_mistake(
          with("batch = { ramp = T.ramp { from = 8, by = 8, over = T.samples(64) } },\n"
               "optimizer = { lr = T.schedule { " +
               stages + " } }"));
    };
    CHECK(ramped("T.hold {}, T.linear { to = 0 }").find("optimizer.lr[2] has no `over`, and nor has stage 1") !=
          std::string::npos);
    CHECK(ramped("T.hold { over = T.steps(5) }, T.warmup { over = T.steps(5) }").find("only be the first stage") !=
          std::string::npos);
    CHECK(lr("T.warmup { over = T.fraction(1) }, T.hold {}").find("optimizer.lr[2] has no time left") !=
          std::string::npos);
    CHECK(lr("T.warmup { over = T.fraction(0.5) }, T.hold { over = T.samples(8001) }")
              .find("stages take 1000.0625 steps") != std::string::npos);
    load_good(with(
        "optimizer = { lr = T.schedule { T.warmup { over = T.fraction(0.5) }, T.hold { over = T.samples(8000) } } }"));
    load_good(with("optimizer = { lr = T.cosine { to = 0, over = T.tokens(512) } }"));
    load_good(
        with("optimizer = { lr = T.schedule { T.warmup { over = T.steps(5) }, T.hold {}, T.one_minus_sqrt { to = 0, "
             "over = T.fraction(0.2) } } }"));
    load_good(with("optimizer = { lr = T.schedule { T.warmup { over = T.steps(5) }, T.inverse_sqrt {} } }"));
  }

  TEST_CASE("experts and sequences over ranks: what is unset leaves no trace, and what does not fit is told") {
    const std::string json = encode_recipe(load_good(kBase));
    for (const char* key : {"\"ep\"", "\"cp\"", "router", "bias_rate", "shared_experts"})
      CHECK_MESSAGE(json.find(key) == std::string::npos, key);

    const std::string moe = "activation = \"swiglu\", bias = false, moe = T.moe { experts = 8, top_k = 2";
    const Recipe r = load_good(with(
        "model = { " + moe +
        ", router = \"sigmoid\", shared_experts = 1, groups = 4, groups_per_token = 2, scale = 2.5, "
        "bias_rate = 0.001 } }, mesh = T.mesh { dp = 4, ep = 2, cp = 2, order = { \"cp\", \"tp\", \"dp\", \"pp\" } }"));
    CHECK(r.mesh.ep == 2);
    CHECK(r.mesh.cp == 2);
    CHECK(r.mesh.order.front() == MeshAxis::kCp);
    CHECK(r.model.moe.router == RouterKind::kSigmoid);
    CHECK(r.model.moe.bias_rate == 0.001);

    const auto told = [&](const std::string& changes, const std::string& message, const LoadOptions& options = {}) {
      const std::string line = only_mistake(with(changes), options);
      CAPTURE(line);
      CHECK(line.find(message) != std::string::npos);
    };
    told("mesh = { ep = 2, dp = 2 }", "main.lua:3: mesh.ep = 2 divides experts, and the model has none");
    told("model = { " + moe + " } }, mesh = { ep = 3, dp = 3 }, batch = { samples = 18 }",
         "mesh.ep = 3 does not divide model.moe.experts = 8");
    told("model = { " + moe + " } }, mesh = { ep = 4, dp = 2 }",
         "mesh.ep = 4 does not divide dp = 2: data-parallel ranks divide the experts");
    LoadOptions options;
    options.world = 6;
    told("model = { " + moe + " } }, mesh = { ep = 4 }, batch = { samples = 12 }", "mesh.ep = 4 does not divide dp = 6",
         options);
    told("model = { " + moe +
             " } }, mesh = { ep = 4, dp = 24, shard = 4 }, batch = { samples = 24, micro = 1 }, "
             "optimizer = { zero = 1 }",
         "mesh.shard = 4 cuts the 6 replicas that hold the same experts with mesh.ep = 4");
    told("mesh = { cp = 3 }", "mesh.cp = 3 cuts sequences into 6 chunks, and 32 tokens");
    told("mesh = { cp = 2 }, optimizer = { zero = 1 }, deterministic = \"layout\"",
         "deterministic = \"layout\" takes sums over the 32 tokens of a sequence in 1 parts");
    told("model = { " + moe + ", groups = 3 } }", "model.moe.groups = 3 does not divide model.moe.experts = 8");
    told("model = { " + moe + ", groups = 8 } }",
         "model.moe.top_k = 2 is more than the 1 experts of model.moe.groups_per_token = 1 groups");
    told("model = { " + moe + ", z_loss = 0.1, router = \"sigmoid\" } }", "model.moe.z_loss keeps a softmax");
  }

  TEST_CASE("numerics: precision, dropout, groups, optimizers, batch stages; and what is unset leaves no trace") {
    const Recipe plain = load_good(kBase);
    const std::string json = encode_recipe(plain);
    for (const char* key :
         {"loss_scale", "dropout", "groups", "z_loss", "embedding_gradient", "\"kind\":\"adamw\"", "ramp", "phases",
          "\"tokens\":0", "deterministic", "\"sums\"", "\"ema\"", "qk_clip", "offload", "\"init\":\""})
      CHECK_MESSAGE(json.find(key) == std::string::npos, key);

    const Recipe r = load_good(
        with("precision = \"fp16\", loss_scale = T.loss_scale { initial = 2 ^ 12, hysteresis = 1 }, "
             "deterministic = \"layout\", "
             "model = { residual_dropout = 0.1, attention_dropout = 0.2, positions = \"rotary\" }, "
             "optimizer = { zero = 1, z_loss = 1e-4, embedding_gradient = 0.1, groups = { "
             "T.group { \"embed.*\", lr = 0.5 }, T.group { tensors = \"*.bias\", weight_decay = 0.01 } } }, "
             "batch = { tokens = 16, ramp = T.ramp { from = 8, by = 8, over = T.samples(1000) }, phases = { "
             "T.phase { T.samples(500), micro = 2, tokens = 32 }, T.phase { at = T.steps(90), rope_theta = 5e5 } } }"));
    CHECK(r.precision == Precision::kF16);
    CHECK(r.loss_scale.initial == 4096);
    CHECK(r.loss_scale.window == 1000);
    CHECK(r.deterministic == Deterministic::kLayout);
    CHECK(r.model.attention_dropout == 0.2);
    REQUIRE(r.optimizer.groups.size() == 2);
    CHECK(r.optimizer.groups[0].tensors == "embed.*");
    CHECK(r.optimizer.groups[0].weight_decay == -1);
    CHECK(r.optimizer.groups[1].weight_decay == 0.01);
    CHECK(r.batch.ramp.over.value == 1000);
    REQUIRE(r.batch.phases.size() == 2);
    CHECK(r.batch.phases[0].at.unit == Span::Unit::kSamples);
    CHECK(r.batch.phases[1].rope_theta == 5e5);
    const auto again = decode_recipe(encode_recipe(r));
    REQUIRE_MESSAGE(again.ok(), encode_recipe(r));
    CHECK(encode_recipe(again.value()) == encode_recipe(r));

    const Recipe kept = load_good(
        with("model = { init = \"deep_norm\" }, optimizer = { ema = 0.999, qk_clip = 100, offload = \"/nvme\" }"));
    CHECK(kept.optimizer.ema == 0.999);
    CHECK(kept.optimizer.qk_clip == 100);
    CHECK(kept.optimizer.offload == "/nvme");
    CHECK(kept.model.init == WeightInit::kDeepNorm);
    CHECK(encode_recipe(decode_recipe(encode_recipe(kept)).value()) == encode_recipe(kept));
    CHECK(only_mistake(with("optimizer = { ema = 1 }")).find("optimizer.ema must be a number >= 0 and < 1") !=
          std::string::npos);
    CHECK(only_mistake(with("model = { top_query = true }, optimizer = { qk_clip = 100 }"))
              .find("optimizer.qk_clip = 100 does not see the scores of model.top_query") != std::string::npos);
    const std::string further = "model = { positions = \"rotary\", mtp = { depth = 1 } }";
    CHECK(only_mistake(with(further + ", optimizer = { qk_clip = 100 }"))
              .find("optimizer.qk_clip = 100 does not see the scores of model.mtp.depth") != std::string::npos);
    CHECK(only_mistake(with(further + ", mesh = { cp = 2 }")).find("mesh.cp = 2 cuts sequences, and model.mtp.depth") !=
          std::string::npos);
    CHECK(only_mistake(with("model = { mtp = { depth = 1 } }"))
              .find("model.positions must be rotary with model.mtp, whose modules") != std::string::npos);
    CHECK(only_mistake(with("model = { qk_norm = \"head\" }, optimizer = { qk_clip = 100 }"))
              .find("optimizer.qk_clip = 100 scales the projections of q and k") != std::string::npos);
    CHECK(only_mistake(with("model = { score_cap = 30 }, optimizer = { qk_clip = 100 }"))
              .find("optimizer.qk_clip = 100 takes scores for a product of q and k, and model.score_cap = 30") !=
          std::string::npos);

    CHECK(load_good(with("optimizer = T.lamb { peak_lr = 1e-2 }")).optimizer.kind == OptimizerKind::kLamb);
    CHECK(load_good(with("optimizer = T.adamw { peak_lr = 1e-2 }")).optimizer.kind == OptimizerKind::kAdamW);

    CHECK(only_mistake(with("batch = { ramp = T.ramp { from = 8, by = 5, over = T.steps(9) } }"))
              .find("a whole number of increments") != std::string::npos);
    CHECK(only_mistake(with("optimizer = { groups = { T.group { lr = 2 } } }")).find("must begin with a pattern") !=
          std::string::npos);
    CHECK(only_mistake(with("optimizer = { groups = { T.group { \"embed.*\", lr = 2 }, T.group { \"layer.*\" } } }"))
              .find("main.lua:3: optimizer.groups[2]: \"layer.*\" is of no tensor of the model") == 0);
    CHECK(only_mistake(with("model = { residual_dropout = 1 }")).find("must be a number") != std::string::npos);
    CHECK(load_good(with("sums = \"nccl\"")).sums == Sums::kNccl);
    CHECK(only_mistake(with("sums = \"nccl\", deterministic = \"layout\", optimizer = { zero = 1 }"), {.world = 2})
              .find("sums = \"nccl\" adds in NCCL's order, and deterministic = \"layout\"") != std::string::npos);
    CHECK(only_mistake(with("deterministic = \"layout\""), {.world = 2}).find("optimizer.zero = 0 has none") !=
          std::string::npos);
    CHECK(only_mistake(with("deterministic = \"layout\", mesh = { tp = 4 }, model = { heads = 4, ffn = 96 }"),
                       {.world = 4})
              .find("which model.heads = 4, model.kv_heads = 4 and model.ffn = 96 can be cut into") !=
          std::string::npos);
  }

  TEST_CASE("saves in flight") {
    CHECK(load_good(kBase).checkpoint.in_flight == 1);
    CHECK(encode_recipe(load_good(kBase)).find("in_flight") == std::string::npos);  // stored recipes keep their hash
    CHECK(load_good(with("checkpoint = { in_flight = 3 }")).checkpoint.in_flight == 3);
    CHECK(load_good(with("checkpoint = { in_flight = 0, snapshot_by = \"copy\" }")).checkpoint.in_flight == 0);
    for (const char* more :
         {"", ", snapshot_by = \"banks\"", ", snapshot_by = \"copy\", replicate = T.every { steps = 2 }"}) {
      const std::string said = only_mistake(with(fmt::format("checkpoint = {{ in_flight = 0{} }}", more)));
      CHECK_MESSAGE(said.find("checkpoint.in_flight = 0 leaves one slot") != std::string::npos, said);
    }
    CHECK(only_mistake(with("checkpoint = { in_flight = -1 }")).find("in_flight must be an integer from 0 to 6") !=
          std::string::npos);
    CHECK(only_mistake(with("checkpoint = { in_flight = 7 }")).find("got 7") != std::string::npos);
  }

  TEST_CASE("snapshots that are copied") {
    CHECK(load_good(kBase).checkpoint.snapshot_by == SnapshotBy::kAuto);
    CHECK(load_good(with("checkpoint = { snapshot_by = \"banks\" }")).checkpoint.snapshot_by == SnapshotBy::kBanks);
    CHECK(encode_recipe(load_good(kBase)).find("snapshot_by") == std::string::npos);  // stored recipes keep their hash
    CHECK(load_good(with("checkpoint = { snapshot_by = \"copy\" }")).checkpoint.snapshot_by == SnapshotBy::kCopy);
    CHECK(only_mistake(with("checkpoint = { snapshot_by = \"fork\" }")).find("fork") != std::string::npos);
    CHECK(only_mistake(with("checkpoint = { snapshot_by = \"copy\" }, optimizer = { offload = \"/nvme\" }"))
              .find("but optimizer.offload keeps it on a disk") != std::string::npos);
  }

  TEST_CASE("second places for checkpoints") {
    const Recipe r = load_good(with(
        "checkpoint = { copy_to = { T.place { \"s3://bucket/prefix\", every = T.every { steps = 50 }, keep_last = 5, "
        "keep_every = 500, max_mb_per_s = 80, read_back = false, endpoint = \"http://h:9000\", timeout = \"2min\" }, "
        "T.place { \"/mnt/shared\" } } }"));
    REQUIRE(r.checkpoint.copy_to.size() == 2);
    const CopyTo& first = r.checkpoint.copy_to[0];
    CHECK(first.path == "s3://bucket/prefix");
    CHECK(first.every_steps == 50);
    CHECK(first.keep_last == 5);
    CHECK(first.keep_every == 500);
    CHECK(first.max_mb_per_s == 80);
    CHECK(!first.read_back);
    CHECK(first.endpoint == "http://h:9000");
    CHECK(first.timeout_s == 120);
    CHECK(first.finish_s == 300);
    const CopyTo& second = r.checkpoint.copy_to[1];
    CHECK(second.path == "/mnt/shared");
    CHECK(second.read_back);
    CHECK(load_good(kBase).checkpoint.copy_to.empty());
    const auto mistake = [](const std::string& places) {
      return only_mistake(with("checkpoint = { copy_to = { " + places + " } }"));
    };
    CHECK(mistake("\"/mnt/shared\"").find("checkpoint.copy_to[1]") != std::string::npos);
    CHECK(mistake("T.place { keep_last = 1 }").find("must begin with a directory or s3://") != std::string::npos);
    CHECK(mistake("T.place { \"a\", kepp_last = 3 }").find("no such field in place; did you mean `keep_last`?") !=
          std::string::npos);
    CHECK(mistake("T.place { \"a\", keep_last = -1 }").find("keep_last must be an integer") != std::string::npos);
    CHECK(mistake("T.place { \"ftp://host/x\" }").find("is no place for checkpoints") != std::string::npos);
    CHECK(mistake("T.place { \"\" }").find("is no place for checkpoints") != std::string::npos);
    CHECK(mistake("T.place { \"a\", endpoint = \"http://h\" }").find("are for S3") != std::string::npos);
    CHECK(mistake("T.place { \"a\", ca_file = \"ca.pem\" }").find("is for S3 over https, and \"a\" is a directory") !=
          std::string::npos);
    CHECK(mistake("T.place { \"s3://b/p\", endpoint = \"http://h\", ca_file = \"ca.pem\" }")
              .find("is for S3 over https, and the endpoint is") != std::string::npos);
    const Recipe tls = load_good(with(
        "checkpoint = { copy_to = { T.place { \"s3://b/p\", endpoint = \"https://h\", ca_file = \"ca.pem\" } } }"));
    CHECK(tls.checkpoint.copy_to[0].ca_file == "ca.pem");
    CHECK(mistake("T.place { \"a\", keep_every = 100 }").find("keep_last = 0 keeps all") != std::string::npos);
    CHECK(mistake("T.place { \"a\" }, T.place { \"a\" }").find("is named twice") != std::string::npos);
  }

  TEST_CASE("trackers are read, and their mistakes are named") {
    const auto log = [](const std::string& trackers) { return with("log = { trackers = { " + trackers + " } }"); };
    const Recipe r =
        load_good(log("T.wandb { \"llm\", entity = \"us\", tags = { \"a\", \"b\" } }, T.mlflow { "
                      "\"http://h:5000\", project = \"x\", finish = \"2min\" }, T.prometheus \"/p/a.prom\", "
                      "T.otlp { url = \"https://h\" }"));
    const std::vector<Tracker>& all = r.log.trackers;
    REQUIRE(all.size() == 4);
    CHECK(all[0].kind == Tracker::Kind::kWandb);
    CHECK(all[0].project == "llm");
    CHECK(all[0].entity == "us");
    CHECK(all[0].tags == std::vector<std::string>{"a", "b"});
    CHECK(all[0].finish_s == 60);
    CHECK(all[1].kind == Tracker::Kind::kMlflow);
    CHECK(all[1].to == "http://h:5000");
    CHECK(all[1].project == "x");
    CHECK(all[1].finish_s == 120);
    CHECK(all[2].kind == Tracker::Kind::kPrometheus);
    CHECK(all[2].to == "/p/a.prom");
    CHECK(all[3].kind == Tracker::Kind::kOtlp);
    CHECK(all[3].to == "https://h");
    CHECK(encode_recipe(load_good(kBase)).find("trackers") == std::string::npos);  // stored recipes keep their hash
    const auto mistake = [&](const std::string& trackers) { return only_mistake(log(trackers)); };
    CHECK(mistake("T.mlflow \"host:5000\"").find("log.trackers[1]: \"host:5000\" is no URL") != std::string::npos);
    CHECK(mistake("T.otlp {}").find("T.otlp must begin with the collector") != std::string::npos);
    CHECK(mistake("T.prometheus \"\"").find("names no file") != std::string::npos);
    CHECK(mistake("T.prometheus \"/p/a.txt\"").find("names that end in \".prom\", not \"/p/a.txt\"") !=
          std::string::npos);
    for (const char* const url : {"https://me:s3cret@h/a", "me:s3cret@h"}) {
      const std::string said = mistake(std::string("T.mlflow \"") + url + "\"");
      CHECK(said.find("MLFLOW_TRACKING_TOKEN in the environment") != std::string::npos);
      CHECK(said.find("s3cret") == std::string::npos);
    }
    CHECK(mistake("T.otlp \"http://me@h\"").find("OTEL_EXPORTER_OTLP_HEADERS in the environment") != std::string::npos);
    CHECK(load_good(log("T.otlp \"https://h/a@b\"")).log.trackers.size() == 1);
    CHECK(mistake("T.otlp \"http://h\", T.otlp \"http://h\"").find("is named twice") != std::string::npos);
    CHECK(mistake("T.wandb { \"p\", tag = { \"x\" } }").find("no such field in wandb; did you mean `tags`?") !=
          std::string::npos);
    CHECK(mistake("T.place \"x\"")
              .find("must be a list of T.wandb {...}, T.mlflow {...}, T.prometheus {...} and T.otlp {...}") !=
          std::string::npos);
  }

  TEST_CASE("hooks are read, and their mistakes are named") {
    const std::string best = "checkpoint = { keep = { T.best { metric = \"loss\" } } }, ";
    const Recipe r =
        load_good(with(best + "hooks = { T.on { \"saved\", \"best\", run = { \"up\", \"{step}\" }, timeout = "
                              "\"10min\" }, T.on { events = { \"ended\" }, run = { \"tell\" }, at_most = 10, "
                              "within = \"1h\" } }"));
    REQUIRE(r.hooks.size() == 2);
    CHECK(r.hooks[0].events == std::vector<std::string>{"saved", "best"});
    CHECK(r.hooks[0].run == std::vector<std::string>{"up", "{step}"});
    CHECK(r.hooks[0].timeout_s == 600);
    CHECK(r.hooks[0].at_most == 0);
    CHECK(r.hooks[1].events == std::vector<std::string>{"ended"});
    CHECK(r.hooks[1].at_most == 10);
    CHECK(r.hooks[1].within_s == 3600);
    CHECK(load_good(kBase).hooks.empty());
    CHECK(encode_recipe(load_good(kBase)).find("hooks") == std::string::npos);  // stored recipes keep their hash
    CHECK(load_good(with("hooks = T.on { \"sdc\", run = { \"x\" } }")).hooks.size() == 1);
    const auto mistake = [](const std::string& hook) { return only_mistake(with("hooks = { " + hook + " }")); };
    CHECK(
        mistake("T.on { \"saves\", run = { \"x\" } }").find("hooks[1].events: \"saves\" is not one of best, copied,") !=
        std::string::npos);
    CHECK(mistake("T.on { \"saved\", 3, run = { \"x\" } }").find("hooks[1].events") != std::string::npos);
    CHECK(mistake("T.on { run = { \"x\" } }").find("T.on must begin with the events") != std::string::npos);
    CHECK(mistake("T.on { \"saved\" }").find("hooks[1].run is missing") != std::string::npos);
    CHECK(mistake("T.on { events = {}, run = { \"x\" } }").find("T.on names no event") != std::string::npos);
    CHECK(mistake("T.on { \"saved\", run = {} }").find("run names no program") != std::string::npos);
    CHECK(mistake("T.on { \"saved\", run = { \"\" } }").find("run names no program") != std::string::npos);
    CHECK(mistake("T.on { \"saved\", run = \"x\" }").find("run must be a list of strings") != std::string::npos);
    CHECK(mistake("T.on { \"saved\", run = { \"x\" }, timeout = 0 }").find("timeout must be a number > 0") !=
          std::string::npos);
    CHECK(mistake("T.on { \"saved\", run = { \"x\" }, at_most = 3 }").find("within is missing") != std::string::npos);
    CHECK(mistake("T.on { \"best\", run = { \"x\" } }").find("checkpoint.keep has no T.best") != std::string::npos);
    CHECK(mistake("T.on { \"saved\", at = 3, run = { \"x\" } }").find("no such field in on") != std::string::npos);
    CHECK(mistake("T.place { \"saved\" }").find("must be a list of T.on {...}") != std::string::npos);
  }

  TEST_CASE("checks across fields and against the world") {
    LoadOptions eight;
    eight.world = 8;
    load_good(with("mesh = { tp = 2, pp = 2 }"), eight);
    CHECK(only_mistake(with("mesh = { tp = 3 }")).find("main.lua:3: mesh.tp = 3 does not divide model.heads = 4") == 0);
    CHECK(only_mistake(with("mesh = { sequence_parallel = true }")).find("but mesh.tp = 1") != std::string::npos);
    CHECK(only_mistake(with("mesh = { pp = 2, stages = { 1, 2 } }")).find("sums to 3, but model.layers = 4") !=
          std::string::npos);
    load_good(with("mesh = { pp = 2, stages = { 1, 3 } }"));
    CHECK(only_mistake(with("mesh = { dp = 3 }"), eight).find("needs 3 ranks, but 8 were asked for") !=
          std::string::npos);
    CHECK(only_mistake(with("batch = { micro = 3 }")).find("batch.samples = 16 is not divisible by batch.micro = 3") !=
          std::string::npos);
    CHECK(only_mistake(with("batch = { samples = 24 }, mesh = { tp = 2 }"), LoadOptions{{}, {}, {}, 10})
              .find("batch.samples = 24 cannot be cut: micro 2 x dp 5 = 10 does not divide it") != std::string::npos);
    // An ep that no dp of the recipe is known for: one that it divides is taken.
    const std::string experts =
        "model = { ffn = 32, activation = \"swiglu\", bias = false, moe = T.moe { experts = 8 } }, mesh = { ep = 2 }";
    load_good(with(experts + ", batch = { ramp = T.ramp { from = 8, by = 8, over = T.steps(10) } }"));
    CHECK(only_mistake(with(experts + ", batch = { samples = 6, micro = 2 }"))
              .find("micro 2 x dp 2 = 4 does not divide it") != std::string::npos);
    // Each stage of the run, at its own step.
    CHECK(only_mistake(with("mesh = { pp = 2, virtual_stages = 2, dp = 1 }, schedule = \"interleaved\", "
                            "batch = { micro = 1, phases = { T.phase { T.steps(5), samples = 3 } } }"))
              .find("from step 6 on: schedule = \"interleaved\" takes micro-batches in groups of mesh.pp = 2, and a "
                    "step has 3") != std::string::npos);
    CHECK(only_mistake(with("data = { split = { 1 } }, eval = { at = T.every { steps = 5 } }"))
              .find("has no validation part") != std::string::npos);
    CHECK(only_mistake(with("name = \"a/b\"")).find("cannot be the name of a folder") != std::string::npos);
  }

  TEST_CASE("check_recipe says the same of a recipe that comes from JSON") {
    Recipe r = load_good(kBase);
    CHECK(check_recipe(r, 4).empty());
    r.mesh.tp = 3;
    REQUIRE(check_recipe(r, 0).size() == 2);  // heads and ffn
    r.model.heads = 0;                        // would be divided by
    REQUIRE(check_recipe(r, 0).size() == 1);
    CHECK(check_recipe(r, 0)[0].message.find("model.heads must be") != std::string::npos);
  }

  TEST_CASE("a blend and read_json") {
    const RecipeFolder folder;
    folder.write("recipes/base.lua", kBase);
    folder.write("data/ratios.json", R"([{"path": "a/web", "weight": 3}, {"path": "b/books", "weight": 1.5}])");
    folder.write("recipes/main.lua", R"(local T = require "cairn"
local ratios = T.read_json "data/ratios.json"
return require "recipes.base":with {
  data = T.blend { seed = 3, sources = T.map(ratios, function(r, i)
    return T.megatron { prefix = r.path, weight = r.weight * i }
  end) },
})");
    const LoadResult result = load_recipe("recipes/main.lua");
    INFO(to_text(result.diagnostics));
    REQUIRE(result.ok());
    const DataConfig& data = result.loaded.recipe.data;
    REQUIRE(data.sources.size() == 2);
    CHECK(data.seed == 3);
    CHECK(data.sources[1].name == "books");
    CHECK(data.sources[1].weight == 3.0);
    CHECK(data.sources[0].split == std::vector<double>{1});
    REQUIRE(result.loaded.sources.size() == 3);
    CHECK(result.loaded.sources[1].first == "data/ratios.json");
  }

  TEST_CASE("explain tells who set a value and where") {
    LoadOptions options;
    options.sets = {"batch.micro=4"};
    const LoadResult result = load_text(with("model = {\n  layers = 8 }"), options);
    REQUIRE(result.ok());
    const auto line = [&](const char* field) {
      const std::string text = explain_text(result.loaded, field).value();
      return text.substr(0, text.find('\n'));
    };
    CHECK(line("model.layers").find("main.lua:4") != std::string::npos);
    CHECK(line("model.width").find("base.lua:4") != std::string::npos);
    CHECK(line("model.ffn").find("derived") != std::string::npos);
    CHECK(line("batch.micro").find("--set batch.micro=4") != std::string::npos);
    CHECK(line("mesh.tp").find("default") != std::string::npos);
    CHECK(explain_text(result.loaded, "optimizer.lr").value().find("optimizer.lr[2] = T.cosine { to = 0.0001 }") !=
          std::string::npos);
    CHECK(line("data").find("data = T.megatron { prefix = \"data/text_document\", split = { 95, 5 } }") == 0);
    CHECK(line("tokenizer").find("tokenizer = none") == 0);
    CHECK(explain_text(result.loaded, "optimizer.lrr").error().message.find("did you mean optimizer.lr") !=
          std::string::npos);
  }

  TEST_CASE("two loads give the same bytes and the same hash") {
    const LoadResult a = load_text(with("model = { layers = 8 }")), b = load_text(with("model = { layers = 8 }"));
    CHECK(a.loaded.canonical_json == b.loaded.canonical_json);
    CHECK(a.loaded.hash_hex == b.loaded.hash_hex);
    CHECK(a.loaded.hash_hex.size() == 32);
    CHECK(load_text(kBase).loaded.hash_hex != a.loaded.hash_hex);
  }
}
