// Times of a training's ops on a device that is a double, whose clock counts pieces of work: one takes a microsecond.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string_view>

#include "tests/runtime/cuda/train/trained_double.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt::testing;
using cairn::testing::Lived;
using cairn::testing::train_on_double;

namespace {

constexpr int64_t kSteps = 5, kMicroBatches = 2, kLayers = 1;

Plan small_plan(int64_t snapshot_steps) {
  Recipe recipe = short_recipe(false, true);
  recipe.model.layers = kLayers;
  recipe.batch = {.samples = kMicroBatches, .micro = 1};
  recipe.device = DeviceChoice::kCuda;
  recipe.checkpoint.snapshot_by = SnapshotBy::kCopy;
  recipe.checkpoint.snapshot_steps = snapshot_steps;
  recipe.stop = {Span::Unit::kSteps, static_cast<double>(kSteps)};
  const auto planned = make_plan(recipe, 1);
  REQUIRE_OK(planned);
  return planned.value();
}

/// Calls and milliseconds of an op of any sizes.
std::pair<int64_t, double> sum_of(const OpTimes& times, std::string_view name) {
  std::pair<int64_t, double> out;
  for (const OpTime& op : times.ops) {
    if (op.name != name) continue;
    out.first += op.calls;
    out.second += op.ms;
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/cuda/train/op_times") {
  TEST_CASE("ops of a step on a device have the device's times, and their sum with the gaps is the step's work") {
    const Plan plan = small_plan(0);
    std::unique_ptr<Lived> life;
    const Told told = train_on_double(plan, 3, {}, nullptr, &life, {.times_ops = true});
    REQUIRE(told.op_times.size() == 1);
    const OpTimes& times = told.op_times.at(0);
    constexpr int64_t kCounted = kSteps - 2;
    CHECK(times.steps == kCounted);
    CHECK(times.left_out == 2);
    for (const OpTime& op : times.ops) {
      CAPTURE(op.name);
      CHECK(op.calls % kCounted == 0);
      CHECK(op.ms > 0);
    }
    CHECK(times.gaps_ms > 0);  // what the host gives is copied in no op
    for (const char* const name : {"attention_forward", "embedding_forward", "cross_entropy"}) {
      CAPTURE(name);
      const auto [calls, ms] = sum_of(times, name);
      CHECK(calls == kCounted * kMicroBatches * kLayers);
    }
    CHECK(sum_of(times, "attention_backward").first + sum_of(times, "attention_backward_sums").first ==
          kCounted * kMicroBatches * kLayers);
    CHECK(sum_of(times, "adamw_of_runs").first == kCounted);
    CHECK(sum_of(times, "adamw_of_runs").second > sum_of(times, "clip_by_norm").second - 1e-6);
    // Forward of attention is one kernel.
    CHECK(sum_of(times, "attention_forward").second == doctest::Approx(kCounted * kMicroBatches * kLayers * 1e-3));
    // Each launch of these steps is in an op or a gap.
    int64_t launches = 0;
    for (int64_t step = 2; step < kSteps; ++step) launches += life->steps.at(static_cast<size_t>(step)).launches;
    CHECK(times.steps_ms() > static_cast<double>(launches) * 1e-3 - 1e-6);
  }

  TEST_CASE("a step that is timed has the bits and the waits of one that is not, beside snapshots too") {
    for (const int64_t snapshot_steps : {0, 1}) {
      CAPTURE(snapshot_steps);
      const Plan plan = small_plan(snapshot_steps);
      std::unique_ptr<Lived> life;
      const auto waits = [&] {
        std::vector<std::pair<int64_t, int64_t>> out;
        for (size_t step = 1; step < life->steps.size(); ++step)
          out.emplace_back(life->own_waits[step], life->steps[step].launches);
        return out;
      };
      const Told plain = train_on_double(plan, 4, {}, nullptr, &life);
      const auto expected = waits();
      const Told timed = train_on_double(plan, 4, {}, nullptr, &life, {.times_ops = true});
      CHECK(plain.op_times.empty());
      CHECK(timed.op_times.at(0).steps == kSteps - 2);
      CHECK(timed.steps == plain.steps);
      CHECK(timed.banks == plain.banks);
      if (snapshot_steps == 0) CHECK(waits() == expected);
    }
  }
}
