// deterministic = "layout": every layout trains as every other does, bit for bit.

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr PipelineKind kG = PipelineKind::kGpipe, kF = PipelineKind::k1F1B, kI = PipelineKind::kInterleaved;

struct Layout {
  int64_t pp, dp;
  int zero;
  PipelineKind schedule = kF;
  int64_t virtual_stages = 1;
  std::vector<int64_t> stages = {};
  int64_t bucket = 0;
  bool overlap = true;
};

std::string spelled(const Layout& l) {
  return fmt::format("pp {} dp {} zero {} schedule {} v {} bucket {} overlap {}", l.pp, l.dp, l.zero,
                     static_cast<int>(l.schedule), l.virtual_stages, l.bucket, l.overlap);
}

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.pp = l.pp;
  recipe.mesh.virtual_stages = l.virtual_stages;
  recipe.mesh.stages = l.stages;
  recipe.schedule = l.schedule;
  recipe.optimizer.zero = l.zero;
  recipe.optimizer.bucket = l.bucket;
  recipe.optimizer.overlap = l.overlap;
  return recipe;
}

Recipe base(bool llama, bool tied, Precision precision) {
  Recipe recipe = tiny_recipe(llama, tied);
  recipe.deterministic = Deterministic::kLayout;
  recipe.precision = precision;
  recipe.batch = {.samples = 24, .micro = 1};  // 24 micro-batches: 24, 12, 8, 6, 4 a replica
  stop_after(recipe, 4);
  recipe.model.residual_dropout = llama ? 0.1 : 0;
  return recipe;
}

// With the one-rank run: 36. dp 3 and 6 are no powers of two.
const std::vector<Layout> kLayouts = {
    {1, 2, 1},
    {1, 2, 2},
    {1, 2, 3},
    {1, 3, 1},
    {1, 3, 3},
    {1, 4, 1},
    {1, 4, 2},
    {1, 4, 3},
    {1, 6, 1},
    {1, 6, 2},
    {1, 8, 3},
    {2, 1, 0},
    {2, 1, 0, kG},
    {2, 2, 1},
    {2, 2, 2},
    {2, 2, 3},
    {2, 2, 1, kG},
    {2, 3, 2, kG},
    {2, 4, 3},
    {2, 4, 1},
    {4, 1, 0},
    {4, 1, 0, kG},
    {4, 2, 1},
    {4, 2, 2},
    {4, 2, 3, kG},
    {2, 1, 0, kI, 2},
    {2, 2, 1, kI, 2},
    {2, 2, 2, kI, 2},
    {2, 2, 3, kI, 2},
    {3, 1, 0, kF},
    {3, 2, 2, kF},
    {2, 1, 0, kF, 1, {1, 3}},
    {2, 2, 2, kF, 1, {3, 1}},
    {1, 4, 1, kF, 1, {}, 64},
    {1, 2, 2, kF, 1, {}, 256, false},
};

/// A model whose sums have 8 parts (gpt) or 4.
Recipe wide(const std::string& kind, Precision precision) {
  const bool gpt = kind == "gpt" || kind == "odd";
  Recipe recipe = base(!gpt, kind == "gpt" || kind == "parallel", precision);
  ModelConfig& m = recipe.model;
  m.layers = 2;
  m.width = 48;
  m.heads = 8;
  m.kv_heads = gpt ? 8 : 4;
  m.head_dim = 16;
  m.ffn = gpt ? 256 : 64;
  if (kind == "odd") m.ffn = 192;
  recipe.batch = {.samples = 8, .micro = 2};
  stop_after(recipe, 3);
  recipe.eval = {.every_steps = 2, .steps = 1};
  for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
  recipe.optimizer.z_loss = gpt ? 0 : 1e-3;
  if (kind == "llama") m.qk_norm = QkNorm::kHead;
  if (kind == "sandwich") m.block = BlockKind::kSandwich;
  if (kind == "parallel") m.block = BlockKind::kParallel;
  if (kind == "shared") m.block = BlockKind::kParallelShared;
  if (kind == "whole") {  // OLMo 2, with other options that are pointwise
    m.block = BlockKind::kOutNorm;
    m.qk_norm = QkNorm::kWhole;
    m.norm_plus_one = true;
    m.score_cap = 0.5;
    m.logit_cap = 2;
    m.embedding_scale = 3;
    m.branch_scale = 0.7;
  }
  if (kind == "heads") {
    m.norm = NormKind::kLayerNorm;
    m.norm_bias = false;
    m.qk_norm = QkNorm::kHeadLayerNorm;
    m.nope_layers = {1};
  }
  if (kind == "odd") {  // what is rare
    m.block = BlockKind::kDeepNorm;
    m.residual_scale = 1.5;
    m.head_bias = true;
    m.embed_dim = 32;
    m.embedding_norm = true;
    m.qk_norm = QkNorm::kSharedLayerNorm;
    m.attention_dropout = 0.1;
    recipe.optimizer.kind = OptimizerKind::kLamb;
  }
  return recipe;
}

