// The shared memory that ranks of a plan get: a stage that computes sends nothing, so what it has sent must be out.

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/runtime/trainer/harness.h"

using namespace cairn;

namespace {

Recipe piped(PipelineKind kind, int64_t pp, int64_t stages, int64_t micro_batches, int64_t group = 0) {
  Recipe r = test::tiny_recipe(false, false);
  r.model.layers = pp * stages;
  r.schedule = kind;
  r.mesh.pp = pp;
  r.mesh.virtual_stages = stages;
  r.mesh.micro_batch_group = group;
  r.batch = {.samples = 64 * micro_batches, .micro = 64};  // boundary tensors of 128 KiB
  return r;
}

/// Rank 0 sends to rank 1, which takes nothing: how many of `count` messages go, the last one's wait included.
int64_t sent(const comm::ShmWorldConfig& config, int64_t bytes, int64_t count) {
  comm::ThreadWorld world(config, {.deadline_ms = 300});
  const auto engine = world.engine(0);
  std::vector<int64_t> all(config.world_size);
  std::iota(all.begin(), all.end(), 0);
  const auto group = std::move(engine->group("pp", all)).value();
  const std::vector<std::byte> message(bytes);
  for (int64_t k = 0; k < count; ++k) {
    REQUIRE(group->isend(message.data(), bytes, 1, "activations").ok());
    if (!group->wait_sends("test").ok()) return k;
  }
  return count;
}

/// An engine that does not promise the order of ranks.
class AnyOrder final : public comm::Engine {
 public:
  explicit AnyOrder(std::unique_ptr<comm::Engine> inner) : inner_(std::move(inner)) {}
  int64_t world_rank() const override { return inner_->world_rank(); }
  int64_t world_size() const override { return inner_->world_size(); }
  bool keeps_rank_order() const override { return false; }
  Result<std::unique_ptr<comm::Comm>> group(std::string_view axis, const std::vector<int64_t>& ranks) override {
    return inner_->group(axis, ranks);
  }
  void abort(std::string_view reason) override { inner_->abort(reason); }
  void give_up(ErrorCode code, std::string_view reason) override { inner_->give_up(code, reason); }

 private:
  std::unique_ptr<comm::Engine> inner_;
};

}  // namespace

TEST_SUITE("runtime/trainer/world") {
  TEST_CASE("all boundary tensors that a schedule has under way leave their sender at once") {
    for (const Recipe& recipe : {piped(PipelineKind::k1F1B, 2, 1, 4), piped(PipelineKind::kZbH1, 3, 1, 6),
                                 piped(PipelineKind::kZbV, 2, 2, 4), piped(PipelineKind::kInterleaved, 2, 2, 8, 8)}) {
      CAPTURE(schedule_name(recipe.schedule));
      const Plan plan = make_plan(recipe, recipe.mesh.pp).value();
      const BoundaryBuffers buffers = boundary_buffers(plan.schedule());
      const int64_t under_way = std::max<int64_t>({2, buffers.activations, buffers.gradients});
      CHECK(sent(trainer::world_config(plan), plan.boundary_bytes(), under_way) == under_way);
    }
  }

  TEST_CASE("the largest micro-batch of the run counts, whenever it comes") {
    Recipe recipe = piped(PipelineKind::k1F1B, 2, 1, 8);
    recipe.batch.phases = {{.at = {Span::Unit::kSteps, 3}, .micro = 256}, {.at = {Span::Unit::kSteps, 6}, .micro = 64}};
    const Plan plan = make_plan(recipe, 2).value();
    const int64_t bytes = plan.at(1).boundary_bytes();
    REQUIRE(bytes == 4 * plan.boundary_bytes());
    CHECK(sent(trainer::world_config(plan), bytes, 2) == 2);
  }

  TEST_CASE("ranks that send nothing to each other get little") {
    Recipe recipe = test::tiny_recipe(false, false);
    recipe.mesh.tp = 2;
    CHECK(trainer::world_config(make_plan(recipe, 2).value()).channel_bytes <= 64 << 10);
  }

  TEST_CASE("sums that rely on the order of ranks are refused where an engine does not keep it") {
    const auto trained = [](int zero, Deterministic deterministic, int64_t world) {
      Recipe recipe = test::tiny_recipe(false, false);
      test::stop_after(recipe, 1);
      recipe.optimizer.zero = zero;
      recipe.deterministic = deterministic;
      comm::ThreadWorld threads(world);
      return test::train_on_threads(
          recipe, world, nullptr, 0, [&](int64_t rank) -> Result<std::unique_ptr<comm::Engine>> {
            return std::unique_ptr<comm::Engine>(std::make_unique<AnyOrder>(threads.engine(rank)));
          });
    };
    const auto refused = trained(1, Deterministic::kLayout, 2);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::kUnsupported);
    CHECK(refused.error().message.find("deterministic = \"layout\"") != std::string::npos);
    for (const int zero : {1, 2, 3}) CHECK(trained(zero, Deterministic::kRun, 2).ok());
  }
}
