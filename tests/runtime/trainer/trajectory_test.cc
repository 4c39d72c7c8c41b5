// deterministic = "layout": every layout trains as every other does, bit for bit.

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"

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
  recipe.stop = {Span::Unit::kSteps, 4};
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

void same(const Trained& got, const Trained& wanted) {
  CHECK(got.losses == wanted.losses);
  CHECK(got.norms == wanted.norms);
  CHECK(got.source_losses == wanted.source_losses);
  REQUIRE(got.state.size() == wanted.state.size());
  int64_t differing = 0;
  for (const auto& [key, values] : wanted.state) {
    differing += std::memcmp(values.data(), got.state.at(key).data(), values.size() * 4) != 0 ? 1 : 0;
  }
  CHECK(differing == 0);
}

}  // namespace

TEST_SUITE("runtime/trainer/trajectory") {
  TEST_CASE("losses, norms and all state are the same bits in 36 layouts, in float and bf16, tied and not") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const bool llama : {false, true}) {
        const Recipe recipe = base(llama, !llama, precision);
        const auto serial = train_on_threads(recipe, 1);
        REQUIRE_MESSAGE(serial.ok(), serial.error().message);
        int index = 0;
        for (const Layout& layout : kLayouts) {
          // All of them for GPT-2 in float and Llama in bf16; every third for the others.
          if ((llama != (precision == Precision::kBf16)) && index++ % 3 != 0) continue;
          CAPTURE(llama);
          CAPTURE(static_cast<int>(precision));
          CAPTURE(spelled(layout));
          const auto got = train_on_threads(with(recipe, layout), layout.pp * layout.dp);
          REQUIRE_MESSAGE(got.ok(), got.error().message);
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
      REQUIRE_MESSAGE(next.ok(), next.error().message);
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
      const auto trained = train_on_threads(layout, world).value();
      for (int64_t rank = 0; rank < world; ++rank) {
        const RankPlan mine = plan.rank(rank);
        CHECK(trained.allocated_bytes[rank] == mine.weight_bytes + mine.gathered_bytes + mine.grad_bytes +
                                                   mine.optimizer_bytes + largest_stage_buffers_bytes(plan, rank) +
                                                   plan.boundary_buffers_bytes());
      }
    }
  }

  TEST_CASE("with tensor parallelism the same holds among the layouts of one tp") {
    const Recipe recipe = base(true, false, Precision::kBf16);
    const auto cut = [&](int64_t pp, int64_t dp, int zero) {
      Recipe r = with(recipe, {pp, dp, zero});
      r.mesh.tp = 2;
      r.mesh.sequence_parallel = true;
      return train_on_threads(r, 2 * pp * dp).value();
    };
    const Trained one = cut(1, 1, 0);
    same(cut(2, 2, 1), one);
    same(cut(1, 3, 2), one);
    same(cut(4, 1, 0), one);
  }

  TEST_CASE("what cannot keep the promise is refused") {
    Recipe recipe = base(false, true, Precision::kF32);
    auto plan = make_plan(recipe, 2);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("zero = 1, 2 or 3") != std::string::npos);
    recipe.optimizer.zero = 2;
    recipe.mesh.shard = 2;
    plan = make_plan(recipe, 4);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("leave mesh.shard out") != std::string::npos);
  }
}
