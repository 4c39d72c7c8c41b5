// batch.uneven: a batch that the replicas do not divide trains as on one rank, with the same bits where layouts have
// them, in the memory and with the traffic planned.
//
// Tolerance: as in matrix_test.cc.

#include <doctest/doctest.h>

#include <algorithm>

#include "runtime/plan/recipe_rules.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

constexpr int64_t kSteps = 3;

struct Layout {
  int64_t tp = 1, pp = 1, dp = 1, cp = 1, micro = 1;
  int zero = 0;
  PipelineKind schedule = PipelineKind::k1F1B;
  RecomputeMode recompute = RecomputeMode::kNone;
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.dp = l.dp;
  recipe.mesh.cp = l.cp;
  recipe.batch.micro = l.micro;
  recipe.schedule = l.schedule;
  recipe.recompute.mode = l.recompute;
  recipe.optimizer.zero = l.zero;
  return recipe;
}

Trained train(const Recipe& recipe, const Layout& l) {
  const int64_t world = l.tp * l.pp * l.dp * l.cp;
  const Recipe cut = with(recipe, l);
  auto out = train_on_threads(cut, world);
  REQUIRE_OK(out);
  check_allocated(make_plan(cut, world).value(), out.value());
  return std::move(out).value();
}

Recipe uneven_recipe() {
  Recipe recipe = tiny_recipe(false, true);
  recipe.model.head_dim = 16;  // deterministic = "layout" sums over channels and tokens in parts
  recipe.model.context = 512;
  recipe.batch.samples = 8;
  recipe.batch.uneven = true;
  stop_after(recipe, kSteps);
  return recipe;
}

}  // namespace

TEST_SUITE("runtime/trainer/uneven") {
  TEST_CASE("replicas that do not divide the batch train as one rank does") {
    Recipe recipe = uneven_recipe();
    recipe.model.context = 16;
    const Trained serial = train(recipe, {});
    for (const Layout& layout : std::vector<Layout>{
             {.dp = 3},
             {.dp = 5, .zero = 1},
             {.dp = 3, .micro = 2, .zero = 2},  // a round of which one replica has nothing
             {.dp = 3, .micro = 3, .zero = 3},  // and one that has a part
             {.tp = 2, .dp = 3, .zero = 2, .recompute = RecomputeMode::kFull},
             {.pp = 2, .dp = 3, .zero = 1},
             {.pp = 2, .dp = 3, .schedule = PipelineKind::kZbH1},
             {.dp = 3, .cp = 2, .zero = 3},
         }) {
      CAPTURE(layout.dp);
      CAPTURE(layout.zero);
      CAPTURE(layout.micro);
      const Trained got = train(recipe, layout);
      for (size_t step = 0; step < kSteps; ++step) {
        CHECK(got.losses[step] == doctest::Approx(serial.losses[step]).epsilon(1e-5));
        CHECK(got.norms[step] == doctest::Approx(serial.norms[step]).epsilon(1e-4));
      }
    }
    Recipe one = with(recipe, {.dp = 3, .zero = 2});
    one.stop.value = 1;
    check_step_traffic(one, 3);
  }

  TEST_CASE("with deterministic = \"layout\" they have its bits, dropout and masked losses included") {
    Recipe recipe = uneven_recipe();
    recipe.deterministic = Deterministic::kLayout;
    recipe.model.residual_dropout = 0.1;
    recipe.objective.document_end = 3;
    recipe.objective.reset_attention = true;
    for (const int64_t micro : {1, 3}) {
      CAPTURE(micro);
      const Trained serial = train(recipe, {.micro = micro});
      for (const Layout& layout : std::vector<Layout>{{.dp = 3, .micro = micro, .zero = 1},
                                                      {.dp = 2, .micro = micro, .zero = 2},
                                                      {.tp = 2, .dp = 3, .micro = micro, .zero = 3}}) {
        CAPTURE(layout.zero);
        const Trained got = train(recipe, layout);
        CHECK(got.losses == serial.losses);
        CHECK(got.norms == serial.norms);
        CHECK(got.state == serial.state);
      }
    }
  }

  TEST_CASE("a batch that grows by a ragged round trains as on one rank, in the memory that was planned") {
    Recipe recipe = uneven_recipe();
    recipe.model.context = 16;
    struct Growth {
      int64_t from, to, by;  // by > 0: a ramp, an increment a step
      std::vector<Layout> layouts;
    };
    const std::vector<Growth> growths = {
        {4, 5, 0, {{.pp = 2, .dp = 2, .micro = 2}, {.pp = 2, .dp = 2, .micro = 2, .zero = 1}}},
        {4, 7, 0, {{.pp = 2, .dp = 2, .micro = 2, .zero = 3, .schedule = PipelineKind::kGpipe}}},
        {4, 6, 1, {{.pp = 4, .dp = 2, .micro = 2}, {.pp = 2, .dp = 2, .micro = 2, .schedule = PipelineKind::kZbH1}}},
        {9, 12, 0, {{.pp = 2, .dp = 3, .micro = 3, .zero = 2}, {.dp = 3, .micro = 3, .zero = 3}}},
        {9, 16, 0, {{.pp = 2, .dp = 3, .micro = 3, .schedule = PipelineKind::kZbH1}}},
        {5, 4, 0, {{.pp = 2, .dp = 2, .micro = 2, .zero = 1, .schedule = PipelineKind::kGpipe}}},
    };
    for (const Growth& growth : growths) {
      CAPTURE(growth.from);
      CAPTURE(growth.to);
      recipe.batch.samples = growth.by > 0 ? growth.to : growth.from;
      recipe.batch.phases.clear();
      recipe.batch.ramp = {};
      if (growth.by > 0) {
        const auto steps = static_cast<double>((growth.to - growth.from) / growth.by);
        recipe.batch.ramp = {.from = growth.from, .by = growth.by, .over = {Span::Unit::kSteps, steps}};
      } else {
        recipe.batch.phases = {{.at = {Span::Unit::kSteps, 1}, .samples = growth.to}};
      }
      const Trained serial = train(recipe, {});
      for (const Layout& layout : growth.layouts) {
        CAPTURE(layout.pp);
        CAPTURE(layout.zero);
        CAPTURE(schedule_name(layout.schedule));
        const Trained got = train(recipe, layout);
        for (size_t step = 0; step < kSteps; ++step) {
          CHECK(got.losses[step] == doctest::Approx(serial.losses[step]).epsilon(1e-5));
          CHECK(got.norms[step] == doctest::Approx(serial.norms[step]).epsilon(1e-4));
        }
      }
    }
  }

  TEST_CASE("too few micro-batches for the replicas are refused, and experts") {
    Recipe recipe = uneven_recipe();
    const auto refused = make_plan(with(recipe, {.dp = 5, .micro = 2}), 5);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().message.find("batch.samples = 8 makes 4 micro-batches of 2, too few for dp 5") == 0);
    recipe.model.moe = {.experts = 4, .top_k = 2};
    const std::vector<Mistake> found = find_mistakes(recipe, 1);
    CHECK(std::ranges::any_of(found, [](const Mistake& one) { return one.field == "batch.uneven"; }));
  }
}
