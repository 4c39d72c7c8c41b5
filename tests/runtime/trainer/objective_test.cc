// Objectives and shared key/value heads in training: every layout takes the same way, and says what it moves.

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/plan/communication.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

struct Layout {
  int64_t tp, pp, dp;
  int zero;
  bool sequence_parallel;
  int64_t cp = 1;
};
const std::vector<Layout> kLayouts = {{4, 1, 1, 0, false}, {2, 2, 1, 1, true}, {4, 1, 2, 3, true}, {1, 2, 2, 2, false}};
// Documents end anywhere: within a rank's run of tokens, at its border, over several of them.
const std::vector<Layout> kOverTokens = {
    {1, 1, 1, 0, false, 2}, {2, 1, 1, 1, true, 2}, {1, 2, 1, 0, false, 4}, {1, 1, 2, 3, false, 2}};

Recipe with(Recipe recipe, const Layout& l) {
  recipe.mesh.tp = l.tp;
  recipe.mesh.pp = l.pp;
  recipe.mesh.cp = l.cp;
  recipe.optimizer.zero = l.zero;
  recipe.mesh.sequence_parallel = l.sequence_parallel;
  return recipe;
}

/// 1e-5: float32 sums in another order, as in parity_test.cc.
void check_all_layouts(Recipe base, const std::vector<Layout>& layouts = kLayouts) {
  base.stop = {Span::Unit::kSteps, 8};
  const auto serial = train_on_threads(base, 1);
  REQUIRE_OK(serial);
  for (const Layout& layout : layouts) {
    const int64_t world = layout.tp * layout.pp * layout.dp * layout.cp;
    CAPTURE(layout.tp);
    CAPTURE(layout.pp);
    CAPTURE(layout.dp);
    CAPTURE(layout.cp);
    const Recipe recipe = with(base, layout);
    const auto parallel = train_on_threads(recipe, world);
    REQUIRE_OK(parallel);
    for (size_t k = 0; k < 8; ++k) {
      CHECK(std::abs(parallel.value().losses[k] / serial.value().losses[k] - 1) < 1e-5);
      CHECK(std::abs(parallel.value().norms[k] / serial.value().norms[k] - 1) < 1e-4);
    }
    // The first step's traffic, times the steps: the plan's formula and the communicators' counters.
    const Plan plan = make_plan(recipe, world).value();
    for (int64_t rank = 0; rank < world; ++rank) {
      for (const GroupTraffic& planned : step_traffic(plan, plan.rank(rank))) {
        if (planned.group != kKvGroup) continue;
        bool found = false;
        for (const GroupTraffic& counted : parallel.value().traffic[rank]) {
          if (counted.group != kKvGroup) continue;
          found = true;
          CHECK(counted.traffic.all_reduce.bytes == 8 * planned.traffic.all_reduce.bytes);
          CHECK(counted.traffic.all_reduce.calls == 8 * planned.traffic.all_reduce.calls);
        }
        CHECK(found);
      }
    }
    // Saved once, whatever the copies: the tensors are whole, and a run of one rank goes on from them.
    CHECK(parallel.value().state.size() == 3 * plan.tensors.size());
    base.stop = {Span::Unit::kSteps, 10};
    const auto resumed = train_on_threads(base, 1, &parallel.value());
    const auto straight = train_on_threads(base, 1, &serial.value());
    base.stop = {Span::Unit::kSteps, 8};
    REQUIRE_OK(resumed);
    CHECK(std::abs(resumed.value().losses.back() / straight.value().losses.back() - 1) < 1e-5);
  }
}

}  // namespace

TEST_SUITE("runtime/trainer/objective") {
  TEST_CASE("fewer key/value heads than tensor-parallel ranks train as one rank does") {
    Recipe recipe = tiny_recipe(true, false);
    recipe.model.kv_heads = 2;
    recipe.model.qk_norm = QkNorm::kHead;
    recipe.model.qkv_bias = true;
    check_all_layouts(recipe);
    recipe.model.kv_heads = 1;
    recipe.optimizer.kind = OptimizerKind::kLamb;
    check_all_layouts(recipe);
  }

  TEST_CASE("packed documents train the same under every layout, and their loss is a mean over what counts") {
    for (const bool llama : {false, true}) {
      Recipe recipe = tiny_recipe(llama, !llama);
      recipe.objective.document_end = 3;
      check_all_layouts(recipe);
      check_all_layouts(recipe, kOverTokens);
    }
    Recipe recipe = tiny_recipe(true, false);  // documents and a window; only attention is reset
    recipe.objective.document_end = 3;
    recipe.objective.reset_positions = false;
    recipe.model.sliding_window = 5;
    check_all_layouts(recipe, kOverTokens);
  }

  TEST_CASE("prefixes and gaps train the same under every layout, and resume") {
    Recipe recipe = tiny_recipe(true, false);
    recipe.model.mask = Mask::kPrefix;
    recipe.objective.kind = ObjectiveConfig::Kind::kPrefix;
    check_all_layouts(recipe);
    recipe.objective.kind = ObjectiveConfig::Kind::kInfill;
    recipe.objective.mask_token = 61;
    recipe.objective.gmask_token = 62;
    recipe.objective.start_token = 63;
    recipe.objective.end_token = 64;
    recipe.batch.tokens = 8;
    check_all_layouts(recipe);
    recipe.model.positions = Positions::kLearned;
    recipe.batch.tokens = 0;
    recipe.objective.mask_windows = 2;
    check_all_layouts(recipe);
  }

  TEST_CASE("combinations of objective and model that do not work are refused by name") {
    const auto refusal = [](const auto& change) {
      Recipe recipe = tiny_recipe(true, false);
      recipe.model.mask = Mask::kPrefix;
      recipe.objective.kind = ObjectiveConfig::Kind::kInfill;
      recipe.objective.mask_token = recipe.objective.gmask_token = recipe.objective.start_token =
          recipe.objective.end_token = 64;
      change(recipe);
      const auto plan = make_plan(recipe, 1);
      return plan.ok() ? std::string() : plan.error().message;
    };
    CHECK(refusal([](Recipe&) {}).empty());
    CHECK(refusal([](Recipe& r) { r.model.mask = Mask::kCausal; }).find("model.mask must be prefix") == 0);
    CHECK(refusal([](Recipe& r) { r.objective.end_token = 65; }).find("objective.end_token = 65 is not in [0,") == 0);
    CHECK(refusal([](Recipe& r) { r.objective.mask_token = -1; }).find("objective.mask_token is needed") == 0);
    CHECK(refusal([](Recipe& r) { r.model.positions = Positions::kAlibi; }).find("model.positions = alibi") == 0);
    CHECK(refusal([](Recipe& r) { r.objective.mask_windows = 3; }).find("objective.mask_windows = 3 must cut") == 0);
    CHECK(refusal([](Recipe& r) { r.objective.document_end = 3; }).find("objective.document_end is for") == 0);
    CHECK(refusal([](Recipe& r) { r.mesh.tp = 3; }) != "");
  }
}
