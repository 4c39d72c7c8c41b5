// How much pinned memory communication through the host takes, against what operations of some layouts move. That ranks
// on devices take neither more nor less, in every layout, is seen in tests/runtime/cuda/train/matrix_test.cc.
#include "runtime/trainer/staging_rooms.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "runtime/plan/activations.h"
#include "runtime/plan/communication.h"
#include "runtime/plan/message_order.h"
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
      CHECK(rooms.own_bytes == kNormNumbers * 8);  // which the update's order wants added up
      CHECK(rooms.total_bytes() == StagingRooms::pages(largest) + 3 * StagingRooms::kPage);
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

  TEST_CASE("a run plans for the most rounds of any stage, also where the replicas do not divide the batch") {
    struct Growth {
      int64_t from, to, micro, dp;
    };
    for (const Growth& g :
         {Growth{4, 5, 2, 2}, {4, 7, 2, 2}, {9, 12, 3, 3}, {9, 13, 3, 3}, {8, 9, 2, 2}, {7, 4, 2, 2}, {3, 17, 2, 2}}) {
      for (const PipelineKind kind : {PipelineKind::kGpipe, PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                      PipelineKind::kZbH1, PipelineKind::kZbV}) {
        for (const bool ramp : {false, true}) {
          CAPTURE(g.from);
          CAPTURE(g.to);
          CAPTURE(schedule_name(kind));
          CAPTURE(ramp);
          Recipe recipe = recipe_of();
          recipe.mesh.pp = 2;
          recipe.mesh.dp = g.dp;
          recipe.schedule = kind;
          if (kind == PipelineKind::kInterleaved || kind == PipelineKind::kZbV) recipe.mesh.virtual_stages = 2;
          recipe.batch = {.samples = g.from, .micro = g.micro, .uneven = true};
          if (ramp) {
            recipe.batch.samples = std::max(g.from, g.to);
            recipe.batch.ramp = {.from = std::min(g.from, g.to), .by = 1, .over = {Span::Unit::kSteps, 8}};
          } else {
            recipe.batch.phases = {{.at = {Span::Unit::kSteps, 5}, .samples = g.to}};
          }
          const Result<Plan> made = make_plan(recipe, 2 * g.dp);
          if (!made.ok()) continue;  // interleaved: groups that micro-batches do not fill
          const Plan& plan = made.value();
          int64_t rounds = 0, bytes = 0, messages = 0, ways = 0;
          for (size_t k = 0; k < plan.step_stages.size(); ++k) {
            const Plan then = plan.at(k);
            CHECK(then.micro_batches * g.micro * g.dp >= plan.step_stages[k].samples);
            rounds = std::max(rounds, then.micro_batches);
            bytes = std::max(bytes, stage_buffers_bytes(then, then.rank(0)));
            messages = std::max(messages, boundary_buffers(then.schedule()).activations);
            ways = std::max(ways, message_ways(then.schedule()));
          }
          CHECK(rounds == (std::max(g.from, g.to) + g.micro * g.dp - 1) / (g.micro * g.dp));
          CHECK(largest_stage_buffers_bytes(plan, 0) == bytes);
          CHECK(message_ways(plan) == ways);
          const bool v = kind == PipelineKind::kZbV || kind == PipelineKind::kInterleaved;  // rank 0 has two chunks
          if (!v) CHECK(trainer::staging_rooms(plan, 0).messages == messages);
        }
      }
    }
  }
}
