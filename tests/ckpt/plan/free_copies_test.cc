// Which hosts keep all that another one saves: against the pieces of each rank's state, one by one.
#include "ckpt/plan/free_copies.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "tests/ckpt/plan/layouts.h"

using namespace cairn;
using namespace cairn::ckpt;
using cairn::ckpt::testing::Layout;
using cairn::ckpt::testing::plan_of;

namespace {

using Piece = std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>;

std::set<Piece> pieces_of(const Plan& plan, int64_t rank, bool primary) {
  std::set<Piece> out;
  for (const StatePiece& piece : plan.rank(rank).pieces) {
    if (piece.primary == primary) out.emplace(piece.tensor, piece.box.lo, piece.box.hi);
  }
  return out;
}

/// The ranks of `holder` keep all that those of `place` save, rank by rank.
bool keeps(const Plan& plan, int64_t ranks, int64_t holder, int64_t place) {
  for (int64_t k = 0; k < ranks; ++k) {
    const std::set<Piece> kept = pieces_of(plan, holder * ranks + k, false);
    for (const Piece& piece : pieces_of(plan, place * ranks + k, true)) {
      if (!kept.contains(piece)) return false;
    }
  }
  return true;
}

Plan with_shards(const Layout& layout, int64_t shard, bool tied = true) {
  Recipe recipe = plan_of(layout, tied).recipe;
  recipe.mesh.shard = layout.zero > 0 ? shard : 0;
  return make_plan(recipe, layout.tp * layout.pp * layout.dp).value();
}

}  // namespace

TEST_SUITE("ckpt/plan/free_copies") {
  TEST_CASE("a holder keeps every piece that its ward saves, and where none is named some place has none") {
    std::vector<Plan> plans;
    for (const Layout& layout : ckpt::testing::layouts()) plans.push_back(plan_of(layout, true));
    for (const int zero : {0, 1, 2, 3}) {
      plans.push_back(with_shards({1, 1, 4, zero}, 2, zero < 3));
      plans.push_back(with_shards({2, 1, 4, zero}, 2, zero < 3));
      plans.push_back(with_shards({1, 1, 8, zero}, 4, zero < 3));
      plans.push_back(with_shards({1, 2, 6, zero}, 2, zero < 3));
    }
    for (const int64_t ep : {2, 4}) {  // of experts there are two copies, or one
      Recipe recipe = plan_of({1, 1, 4, 0}, true).recipe;
      recipe.model.activation = Activation::kSwiGlu;
      recipe.model.mlp_bias = false;
      recipe.model.moe = {.experts = 4, .top_k = 2};
      recipe.mesh.ep = ep;
      plans.push_back(make_plan(recipe, 4).value());
      CHECK(free_holders(plans.back(), 4).empty() == (ep == 4));
    }
    int64_t free = 0, none = 0;
    for (const Plan& plan : plans) {
      for (int64_t hosts = 2; hosts <= plan.mesh.world(); ++hosts) {
        if (plan.mesh.world() % hosts != 0) continue;
        CAPTURE(plan.mesh.describe());
        CAPTURE(plan.zero());
        CAPTURE(hosts);
        const int64_t ranks = plan.mesh.world() / hosts;
        const std::vector<int64_t> holders = free_holders(plan, hosts);
        if (holders.empty()) {
          ++none;
          bool lacks = false;  // a place that nobody else keeps
          for (int64_t place = 0; place < hosts; ++place) {
            bool kept = false;
            for (int64_t other = 0; other < hosts; ++other)
              kept = kept || (other != place && keeps(plan, ranks, other, place));
            lacks = lacks || !kept;
          }
          CHECK(lacks);
          continue;
        }
        ++free;
        CHECK(std::set<int64_t>(holders.begin(), holders.end()).size() == static_cast<size_t>(hosts));
        for (int64_t place = 0; place < hosts; ++place) {
          CHECK(holders[place] != place);
          CHECK(keeps(plan, ranks, holders[place], place));
        }
      }
    }
    CHECK(free > 10);
    CHECK(none > 10);
  }

  TEST_CASE("the holder is half the way round among those that keep the same") {
    CHECK(free_holders(with_shards({1, 1, 4, 0}, 0), 4) == std::vector<int64_t>{2, 3, 0, 1});
    // Two groups of two hosts: the twin in the other group. Three groups: the next one's.
    CHECK(free_holders(with_shards({1, 1, 4, 1}, 2), 4) == std::vector<int64_t>{2, 3, 0, 1});
    CHECK(free_holders(with_shards({1, 1, 6, 1}, 2), 6) == std::vector<int64_t>{2, 3, 4, 5, 0, 1});
    CHECK(free_holders(with_shards({1, 1, 4, 1}, 0), 4).empty());
  }

  TEST_CASE("averages, state of a device and banks that are copies are kept by who saves them alone") {
    const Plan plan = with_shards({1, 1, 4, 0}, 0);
    REQUIRE_FALSE(free_holders(plan, 4).empty());
    CHECK(free_holders(plan, 1).empty());
    Plan other = plan;
    other.recipe.optimizer.ema = 0.99;
    CHECK(free_holders(other, 4).empty());
    other = plan;
    other.recipe.checkpoint.snapshot_by = SnapshotBy::kCopy;
    CHECK(free_holders(other, 4).empty());
    other = plan;
    other.recipe.device = DeviceChoice::kCuda;
    CHECK(free_holders(other, 4).empty());
  }
}
