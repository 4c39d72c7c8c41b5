#include "runtime/trainer/replicas.h"

#include <doctest/doctest.h>

#include <string_view>

#include "runtime/trainer/step_guard.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;
using namespace cairn::trainer;

namespace {

struct Layout {
  int64_t dp = 1, tp = 1, pp = 1;
  int zero = 0;
  int64_t shard = 0, ep = 1;
  int64_t world() const { return dp * tp * pp; }
};

Recipe recipe_of(const Layout& layout, int64_t steps = 6) {
  Recipe recipe = tiny_recipe(true, true);
  recipe.mesh.tp = layout.tp;
  recipe.mesh.pp = layout.pp;
  recipe.optimizer.zero = layout.zero;
  recipe.mesh.shard = layout.shard;
  recipe.watch.replica_steps = 2;
  stop_after(recipe, steps);
  return recipe;
}

/// Turns the lowest bit of one weight of `ranks` at step 4, once its passes have read the weights. `tensor`: empty: of
/// the first in memory.
Result<Trained> with_bit_flipped(const Recipe& recipe, int64_t world, const std::vector<int64_t>& ranks,
                                 const std::string& tensor = "") {
  const Plan plan = make_plan(recipe, world).value();
  const auto planted = [&](int64_t rank, int64_t step, const char* phase, std::byte* weights) {
    if (step != 4 || std::string_view(phase) != "replicas compared" || std::ranges::find(ranks, rank) == ranks.end())
      return;
    const RankPlan own = plan.rank(rank);
    const int64_t at = tensor.empty() ? 0 : own.find(plan.tensors, tensor)->offset;
    weights[at * dtype_size_bytes(plan.compute_dtype())] ^= std::byte{1};
  };
  return train_on_threads(recipe, world, nullptr, 0, {}, 2, nullptr, {.on_phase = planted});
}

using Ranks = std::vector<int64_t>;

}  // namespace

TEST_SUITE("runtime/trainer/replicas") {
  TEST_CASE("replicas of a run that is sound are equal in each layout, and to compare them changes no bit") {
    for (const Layout& layout : {Layout{.dp = 2},
                                 {.dp = 4, .zero = 1},
                                 {.dp = 2, .zero = 2},
                                 {.dp = 4, .zero = 3, .shard = 2},
                                 {.tp = 2},
                                 {.dp = 2, .tp = 2, .zero = 1},
                                 {.dp = 2, .pp = 2, .zero = 1}}) {
      CAPTURE(layout.dp);
      CAPTURE(layout.tp);
      CAPTURE(layout.zero);
      Recipe recipe = recipe_of(layout);
      const auto run = train_on_threads(recipe, layout.world());
      REQUIRE_OK(run);
      for (const telemetry::StepMetrics& step : run.value().steps) {
        REQUIRE(step.replicas.has_value() == (step.step % 2 == 0));
        if (!step.replicas) continue;
        CHECK(step.replicas->ranks.empty());
        CHECK(step.replicas->since == std::max<int64_t>(0, step.step - 3));
        CHECK(telemetry::machine_errors(step).empty());
      }
      CHECK(run.value().position.guards.replicated == 5);
      recipe.watch.replica_steps = 0;
      const auto plain = train_on_threads(recipe, layout.world());
      REQUIRE_OK(plain);
      CHECK(plain.value().state == run.value().state);
    }
  }

  TEST_CASE("one bit of one replica's weights is found, and a majority says whose it is") {
    struct Case {
      Layout layout;
      Ranks flipped, named;
      bool tied = false;
      std::string tensor;
    };
    const Case cases[] = {{{.dp = 2}, {1}, {0, 1}, true},
                          {{.dp = 4, .zero = 1}, {2}, {2}},
                          {{.dp = 4, .zero = 3, .shard = 2}, {3}, {1, 3}, true},
                          {{.dp = 4, .zero = 3}, {3}, {}},  // each rank has a part of its own
                          {{.tp = 2}, {1}, {0, 1}, true, "final_norm.weight"},
                          {{.dp = 2, .tp = 2}, {3}, {3}, false, "final_norm.weight"}};
    for (const Case& one : cases) {
      CAPTURE(one.layout.dp);
      CAPTURE(one.layout.tp);
      CAPTURE(one.layout.zero);
      const auto run = with_bit_flipped(recipe_of(one.layout), one.layout.world(), one.flipped, one.tensor);
      REQUIRE_OK(run);
      const telemetry::StepMetrics& step = run.value().steps[3];
      REQUIRE(step.replicas);
      CHECK(step.replicas->ranks == one.named);
      CHECK(step.replicas->tied == one.tied);
      const auto errors = telemetry::machine_errors(step);
      REQUIRE(errors.size() == (one.named.empty() ? 0 : 1));
      if (errors.empty()) continue;
      CHECK(errors[0].kind == "replica");
      CHECK(errors[0].since == 1);
      CHECK(run.value().steps[5].replicas->since == 1);  // of weights that the update has made anew
    }
  }

  TEST_CASE("each group votes for itself, and a tie names all of its largest sides") {
    Recipe recipe = recipe_of({.dp = 4, .pp = 2});
    const Plan plan = make_plan(recipe, 8).value();
    std::vector<ReplicaHashes> hashes(8);
    for (int64_t rank = 0; rank < 8; ++rank)
      hashes[static_cast<size_t>(rank)] = {10 + uint64_t(plan.mesh.coords(rank).pp)};
    CHECK(vote(plan, hashes) == ReplicaVote{});
    const Ranks first = holders(plan, 0, HeldBy::kReplicas),
                last = holders(plan, plan.mesh.world() - 1, HeldBy::kReplicas);
    REQUIRE(first.size() == 4);
    REQUIRE(last.size() == 4);
    auto damaged = hashes;
    damaged[static_cast<size_t>(first[1])][0] = 1;
    CHECK(vote(plan, damaged) == ReplicaVote{.ranks = {first[1]}});
    damaged[static_cast<size_t>(last[0])][0] = 2;
    damaged[static_cast<size_t>(last[1])][0] = 2;
    Ranks all = last;
    all.push_back(first[1]);
    std::ranges::sort(all);
    CHECK(vote(plan, damaged) == ReplicaVote{.ranks = all, .tied = true});
  }
}
