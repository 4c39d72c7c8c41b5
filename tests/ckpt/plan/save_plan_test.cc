#include "ckpt/plan/save_plan.h"

#include <doctest/doctest.h>

#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;
using cairn::ckpt::testing::layouts;
using cairn::ckpt::testing::plan_of;

TEST_SUITE("ckpt/plan/save_plan") {
  TEST_CASE("slots hold each element of each kind once, in order, large boxes on their own page") {
    for (const bool tied : {true, false}) {
      for (const auto& layout : layouts()) {
        const Plan plan = plan_of(layout, tied);
        int64_t payload = 0, rank = 0;
        for (const SlotLayout& slot : slot_layouts(plan)) {
          int64_t end = 0;
          for (const SlotShard& shard : slot.shards) {
            REQUIRE(shard.offset >= end);
            REQUIRE(shard.offset % (shard.bytes >= kPagedShardBytes ? kPageBytes : kPackedAlign) == 0);
            REQUIRE(shard.bytes == shard.box.count_elems() * 4);
            end = shard.offset + shard.bytes;
            payload += shard.bytes;
          }
          REQUIRE(slot.bytes >= end);
          REQUIRE(slot.bytes % kPageBytes == 0);
          REQUIRE(slot.bytes == plan.rank(rank++).bank_bytes());
        }
        CHECK(payload == plan.checkpoint_bytes);
      }
    }
  }

  TEST_CASE("the skeleton is a valid manifest once files and shards are in it") {
    const Plan plan = plan_of({2, 2, 2}, true);
    RunText run{.run_name = "synthetic", .run_id = "run-1", .recipe_json = "{\"a\":1}", .recipe_hash = "abc"};
    Manifest manifest = slot_manifest(plan, slot_layouts(plan), run, 4096);
    const Status valid = validate_manifest(manifest);
    CHECK_OK(valid);
    CHECK(manifest.mesh.world == 8);
    CHECK(manifest.tensors[StateIndex(plan).at(2, 1)].kind == "exp_avg_sq");
    CHECK(manifest.tensors[StateIndex(plan).at(2, 1)].name == plan.tensors[1].name);
    CHECK(decode_manifest(encode_manifest(manifest).value()).value() == manifest);
  }

  TEST_CASE("layout hashes tell layouts apart, and only layouts") {
    const auto hash = [](const ckpt::testing::Layout& layout, bool tied) {
      const Plan plan = plan_of(layout, tied);
      return layout_hash(plan, slot_layouts(plan));
    };
    CHECK(hash({2, 1, 2}, true) == hash({2, 1, 2}, true));
    CHECK(hash({2, 1, 2, 0}, true) == hash({2, 1, 2, 1}, true));  // ZeRO changes nothing that is saved
    CHECK(hash({2, 1, 2}, true) != hash({2, 1, 2}, false));
    CHECK(hash({2, 1, 2}, true) != hash({2, 2, 1}, true));
    CHECK(hash({2, 1, 2}, true) != hash({2, 1, 2, 1, {MeshAxis::kDp, MeshAxis::kTp, MeshAxis::kPp}}, true));
  }
}
