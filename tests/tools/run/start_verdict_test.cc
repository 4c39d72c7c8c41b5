#include "tools/run/folder/start_verdict.h"

#include <doctest/doctest.h>

#include "tests/ckpt/plan/layouts.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::tools;

TEST_SUITE("tools/run/start_verdict") {
  TEST_CASE("a run that leaves fp16 keeps the optimizer's count of updates: the steps that were left out stay so") {
    Recipe before = ckpt::testing::plan_of({1, 1, 1}, true).recipe;
    before.stop = {Span::Unit::kSteps, 100};
    before.optimizer.peak_lr = 1e-3;
    before.eval.steps = 1;  // the least that a recipe may say
    before.precision = Precision::kF16;
    const trainer::TrainPosition position{.step = 10, .loss_scale = {.scale = 4, .skipped = 2}};
    for (const Precision precision : {Precision::kF16, Precision::kBf16, Precision::kF32}) {
      Recipe after = before;
      after.precision = precision;
      const Result<Segment> segment = segment_at(after, position, &before);
      REQUIRE_OK(segment);
      // The trainer counts step - skipped - moments_from, and drops `skipped` with the scale.
      CHECK(segment.value().past.moments_from == (precision == Precision::kF16 ? 0 : 2));
    }
  }
}