struct TpLayout {
  int64_t tp;
  bool sp;
  Layout rest;
  RecomputeConfig recompute = {};
  int64_t world() const { return tp * rest.pp * rest.dp; }
};

Recipe cut(const Recipe& recipe, const TpLayout& l) {
  Recipe out = with(recipe, l.rest);
  out.mesh.tp = l.tp;
  out.mesh.sequence_parallel = l.sp;
  out.recompute = l.recompute;
  return out;
}

const std::vector<TpLayout> kTpLayouts = {
    {2, false, {1, 1, 0}},
    {2, true, {1, 1, 0}},
    {2, true, {2, 2, 1}},
    {4, false, {1, 1, 0}},
    {4, true, {1, 2, 2}},
    {2, false, {1, 2, 3}, {RecomputeMode::kFull, 1, true}},
    {2, true, {1, 4, 3}, {RecomputeMode::kSelective}},
    {4, true, {2, 1, 0, kG}, {RecomputeMode::kFull}},
    {2, false, {2, 2, 2, kF, 1, {}, 256, false}},
    {8, false, {1, 1, 0}},
    {8, true, {1, 1, 0}},
};

/// Sequences that cp can divide: sums over 512 tokens have two parts.
Recipe lengthy(const std::string& kind, Precision precision, int64_t context = 512) {
  Recipe recipe = wide(kind == "plain odd" ? "odd" : kind, precision);
  recipe.model.context = context;
  recipe.batch = {.samples = 4, .micro = 2};
  recipe.data.sources[0].path = token_file(40'000, 65, "long a");
  recipe.data.sources[1].path = token_file(30'000, 65, "long b");
  for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
  if (kind == "plain odd") recipe.model.embed_dim = 0;
  return recipe;
}

struct CpLayout {
  int64_t cp;
  TpLayout rest;
  int64_t world() const { return cp * rest.world(); }
};

std::string spelled(const CpLayout& l) {
  return fmt::format("cp {} tp {} sp {} recompute {} {}", l.cp, l.rest.tp, l.rest.sp,
                     static_cast<int>(l.rest.recompute.mode), spelled(l.rest.rest));
}

Recipe cut(const Recipe& recipe, const CpLayout& l) {
  Recipe out = cut(recipe, l.rest);
  out.mesh.cp = l.cp;
  return out;
}

const std::vector<CpLayout> kCpLayouts = {
    {2, {1, false, {1, 1, 1}}},
    {4, {1, false, {1, 1, 1}}},
    {2, {1, false, {1, 2, 2}}},
    {4, {1, false, {1, 2, 3}}},
    {2, {2, false, {1, 1, 1}}},
    {2, {2, true, {1, 1, 3}}},
    {4, {2, true, {1, 1, 2}, {RecomputeMode::kSelective}}},
    {2, {4, true, {1, 1, 1}}},
    {2, {1, false, {2, 1, 1}, {RecomputeMode::kFull}}},
    {2, {2, true, {2, 1, 2, kG}, {RecomputeMode::kFull, 1}}},
    {2, {1, false, {1, 2, 1, kF, 1, {}, 4096, false}}},
    {1, {2, true, {1, 2, 3}}},
    {1, {1, false, {2, 2, 1}}},
};

void same(const Trained& got, const Trained& wanted) {
  CHECK(got.losses == wanted.losses);
  CHECK(got.norms == wanted.norms);
  CHECK(got.source_losses == wanted.source_losses);
  REQUIRE(got.state.size() == wanted.state.size());
  int64_t differing = 0;
  for (const auto& [key, values] : wanted.state) {
    const bool differs = std::memcmp(values.data(), got.state.at(key).data(), values.size() * 4) != 0;
    if (differs) MESSAGE("tensor " << key.second << " kind " << static_cast<int>(key.first));
    differing += differs ? 1 : 0;
  }
  CHECK(differing == 0);
}

/// The run in these layouts, one after another for the same number of steps, is that of one rank.
template <typename Cut>
void check_turns(const Recipe& recipe, const std::vector<Cut>& layouts) {
  const auto whole = train_on_threads(recipe, 1).value();
  const int64_t each = recipe.stop.value / std::ssize(layouts);
  Trained now;
  std::vector<double> losses;
  for (const Cut& l : layouts) {
    const bool first = losses.empty();
    now = train_on_threads(cut(recipe, l), l.world(), first ? nullptr : &now, std::ssize(losses) + each).value();
    losses.insert(losses.end(), now.losses.begin(), now.losses.end());
  }
  CHECK(losses == whole.losses);
  CHECK(now.state == whole.state);
}

}  // namespace

TEST_SUITE("runtime/trainer/trajectory") {
  TEST_CASE("losses, norms and all state are the same bits in 36 layouts, in float and bf16, tied and not") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const bool llama : {false, true}) {
        const Recipe recipe = base(llama, !llama, precision);
        const auto serial = train_on_threads(recipe, 1);
        REQUIRE_OK(serial);
        int index = 0;
        for (const Layout& layout : kLayouts) {
          // All of them for GPT-2 in float and Llama in bf16; every third for the others.
          if ((llama != (precision == Precision::kBf16)) && index++ % 3 != 0) continue;
          CAPTURE(llama);
          CAPTURE(static_cast<int>(precision));
          CAPTURE(spelled(layout));
          const auto got = train_on_threads(with(recipe, layout), layout.pp * layout.dp);
          REQUIRE_OK(got);
          same(got.value(), serial.value());
        }
      }
    }
  }

  TEST_CASE("a new layout every 10 steps for 200 steps equals never having stopped") {
    Recipe recipe = base(false, true, Precision::kF32);
    recipe.batch.samples = 8;
    recipe.model.layers = 2;
    recipe.model.residual_dropout = 0.1;
    recipe.stop = {Span::Unit::kSteps, 200};
    const std::vector<Layout> turns = {{1, 1, 0}, {2, 2, 2}, {1, 4, 3}, {2, 1, 0, kG}, {1, 2, 1}, {2, 4, 3}, {1, 8, 2}};
    const auto whole = train_on_threads(recipe, 1).value();
    Trained now;
    std::vector<double> losses;
    for (int64_t done = 0; done < 200; done += 10) {
      const Layout& layout = turns[done / 10 % turns.size()];
      CAPTURE(spelled(layout));
      auto next = train_on_threads(with(recipe, layout), layout.pp * layout.dp, done == 0 ? nullptr : &now, done + 10);
      REQUIRE_OK(next);
      now = std::move(next).value();
      losses.insert(losses.end(), now.losses.begin(), now.losses.end());
    }
    CHECK(losses == whole.losses);
    now.losses = whole.losses;
    now.norms = whole.norms;
    now.source_losses = whole.source_losses;
    same(now, whole);
  }

  TEST_CASE("a batch ramp, longer sequences, another micro-batch and rotary base in the middle: every layout follows") {
    Recipe recipe = base(true, true, Precision::kF32);
    recipe.batch = {.samples = 16, .micro = 1, .tokens = 4};
    recipe.batch.ramp = {.from = 4, .by = 4, .over = {Span::Unit::kSteps, 6}};
    recipe.batch.phases = {{.at = {Span::Unit::kSteps, 3}, .tokens = 8},
                           {.at = {Span::Unit::kSamples, 60}, .micro = 2, .tokens = 16, .rope_theta = 5e4}};
    recipe.model.attention_dropout = 0.1;
    recipe.eval = {.every_steps = 5, .steps = 1};
    for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
    recipe.stop = {Span::Unit::kSteps, 10};
    const auto whole = train_on_threads(recipe, 1).value();
    CHECK(whole.position.samples == samples_after(step_stages(recipe), 10));
    CHECK(whole.valid.size() == 2);
    for (const Layout& layout : {Layout{2, 2, 2}, Layout{1, 4, 3}, Layout{4, 1, 0, kG}, Layout{2, 1, 0, kI, 2}}) {
      CAPTURE(spelled(layout));
      const auto got = train_on_threads(with(recipe, layout), layout.pp * layout.dp).value();
      same(got, whole);
      CHECK(got.valid == whole.valid);
    }
    for (const int64_t stop : {2, 6, 8}) {  // within stages and at their ends
      const auto half = train_on_threads(with(recipe, {2, 2, 3}), 4, nullptr, stop).value();
      auto rest = train_on_threads(recipe, 1, &half).value();
      rest.losses.insert(rest.losses.begin(), half.losses.begin(), half.losses.end());
      CHECK(rest.losses == whole.losses);
      CHECK(rest.state == whole.state);
    }
    for (const int64_t world : {1, 4}) {
      const Recipe layout = world == 1 ? recipe : with(recipe, {2, 2, 2});
      const Plan plan = make_plan(layout, world).value();
      check_allocated(plan, train_on_threads(layout, world).value());
    }
  }

  TEST_CASE("tensor parallelism of 2, 4 and 8, with and without sequence parallelism, changes no bit either") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16, Precision::kF16}) {
      for (const std::string kind : {"gpt", "llama", "sandwich", "parallel", "shared", "whole", "heads", "odd"}) {
        if (precision == Precision::kF16 && kind != "gpt" && kind != "odd") continue;
        const Recipe recipe = wide(kind, precision);
        CAPTURE(kind);
        CAPTURE(static_cast<int>(precision));
        const auto serial = train_on_threads(recipe, 1);
        REQUIRE_OK(serial);
        const int64_t parts = sum_parts(recipe.model);
        REQUIRE(parts == (kind == "gpt" ? 8 : 4));
        const bool thorough = (kind == "gpt" || kind == "llama") && precision != Precision::kF16;
        int index = 0;
        for (const TpLayout& l : kTpLayouts) {
          if (l.tp > parts || (l.sp && (kind == "odd" || kind == "shared"))) continue;
          if (!thorough && index++ % 2 != 0) continue;
          CAPTURE(l.tp);
          CAPTURE(l.sp);
          CAPTURE(static_cast<int>(l.recompute.mode));
          CAPTURE(spelled(l.rest));
          const auto got = train_on_threads(cut(recipe, l), l.world());
          REQUIRE_OK(got);
          same(got.value(), serial.value());
          CHECK(got.value().valid == serial.value().valid);
        }
        // Without the mode they differ, or the above would say nothing.
        Recipe run = recipe;
        run.deterministic = Deterministic::kRun;
        const Trained one = train_on_threads(run, 1).value();
        const Trained two = train_on_threads(cut(run, {2, false, {1, 1, 0}}), 2).value();
        CHECK(one.state != two.state);
      }
    }
  }

  TEST_CASE("a run goes on with another tp, and the bits are those of never having stopped") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      Recipe recipe = wide("llama", precision);
      recipe.stop = {Span::Unit::kSteps, 9};
      check_turns<TpLayout>(recipe, {{2, true, {1, 2, 2}}, {1, false, {2, 1, 0}}, {4, false, {1, 1, 0}}});
    }
  }

  TEST_CASE("tensor parallelism in this mode takes the memory and moves the bytes that the plan says") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const std::string kind : {"gpt", "llama", "whole", "heads", "odd"}) {
        for (const TpLayout& l : {TpLayout{2, false, {1, 2, 2}}, TpLayout{2, true, {2, 1, 0}},
                                  TpLayout{4, true, {1, 2, 1}, {RecomputeMode::kFull, 1}}}) {
          Recipe recipe = cut(wide(kind, precision), l);
          if (l.sp && kind == "odd") continue;
          stop_after(recipe, 1);
          recipe.eval = {};
          CAPTURE(kind);
          CAPTURE(l.tp);
          const int64_t world = l.world();
          check_step_traffic(recipe, world);
          const Plan plan = make_plan(recipe, world).value();
          check_allocated(plan, train_on_threads(recipe, world).value());
        }
      }
    }
  }

  TEST_CASE("context parallelism of 2, 4 and 8 changes no bit, alone and with every other axis") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16, Precision::kF16}) {
      for (const std::string kind : {"gpt", "llama", "sandwich", "parallel", "whole", "heads", "plain odd"}) {
        if (precision == Precision::kF16 && kind != "llama") continue;
        const bool thorough =
            precision == Precision::kF32 ? kind == "gpt" : precision == Precision::kBf16 && kind == "llama";
        const Recipe recipe = lengthy(kind, precision, thorough ? 1024 : 512);
        CAPTURE(kind);
        CAPTURE(static_cast<int>(precision));
        const int64_t parts = token_parts(recipe, recipe.model.context);
        REQUIRE(parts == (thorough ? 4 : 2));
        const auto serial = train_on_threads(recipe, 1);
        REQUIRE_OK(serial);
        int index = 0;
        for (const CpLayout& l : kCpLayouts) {
          // All of them for GPT-2 in float and Llama in bf16; every second that they can have for the others.
          if (l.cp > parts || (!thorough && index++ % 2 != 0)) continue;
          CAPTURE(spelled(l));
          const auto got = train_on_threads(cut(recipe, l), l.world());
          REQUIRE_OK(got);
          same(got.value(), serial.value());
          CHECK(got.value().valid == serial.value().valid);
        }
        // Without the mode they differ, or the above would say nothing.
        Recipe run = recipe;
        run.deterministic = Deterministic::kRun;
        const Trained one = train_on_threads(run, 1).value();
        const Trained two = train_on_threads(cut(run, kCpLayouts.front()), 2).value();
        CHECK(one.state != two.state);
      }
    }
  }

  TEST_CASE("context parallelism changes no bit with 8 parts, sequences that grow, and logits in blocks") {
    Recipe recipe = lengthy("llama", Precision::kBf16, 2048);
    recipe.batch = {.samples = 2, .micro = 1};
    const auto check = [](const Recipe& r, const CpLayout& l, const Trained& wanted) {
      CAPTURE(spelled(l));
      const auto got = train_on_threads(cut(r, l), l.world());
      REQUIRE_OK(got);
      same(got.value(), wanted);
      CHECK(got.value().valid == wanted.valid);
    };
    const Trained eight = train_on_threads(recipe, 1).value();
    check(recipe, {8, {1, false, {1, 1, 1}}}, eight);
    check(recipe, {2, {4, true, {1, 1, 2}}}, eight);

    recipe = lengthy("gpt", Precision::kF32, 1024);
    recipe.batch = {.samples = 4, .micro = 2, .tokens = 512};  // two parts, then four
    recipe.batch.phases = {{.at = {Span::Unit::kSteps, 2}, .micro = 1, .tokens = 1024}};
    recipe.model.residual_dropout = recipe.model.embedding_dropout = recipe.model.attention_dropout = 0.1;
    const Trained growing = train_on_threads(recipe, 1).value();
    check(recipe, {2, {1, false, {1, 1, 1}}}, growing);
    check(recipe, {2, {2, true, {1, 2, 1}}}, growing);

    recipe = lengthy("gpt", Precision::kF32, 512);
    recipe.model.layers = 1;
    recipe.model.vocab = 140'000;
    recipe.model.tied_embeddings = false;
    recipe.model.head_bias = true;
    recipe.model.width = 32;
    recipe.batch = {.samples = 2, .micro = 2};
    stop_after(recipe, 1);
    recipe.eval = {};
    const Plan plan = make_plan(recipe, 1).value();
    CHECK(stage_dims(plan, plan.rank(0)).logit_rows == 512);  // half of them
    const Trained blocks = train_on_threads(recipe, 1).value();
    check_allocated(plan, blocks);
    check(recipe, {2, {1, false, {1, 1, 1}}}, blocks);
  }

  TEST_CASE("a run goes on with another cp, and the bits are those of never having stopped") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      Recipe recipe = lengthy("llama", precision, 1024);
      recipe.stop = {Span::Unit::kSteps, 8};
      check_turns<CpLayout>(recipe, {{2, {2, true, {1, 1, 1}}},
                                     {1, {1, false, {1, 2, 2}}},
                                     {4, {1, false, {1, 1, 3}}},
                                     {1, {1, false, {1, 1, 0}}}});
    }
  }

  TEST_CASE("context parallelism in this mode takes the memory and moves the bytes that the plan says") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const std::string kind : {"gpt", "llama", "plain odd"}) {
        for (const CpLayout& l :
             {CpLayout{1, {1, false, {1, 1, 0}}}, CpLayout{2, {1, false, {1, 2, 2}}}, CpLayout{2, {2, true, {2, 1, 1}}},
              CpLayout{4, {2, false, {1, 1, 3}, {RecomputeMode::kFull, 1}}}}) {
          if (l.rest.sp && kind == "plain odd") continue;
          Recipe recipe = cut(lengthy(kind, precision, 1024), l);
          stop_after(recipe, 1);
          recipe.eval = {};
          CAPTURE(kind);
          CAPTURE(spelled(l));
          if (l.world() > 1) check_step_traffic(recipe, l.world());
          const Plan plan = make_plan(recipe, l.world()).value();
          check_allocated(plan, train_on_threads(recipe, l.world()).value());
        }
      }
    }
  }

  TEST_CASE("layouts that cannot keep deterministic = \"layout\" are refused") {
    Recipe recipe = base(false, true, Precision::kF32);
    auto plan = make_plan(recipe, 2);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("zero = 1, 2 or 3") != std::string::npos);
    recipe.optimizer.zero = 2;
    recipe.mesh.shard = 2;
    plan = make_plan(recipe, 4);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("accepted: no shard") != std::string::npos);

    recipe = wide("llama", Precision::kF32);
    const auto refused = [&](int64_t tp, const char* why) {
      recipe.mesh.tp = tp;
      const auto made = make_plan(recipe, tp);
      REQUIRE(!made.ok());
      CAPTURE(made.error().message);
      CHECK(made.error().message.find(why) != std::string::npos);
    };
    refused(8, "accepted: tp = 1, 2, 4");  // two ranks would share a key/value head
    recipe.model.ffn = 24;
    refused(2, "accepted: tp = 1, or");
    for (const char* kind : {"odd", "shared"}) {
      recipe = wide(kind, Precision::kF32);
      recipe.mesh.sequence_parallel = true;
      refused(2, "sequence_parallel = false");
    }
    recipe = wide("llama", Precision::kF32);
    recipe.model.moe = {.experts = 4, .top_k = 2};
    refused(2, "model.moe");

    const auto refused_cp = [](Recipe of, int64_t cp, const std::string& why) {
      of.mesh.cp = cp;
      of.optimizer.zero = 1;
      const auto made = make_plan(of, cp);
      REQUIRE(!made.ok());
      CAPTURE(made.error().message);
      CHECK(made.error().message.find(why) != std::string::npos);
    };
    refused_cp(
        base(false, true, Precision::kF32), 2,
        "takes sums over the 16 tokens of a sequence in 1 parts: each is two chunks of a multiple of 128 tokens, "
        "and mesh.cp = 2 does not divide that; accepted: cp = 1, or deterministic = \"run\"");
    const Recipe good = lengthy("gpt", Precision::kF32);
    refused_cp(good, 8, "accepted: cp = 1, 2, or");
    Recipe bad = good;
    bad.batch.phases = {{.at = {Span::Unit::kSteps, 2}, .tokens = 128}};
    refused_cp(bad, 2, "the 128 tokens of a sequence in 1 parts");
    bad = lengthy("llama", Precision::kF32);
    bad.model.moe = {.experts = 4, .top_k = 2};
    refused_cp(bad, 2, "the sums of model.moe for mesh.cp = 2; accepted: cp = 1");
    bad = good;
    bad.model.top_query = true;
    refused_cp(bad, 2, "model.top_query");
    refused_cp(lengthy("odd", Precision::kF32), 2, "model.embed_dim");
    refused_cp(lengthy("shared", Precision::kF32), 2, "parallel_shared");
  }
}
