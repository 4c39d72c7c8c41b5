// How much pinned memory communication through the host takes, against what operations of some layouts move. That ranks
// on devices take neither more nor less, in every layout, is seen in tests/runtime/cuda/train/matrix_test.cc.
#include "runtime/trainer/staging_rooms.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "runtime/plan/schedule.h"

using namespace cairn;

namespace {

constexpr int64_t kRows = 2 * 16, kWidth = 32;

Recipe recipe_of() {
  Recipe r;
  r.name = "staging";
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {
      .layers = 4, .width = kWidth, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64, .context = 16, .vocab = 64};
  r.model.tied_embeddings = false;
  r.batch = {.samples = 16, .micro = 2};
  r.precision = Precision::kBf16;
  return r;
}

StagingRooms rooms_of(const Recipe& recipe, int64_t world, int64_t rank = 0) {
  const auto plan = make_plan(recipe, world);
  REQUIRE(plan.ok());
  return trainer::staging_rooms(plan.value(), rank);
}

}  // namespace

TEST_SUITE("runtime/trainer/staging_rooms") {
  TEST_CASE("a rank alone needs nothing") {
    const StagingRooms rooms = rooms_of(recipe_of(), 1);
    CHECK(rooms.own_bytes == 0);
    CHECK(rooms.lane_bytes == 0);
    CHECK(rooms.messages == 0);
  }

  TEST_CASE("replicas need the largest bucket, in float; where gradients stay divided also the shard that it joins") {
    Recipe recipe = recipe_of();
    recipe.optimizer.bucket = 1024;
    for (const int zero : {0, 1, 2}) {
      CAPTURE(zero);
      recipe.optimizer.zero = zero;
      const Plan plan = make_plan(recipe, 2).value();
      int64_t largest = 0;
      for (const Bucket& bucket : plan.rank(0).buckets) {
        largest = std::max(largest, 4 * (bucket.range.size() + (zero == 2 ? bucket.shard.size() : 0)));
      }
      const StagingRooms rooms = rooms_of(recipe, 2);
      CHECK(rooms.lane_bytes == largest);
      CHECK(rooms.own_bytes == 0);
      CHECK(rooms.total_bytes() == StagingRooms::pages(largest) + 2 * StagingRooms::kPage);
    }
  }

  TEST_CASE("tensor parallel ranks need a micro-batch's rows in the compute type, or their partial gradients") {
    Recipe recipe = recipe_of();
    recipe.mesh.tp = 2;
    const Plan plan = make_plan(recipe, 2).value();
    CHECK(rooms_of(recipe, 2).own_bytes == std::max(kRows * kWidth * 2, plan.rank(0).partial_elems * 4));
  }

  TEST_CASE("pipeline stages need as many messages as their rings have buffers, to each neighbour") {
    Recipe recipe = recipe_of();
    recipe.mesh.pp = 4;
    const Plan plan = make_plan(recipe, 4).value();
    const BoundaryBuffers buffers = boundary_buffers(plan.schedule());
    CHECK(rooms_of(recipe, 4, 0).messages == buffers.activations);
    CHECK(rooms_of(recipe, 4, 1).messages == buffers.activations + buffers.gradients);
    CHECK(rooms_of(recipe, 4, 3).messages == buffers.gradients);
    CHECK(rooms_of(recipe, 4, 1).message_bytes == kRows * kWidth * 2);
    CHECK(rooms_of(recipe, 4, 1).own_bytes == kRows * kWidth * 2);
  }

  TEST_CASE("a batch that grows needs its largest micro-batch's") {
    Recipe recipe = recipe_of();
    recipe.mesh.pp = 2;
    recipe.batch.phases = {{.at = {Span::Unit::kSteps, 5}, .micro = 4}};
    CHECK(rooms_of(recipe, 2).message_bytes == 2 * kRows * kWidth * 2);
  }
}
