#include "runtime/trainer/kept_norms.h"

#include <doctest/doctest.h>

#include <numeric>

#include "runtime/plan/activations.h"
#include "tests/runtime/trainer/harness.h"
#include "tests/runtime/trainer/plan_check.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::test;

namespace {

/// A device of which nothing is asked but how large it is.
class SizedMachine final : public Machine {
 public:
  static constexpr int64_t kOwn = 1000;  // beside a rank's blocks
  explicit SizedMachine(int64_t memory_bytes) : memory_bytes_(memory_bytes) {}
  int64_t memory_bytes() const override { return memory_bytes_; }
  int64_t bytes_for(std::span<const int64_t> blocks, const WorkShapes&) const override {
    return std::accumulate(blocks.begin(), blocks.end(), kOwn);
  }
  Device device() const override { return {}; }
  Stream& stream() override { return *stream_; }
  Status reserve(std::span<const int64_t>, const WorkShapes&) override { return {}; }
  Status allow(const WorkShapes&) override { return {}; }
  Result<std::unique_ptr<DeviceLink>> make_link() override { return Error{ErrorCode::kUnsupported, "no link"}; }

 private:
  int64_t memory_bytes_;
  std::unique_ptr<Stream> stream_ = make_cpu_stream();
};

Plan plan_of(const Recipe& recipe) {
  return make_plan(recipe, recipe.mesh.tp * recipe.mesh.pp * recipe.mesh.cp).value();
}

}  // namespace

TEST_SUITE("runtime/trainer/kept_norms") {
  TEST_CASE("norms are kept where a rank's part of its device has room for all, to the byte") {
    Recipe recipe = tiny_recipe(false, true);
    recipe.mesh.pp = 2;
    const Plan plan = plan_of(recipe);
    for (const int64_t rank : {0, 1}) {
      const RankPlan mine = plan.rank(rank);
      const int64_t more = kept_norms_bytes(plan, rank);
      REQUIRE(more > 0);
      const int64_t wanted = mine.weight_bytes + mine.gathered_bytes + mine.grad_bytes + mine.optimizer_bytes +
                             largest_stage_buffers_bytes(plan, rank) + plan.boundary_buffers_bytes() + more +
                             SizedMachine::kOwn + kDeviceReserveBytes;
      CHECK(trainer::norms_fit(plan, rank, SizedMachine(wanted), 1));
      CHECK_FALSE(trainer::norms_fit(plan, rank, SizedMachine(wanted - 1), 1));
      CHECK(trainer::norms_fit(plan, rank, SizedMachine(3 * wanted), 3));
      CHECK_FALSE(trainer::norms_fit(plan, rank, SizedMachine(3 * wanted - 1), 3));
      CHECK_FALSE(trainer::norms_fit(plan, rank, SizedMachine(0), 1));  // it does not say
    }
  }

  TEST_CASE("runs that keep norms have the bits of those that do not, in memory that the plan counts") {
    struct Layout {
      int64_t tp = 1, pp = 1, cp = 1;
      bool sequence_parallel = false;
      RecomputeConfig recompute = {};
      PipelineKind schedule = PipelineKind::k1F1B;
      BlockKind block = BlockKind::kPreNorm;
      int zero = 0;
      int64_t dp = 1;
    };
    const Layout layouts[] = {
        {},
        {.tp = 2, .sequence_parallel = true},
        {.pp = 2, .schedule = PipelineKind::kZbH1},
        {.cp = 2},
        {.recompute = {RecomputeMode::kFull}},
        {.tp = 2, .pp = 2, .recompute = {RecomputeMode::kFull, 1, true}, .schedule = PipelineKind::kZbH1},
        {.tp = 2, .recompute = {RecomputeMode::kSelective}},
        {.block = BlockKind::kPostNorm},
        {.block = BlockKind::kParallelShared},
        {.zero = 3, .dp = 2},
    };
    for (const bool llama : {false, true}) {
      for (const Layout& layout : layouts) {
        Recipe recipe = tiny_recipe(llama, !llama);
        stop_after(recipe, 3);
        recipe.batch = {.samples = 4, .micro = 1};
        recipe.precision = Precision::kBf16;
        recipe.mesh.tp = layout.tp;
        recipe.mesh.pp = layout.pp;
        recipe.mesh.cp = layout.cp;
        recipe.mesh.sequence_parallel = layout.sequence_parallel;
        recipe.recompute = layout.recompute;
        recipe.schedule = layout.schedule;
        recipe.model.block = layout.block;
        recipe.optimizer.zero = layout.zero;
        const int64_t world = layout.tp * layout.pp * layout.cp * layout.dp;
        CAPTURE(llama);
        CAPTURE(&layout - layouts);
        Plan plan = make_plan(recipe, world).value();
        const auto again = train_on_threads(recipe, world);
        const auto kept = train_on_threads(recipe, world, nullptr, 0, {}, 0, nullptr, {.keeps_norms = true});
        plan.keeps_norms = true;
        REQUIRE_OK(again);
        REQUIRE_OK(kept);
        CHECK(kept.value().losses == again.value().losses);
        CHECK(kept.value().state == again.value().state);
        check_allocated(plan, kept.value());
        CHECK(kept.value().allocated_bytes[0] == again.value().allocated_bytes[0] + kept_norms_bytes(plan, 0));
      }
    }
  }
}
