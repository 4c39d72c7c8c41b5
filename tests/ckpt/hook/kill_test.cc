// Real training on the banks of an arena, cut off in the middle of an update, of the gathers behind it, of the making
// of weights after such a kill: what goes on from there is the run that nobody touched, bit for bit.

#include "tests/ckpt/hook/mortal_run.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;

namespace {

void check_killed(const Recipe& recipe, int64_t world) {
  const auto planned = make_plan(recipe, world);
  REQUIRE_OK(planned);
  const Plan& plan = planned.value();
  const Told untouched = train(plan, {});
  REQUIRE(untouched.steps.size() == 7);
  std::vector<std::pair<int64_t, bool>> from;
  const Told killed = train(plan,
                            std::vector<Death>{{Moment::kUpdated, 2, world - 1},
                                               {Moment::kForward, 2, 0},  // while the weights are made
                                               {Moment::kBegun, 3, 0},
                                               {Moment::kForward, 3, world - 1},
                                               {Moment::kGathering, 4, world - 1},
                                               {Moment::kUpdated, 6, 0}},
                            &from);
  const bool gathers = plan.shard_size() > 1 && plan.zero() < 3;  // else the weights were whole before the snapshot
  const std::vector<int64_t> steps = {1, 1, 2, 2, gathers ? 4 : 3, 5};
  for (size_t life = 0; life < steps.size(); ++life) {
    CAPTURE(life);
    CHECK(from.at(life) == std::pair(steps[life], false));
  }
  CHECK(killed.steps == untouched.steps);
  CHECK(killed.banks == untouched.banks);
}

/// State that replicas keep of each other: after a kill it is read where it is saved, by the first update of a life.
void check_copies(const Recipe& recipe, int64_t world, int64_t skipped = 0) {
  const auto planned = make_plan(recipe, world);
  REQUIRE_OK(planned);
  const Plan& plan = planned.value();
  int64_t copied = 0;
  for (int64_t rank = 0; rank < world; ++rank) copied += plan.rank(rank).private_bytes();
  REQUIRE(copied > 0);

  const Told untouched = train(plan, {});
  const auto alone = test::train_on_threads(recipe, world);  // there each rank fills its own copies
  REQUIRE_OK(alone);
  REQUIRE(untouched.steps.size() == alone.value().losses.size());
  for (const auto& [step, told] : untouched.steps) CHECK(told.first == alone.value().losses[step - 1]);
  CHECK(alone.value().position.loss_scale.skipped == skipped);

  const int64_t published = recipe.checkpoint.snapshot_steps == 1 ? 3 : 4;
  const Told killed =
      train(plan, std::vector<Death>{{Moment::kForward, 3, 0},          // of a life's third step
                                     {Moment::kForward, 3, world - 1},  // of its first: nothing is copied
                                     {Moment::kBegun, 3, world - 1},    // some have, their banks are torn
                                     {Moment::kUpdated, published, 0},  // all have, and nobody knows
                                     {Moment::kBegun, 5, 0},
                                     {Moment::kForward, 6, world - 1}});
  CHECK(killed.steps == untouched.steps);
  CHECK(killed.banks == untouched.banks);
}

}  // namespace

TEST_SUITE("ckpt/hook/kill") {
  TEST_CASE("killed inside an update, and again while weights are made anew: the same bits under every ZeRO stage") {
    for (const int zero : {0, 1, 2, 3}) {
      for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
        CAPTURE(zero);
        CAPTURE(precision == Precision::kBf16);
        Recipe recipe = short_recipe(zero % 2 == 0, zero % 2 != 0);
        recipe.precision = precision;
        recipe.optimizer.zero = zero;
        check_killed(recipe, 2);
      }
    }
  }

  TEST_CASE(
      "kills inside an update resume to the same bits with tp, pp, tied embeddings, shard groups, one rank, without "
      "overlap") {
    for (const Case& c : {Case{"one rank", 1, 1, 1, 0}, Case{"tp", 2, 1, 1, 0}, Case{"pp, tied", 1, 2, 1, 0},
                          Case{"all", 2, 2, 2, 1}, Case{"all, ZeRO-3", 2, 2, 2, 3, 0, false},
                          Case{"shard groups", 1, 1, 4, 2, 2}, Case{"no overlap", 1, 1, 2, 1, 0, true, false}}) {
      CAPTURE(c.name);
      check_killed(c.recipe(), c.world());
    }
  }

  TEST_CASE(
      "kills inside an update resume to the same bits with averaged weights, QK clip, Adafactor, experts and a loss "
      "scale") {
    for (const char* what : {"average", "clip", "Adafactor", "experts", "fp16", "layout"}) {
      CAPTURE(what);
      const std::string_view name = what;
      Recipe recipe = short_recipe(true, false);
      recipe.optimizer.zero = 1;
      if (name == "average") recipe.optimizer.ema = 0.9;
      if (name == "clip") recipe.optimizer.qk_clip = 0.01;
      if (name == "Adafactor") recipe.optimizer.kind = OptimizerKind::kAdafactor;
      if (name == "experts") recipe.model.moe = {.experts = 4, .top_k = 2};
      if (name == "fp16") recipe.precision = Precision::kF16;
      if (name == "layout") recipe.deterministic = Deterministic::kLayout;
      check_killed(recipe, 2);
    }
  }

  TEST_CASE("state kept for other replicas is read where they save it, until an update has put it in its place") {
    for (const Case& c :
         {Case{"dp", 1, 1, 2, 0}, Case{"tp", 2, 1, 2, 0}, Case{"pp, tied", 1, 2, 2, 0}, Case{"groups", 1, 1, 4, 1, 2},
          Case{"groups, ZeRO-2", 1, 1, 4, 2, 2}, Case{"groups, ZeRO-3", 1, 1, 4, 3, 2, false},
          Case{"no overlap", 1, 1, 2, 0, 0, true, false}}) {
      CAPTURE(c.name);
      check_copies(c.recipe(), c.world());
    }
  }

  TEST_CASE(
      "state kept for other replicas is read where they save it with every optimizer, on a disk, with skipped steps") {
    for (const char* what : {"bf16", "average", "clip", "LAMB", "Adafactor", "experts", "ep", "disk", "now and then",
                             "fp16", "skips", "skips now and then"}) {
      CAPTURE(what);
      const std::string_view name = what;
      const TempDir disk;
      Recipe recipe = short_recipe(true, false);
      int64_t world = 2, skipped = 0;
      if (name == "bf16") recipe.precision = Precision::kBf16;
      if (name == "average") recipe.optimizer.ema = 0.9;
      if (name == "clip") recipe.optimizer.qk_clip = 0.01;
      if (name == "LAMB") recipe.optimizer.kind = OptimizerKind::kLamb;
      if (name == "Adafactor") recipe.optimizer.kind = OptimizerKind::kAdafactor;
      if (name == "experts" || name == "ep") recipe.model.moe = {.experts = 4, .top_k = 2};
      if (name == "ep") {
        recipe.mesh.ep = 2;
        world = 4;
      }
      if (name == "disk") recipe.optimizer.offload = disk.path;
      if (name.ends_with("now and then")) recipe.checkpoint.snapshot_steps = 2;
      if (name == "fp16" || name.starts_with("skips")) recipe.precision = Precision::kF16;
      if (name.starts_with("skips")) {
        recipe.loss_scale = {.initial = 0x1p24, .hysteresis = 1};
        skipped = 4;
      }
      check_copies(recipe, world, skipped);
    }
  }
}
