// What a step moves, against the sums of the papers. That ranks really move it is seen in runtime/trainer/zero_test.
#include "runtime/plan/communication.h"

#include <doctest/doctest.h>

#include <algorithm>

using namespace cairn;

namespace {

Recipe recipe_of(int zero, int64_t shard = 0) {
  Recipe r;
  r.name = "traffic";
  r.stop = {Span::Unit::kSteps, 10};
  r.model = {.layers = 6, .width = 32, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64, .context = 16, .vocab = 64};
  r.model.tied_embeddings = false;
  r.batch = {.samples = 16, .micro = 2};
  r.optimizer.zero = zero;
  r.mesh.shard = shard;
  return r;
}

Traffic of(const Plan& plan, std::string_view group, int64_t rank = 0) {
  Traffic out;
  for (const GroupTraffic& told : step_traffic(plan, plan.rank(rank))) {
    if (told.group == group) out = told.traffic;
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/plan/communication") {
  TEST_CASE("dp and ZeRO-1 and -2 move two units of the parameters, ZeRO-3 three (Rajbhandari et al. 2020)") {
    // A unit is every parameter over the wire once, in a ring: an all-reduce is two, a reduce-scatter or an all-gather
    // one. All in float here, one micro-batch on each of four replicas, two samples each.
    const auto units = [](int zero) {
      Recipe recipe = recipe_of(zero);
      recipe.batch.samples = 8;
      const Plan plan = make_plan(recipe, 4).value();
      const Traffic t = of(plan, kDpGroup);
      const auto all = static_cast<double>(plan.rank(0).flat_elems * 4);
      return static_cast<double>(2 * t.all_reduce.bytes + t.reduce_scatter.bytes + 4 * t.all_gather.bytes) / all;
    };
    CHECK(units(0) == 2);
    CHECK(units(1) == 2);
    CHECK(units(2) == 2);
    // Six layers, embedding and head: the embedding, the head and two layers at the turn are not gathered twice.
    Recipe recipe = recipe_of(3);
    recipe.batch.samples = 8;
    const RankPlan rank = make_plan(recipe, 4).value().rank(0);
    const auto layer = static_cast<double>(rank.units[1].range.size()), all = static_cast<double>(rank.flat_elems);
    CHECK(units(3) == doctest::Approx(2 + 4 * layer / all));
    recipe.optimizer.keep_after_forward = true;
    const Plan kept = make_plan(recipe, 4).value();
    CHECK(of(kept, kDpGroup).all_gather.bytes == kept.rank(0).shard_elems * 4);
  }

  TEST_CASE("ZeRO-2 and -3 reduce after each micro-batch, ZeRO-0 and -1 once a step") {
    for (const int zero : {0, 1, 2, 3}) {
      const Plan plan = make_plan(recipe_of(zero), 2).value();
      REQUIRE(plan.micro_batches == 4);
      const Traffic t = of(plan, kDpGroup);
      const int64_t sums = plan.rank(0).flat_elems * 4;
      CHECK(t.all_reduce.bytes == (zero == 0 ? sums : 0));
      CHECK(t.reduce_scatter.bytes == (zero == 0 ? 0 : zero == 1 ? sums : 4 * sums));
    }
  }

  TEST_CASE("shard groups reduce and gather inside and add their shards up once") {
    const Plan plan = make_plan(recipe_of(1, 2), 8).value();
    const RankPlan rank = plan.rank(3);
    CHECK(rank.shard_elems * 2 == rank.flat_elems);
    CHECK(of(plan, kDpGroup, 3) == Traffic{});
    CHECK(of(plan, kShardGroup, 3).reduce_scatter == Volume{rank.flat_elems * 4, 1});
    CHECK(of(plan, kShardGroup, 3).all_gather == Volume{rank.shard_elems * 4, 1});
    CHECK(of(plan, kReplicaGroup, 3).all_reduce == Volume{rank.shard_elems * 4, 1});
  }

  TEST_CASE("a tied embedding is added up between first and last stage shard by shard") {
    Recipe recipe = recipe_of(1);
    recipe.model.tied_embeddings = true;
    recipe.mesh.pp = 2;
    const Plan plan = make_plan(recipe, 8).value();
    for (const int64_t rank : {0, 1, 2, 3, 4, 5, 6, 7}) {
      CHECK(of(plan, kEmbeddingGroup, rank).all_reduce == Volume{64 * 32 * 4 / 4, 1});
    }
  }

  TEST_CASE("slots: the layers of ZeRO-2 share gradients, those of ZeRO-3 weights too") {
    const Plan one = make_plan(recipe_of(1), 4).value(), two = make_plan(recipe_of(2), 4).value(),
               three = make_plan(recipe_of(3), 4).value();
    const RankPlan r1 = one.rank(1), r2 = two.rank(1), r3 = three.rank(1);
    const int64_t layer = r2.units[1].range.size();
    const int64_t ends = r2.units.front().range.size() + r2.units.back().range.size();
    CHECK(r1.grad_bytes == r1.flat_elems * 4);
    CHECK(r2.grad_bytes == (r2.shard_elems + 2 * layer + ends) * 4);
    CHECK(r2.weight_bytes == r2.flat_elems * 4);
    CHECK(r2.gathered_bytes == 0);
    CHECK(r3.grad_bytes == r2.grad_bytes);
    CHECK(r3.weight_bytes == r3.shard_elems * 4);
    CHECK(r3.gathered_bytes == (2 * layer + ends) * 4);
    for (size_t u = 1; u + 1 < r3.units.size(); ++u) {
      CHECK(r3.units[u].weight_slot == static_cast<int64_t>(u - 1) % 2);
      CHECK(r3.units[u].range.begin % (4 * kAlignElems) == 0);
    }
  }

  TEST_CASE("buckets are 8 Mi elements, or 1 Mi for each of many replicas, or as the recipe says") {
    CHECK(default_bucket_elems(1) == int64_t{8} << 20);
    CHECK(default_bucket_elems(8) == int64_t{8} << 20);
    CHECK(default_bucket_elems(512) == int64_t{512} << 20);
    Recipe recipe = recipe_of(1);
    recipe.optimizer.bucket = 1000;
    const Plan plan = make_plan(recipe, 4).value();
    CHECK(plan.bucket_elems() == 1024);  // a multiple of 16 for each of four
    const RankPlan rank = plan.rank(0);
    CHECK(static_cast<int64_t>(rank.buckets.size()) == (rank.flat_elems + 1023) / 1024);
  }

  TEST_CASE("shard groups that cannot be are refused with those that can") {
    CHECK(make_plan(recipe_of(1, 3), 8).error().message ==
          "mesh.shard = 3 does not divide dp = 8 (dp = world 8 / (tp 1 x pp 1) = 8); accepted: shard 2 or 4");
    CHECK(
        make_plan(recipe_of(0, 2), 8).error().message ==
        "mesh.shard = 2 says over how many ranks ZeRO splits, but optimizer.zero = 0 splits nothing; accepted: zero = "
        "1, 2 or 3, or no shard");
    CHECK(make_plan(recipe_of(1, 1), 8).error().message ==
          "mesh.shard = 1 splits nothing; accepted: shard >= 2, or optimizer.zero = 0 without shard");
    Recipe kept = recipe_of(2);
    kept.optimizer.keep_after_forward = true;
    CHECK(make_plan(kept, 8).error().message ==
          "optimizer.keep_after_forward = true keeps gathered weights, and with optimizer.zero = 2 none are gathered; "
          "accepted: zero = 3, or keep_after_forward = false");
  }
}
