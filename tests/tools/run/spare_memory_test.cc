#include "tools/run/hosts/spare_memory.h"

#include <doctest/doctest.h>

#include <mutex>
#include <string>
#include <vector>

#include "ckpt/position.h"
#include "ckpt/run_memory.h"
#include "dsl/dsl.h"
#include "tests/tools/run/run_fixture.h"

using namespace cairn;
using namespace cairn::tools;
using cairn::tools::testing::small_plan;

namespace {

HostSegment segment_of(const Plan& plan, int64_t hosts) {
  Recipe recipe = plan.recipe;
  recipe.optimizer.peak_lr = 1e-3;  // as written recipes have them
  recipe.eval.steps = 1;
  HostSegment out;
  out.recipe = dsl::encode_recipe(recipe);
  out.past = ckpt::encode_past(plan.past);
  out.hosts = hosts;
  out.run_id = "run-1";
  out.recipe_json = "{}";
  return out;
}

int64_t bytes_of_place(const Plan& plan, int64_t hosts, int64_t place) {
  const int64_t ranks = plan.mesh.world() / hosts;
  const auto spec = ckpt::arena_spec(plan, {.run_id = "run-1", .recipe_json = "{}"},
                                     ckpt::RankRange{place * ranks, (place + 1) * ranks});
  REQUIRE_OK(spec);
  return ckpt::Arena::total_bytes(spec.value());
}

}  // namespace

TEST_SUITE("tools/run/spare_memory") {
  TEST_CASE("a spare has memory ready for the largest place, once, and again for another number of hosts") {
    const Plan plan = small_plan(4);
    int64_t most = 0;
    for (int64_t place = 0; place < 4; ++place) most = std::max(most, bytes_of_place(plan, 4, place));
    std::mutex mutex;
    std::vector<std::string> said;
    SpareMemory spare([&](const std::string& text) {
      const std::lock_guard lock(mutex);
      said.push_back(text);
    });
    CHECK(spare.take() == nullptr);
    spare.prepare(segment_of(plan, 4), 1, DeviceChoice::kCpu);
    spare.prepare(segment_of(plan, 4), 1, DeviceChoice::kCpu);
    auto ready = spare.take();
    REQUIRE(ready != nullptr);
    CHECK(ready->bytes() == most);
    CHECK(spare.take() == nullptr);

    const Plan fewer = small_plan(2);
    spare.prepare(segment_of(plan, 4), 1, DeviceChoice::kCpu);
    spare.prepare(segment_of(fewer, 2), 1, DeviceChoice::kCpu);
    ready = spare.take();
    REQUIRE(ready != nullptr);
    CHECK(ready->bytes() == std::max(bytes_of_place(fewer, 2, 0), bytes_of_place(fewer, 2, 1)));
    const std::lock_guard lock(mutex);
    CHECK(said.empty());
  }

  TEST_CASE("a segment that makes no sense prepares nothing, and a spare that ends waits for nothing") {
    SpareMemory spare([](const std::string&) {});
    HostSegment segment = segment_of(small_plan(4), 4);
    segment.recipe = "{}";
    spare.prepare(segment, 1, DeviceChoice::kCpu);
    CHECK(spare.take() == nullptr);
    spare.prepare(segment_of(small_plan(4), 4), 1, DeviceChoice::kCpu);
  }
}
