// What tp ranks hold alike goes from stage to stage in parts, which are gathered there: the bits of a run whose stages
// are one, with the bytes and the memory of the plan.

#include <doctest/doctest.h>

#include "runtime/plan/boundary.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

struct Layout {
  int64_t tp = 2, pp = 2, dp = 1, cp = 1, ep = 1;
  PipelineKind schedule = PipelineKind::k1F1B;
  int zero = 0;
  int64_t world() const { return tp * pp * dp * cp; }
};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.dp = l.dp;
  recipe.mesh.cp = l.cp;
  recipe.mesh.ep = l.ep;
  recipe.mesh.virtual_stages = l.schedule == PipelineKind::kInterleaved || l.schedule == PipelineKind::kZbV ? 2 : 1;
  recipe.schedule = l.schedule;
  recipe.optimizer.zero = l.zero;
  return recipe;
}

/// Untied, so that no sum is taken in another order by two stages.
Recipe base(Precision precision, bool experts) {
  Recipe recipe = tiny_recipe(experts, false);
  if (experts) recipe.model.moe = {.experts = 6, .top_k = 2, .aux_loss = 0.2, .aux_scope = AuxScope::kModel};
  recipe.precision = precision;
  recipe.batch.samples = 8;
  stop_after(recipe, 4);
  return recipe;
}

std::string spelled(const Layout& l) {
  return fmt::format("tp {} pp {} dp {} cp {} ep {} {} zero {}", l.tp, l.pp, l.dp, l.cp, l.ep,
                     schedule_name(l.schedule), l.zero);
}

const Layout kLayouts[] = {
    {},
    {.schedule = PipelineKind::kGpipe},
    {.schedule = PipelineKind::kInterleaved},
    {.schedule = PipelineKind::kZbH1},
    {.schedule = PipelineKind::kZbV},
    {.tp = 4, .schedule = PipelineKind::kZbV},
    {.tp = 4, .schedule = PipelineKind::kInterleaved},
    {.pp = 4, .zero = 0},
    {.dp = 2, .schedule = PipelineKind::kInterleaved, .zero = 3},
    {.cp = 2, .zero = 1},
    {.cp = 2, .schedule = PipelineKind::kZbV},
};

}  // namespace

TEST_SUITE("runtime/trainer/boundary") {
  TEST_CASE("stages of tensor-parallel ranks have the bits of one stage, in planned memory and traffic") {
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      for (const bool experts : {false, true}) {
        const Recipe recipe = base(precision, experts);
        std::map<std::string, Trained> wholes;  // by all that but the pipeline divides
        for (Layout l : kLayouts) {
          if (experts && l.dp > 1) l.ep = 2;
          CAPTURE(static_cast<int>(precision));
          CAPTURE(experts);
          CAPTURE(spelled(l));
          Layout one = l;
          one.pp = 1;
          one.schedule = PipelineKind::k1F1B;
          const auto [whole, fresh] = wholes.try_emplace(spelled(one));
          if (fresh) {
            auto trained = train_on_threads(with(recipe, one), one.world());
            REQUIRE_OK(trained);
            whole->second = std::move(trained).value();
          }
          Recipe cut = with(recipe, l);
          const Plan plan = make_plan(cut, l.world()).value();
          CHECK(boundary_tensor(plan).parts == l.tp);
          CHECK((boundary_tensor(plan).room_bytes() > plan.boundary_bytes()) == experts);  // 24 bytes of choices
          const auto got = train_on_threads(cut, l.world());
          REQUIRE_OK(got);
          CHECK(got.value().losses == whole->second.losses);
          CHECK(got.value().state == whole->second.state);
          check_allocated(plan, got.value());
          stop_after(cut, 1);
          check_step_traffic(cut, l.world());
        }
      }
    }
  }

  TEST_CASE("a batch that grows has its tensors cut anew, and validation goes through the same stages") {
    Recipe recipe = base(Precision::kBf16, true);
    stop_after(recipe, 4);
    recipe.batch = {.samples = 8, .micro = 1};
    recipe.batch.phases = {{.at = {Span::Unit::kSteps, 2}, .micro = 4}};
    for (DataSource& source : recipe.data.sources) source.valid_path = source.path;
    recipe.eval = {.every_steps = 1, .steps = 2};
    const Trained whole = train_on_threads(with(recipe, {.pp = 1}), 2).value();
    REQUIRE(whole.valid.size() > 0);
    for (const PipelineKind schedule : {PipelineKind::k1F1B, PipelineKind::kZbV, PipelineKind::kInterleaved}) {
      CAPTURE(schedule_name(schedule));
      const auto got = train_on_threads(with(recipe, {.schedule = schedule}), 4);
      REQUIRE_OK(got);
      CHECK(got.value().losses == whole.losses);
      CHECK(got.value().valid == whole.valid);
      CHECK(got.value().state == whole.state);
    }
  }
}
