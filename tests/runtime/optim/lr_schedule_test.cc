#include "runtime/optim/lr_schedule.h"

#include <doctest/doctest.h>

using namespace cairn;

TEST_SUITE("runtime/optim/lr_schedule") {
  TEST_CASE("warm-up, cosine to a floor, hold") {
    Recipe r;
    r.batch.samples = 4;
    r.model.context = 10;
    r.optimizer.peak_lr = 1.0;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSteps, 10}, 0},
                      {LrStage::Kind::kCosine, {Span::Unit::kSamples, 80}, 0.1},  // 20 steps
                      {LrStage::Kind::kHold, {}, 0}};
    CHECK(optim::learning_rate(r, 1, 100) == doctest::Approx(0.1));
    CHECK(optim::learning_rate(r, 10, 100) == doctest::Approx(1.0));
    CHECK(optim::learning_rate(r, 20, 100) == doctest::Approx(0.55));
    CHECK(optim::learning_rate(r, 30, 100) == doctest::Approx(0.1));
    CHECK(optim::learning_rate(r, 90, 100) == doctest::Approx(0.1));
  }

  TEST_CASE("a lowered rate stays low, comes back in a line, and those that overlap multiply") {
    Recipe r;
    r.batch.samples = 1;
    r.optimizer.peak_lr = 2.0;
    r.watch.lowered_rates = {{.at = 10, .by = 0.5, .over = 5, .back = 5}, {.at = 12, .by = 0.25, .over = 2}};
    const std::vector<std::pair<int64_t, double>> wanted = {{1, 2},     {10, 2},    {11, 1}, {12, 1},
                                                            {13, 0.25}, {14, 0.25}, {15, 1}, {16, 1.2},
                                                            {19, 1.8},  {20, 2},    {21, 2}, {99, 2}};
    for (const auto& [step, rate] : wanted) {
      CAPTURE(step);
      CHECK(optim::learning_rate(r, step, 100) == doctest::Approx(rate));
    }
  }

  TEST_CASE("warm-up, stable, decay: the stage in the middle takes what the others leave") {
    Recipe r;
    r.batch.samples = 1;
    r.optimizer.peak_lr = 2.0;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSteps, 10}, 0},
                      {LrStage::Kind::kHold, {}, 0},
                      {LrStage::Kind::kOneMinusSqrt, {Span::Unit::kFraction, 0.2}, 0.4}};
    CHECK(optim::learning_rate(r, 5, 100) == doctest::Approx(1.0));
    CHECK(optim::learning_rate(r, 80, 100) == 2.0);
    CHECK(optim::learning_rate(r, 85, 100) == doctest::Approx(2.0 - 1.6 * 0.5));
    CHECK(optim::learning_rate(r, 100, 100) == doctest::Approx(0.4));
  }

  TEST_CASE("spans in samples follow the samples: a batch ramp does not bend the curve") {
    // BLOOM's public log: warm-up of 183,105 samples, cosine to 6e-6 at 200,000,000, in the batch ramp of 192 to 2048.
    Recipe r;
    r.model.context = 2048;
    r.batch = {.samples = 2048, .micro = 2};
    r.batch.ramp = {.from = 192, .by = 16, .over = {Span::Unit::kSamples, 9765625}};
    r.optimizer.peak_lr = 6e-5;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSamples, 183105}, 0},
                      {LrStage::Kind::kCosine, {Span::Unit::kSamples, 200e6 - 183105}, 6e-6},
                      {LrStage::Kind::kHold, {}, 0}};
    // .scale(0): of small numbers; by itself Approx allows its epsilon of 1 besides.
    CHECK(optim::learning_rate(r, 12695, 115311) == doctest::Approx(5.969e-5).epsilon(1e-4).scale(0));
    CHECK(optim::learning_rate(r, 31214, 115311) == doctest::Approx(5.279e-5).epsilon(1e-4).scale(0));
    CHECK(optim::learning_rate(r, 31222, 115311) == doctest::Approx(5.278e-5).epsilon(1e-4).scale(0));
    CHECK(optim::learning_rate(r, 31250, 115311) == doctest::Approx(5.277e-5).epsilon(1e-4).scale(0));
    CHECK(optim::learning_rate(r, 115311, 115311) == doctest::Approx(6e-6).scale(0));
  }

  TEST_CASE("inverse square root and exponential") {
    Recipe r;
    r.batch.samples = 1;
    r.optimizer.peak_lr = 1.0;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSteps, 100}, 0}, {LrStage::Kind::kInverseSqrt, {}, 0.3}};
    CHECK(optim::learning_rate(r, 100, 10000) == doctest::Approx(1.0));
    CHECK(optim::learning_rate(r, 400, 10000) == doctest::Approx(0.5));
    CHECK(optim::learning_rate(r, 10000, 10000) == doctest::Approx(0.3));
    r.optimizer.lr = {{LrStage::Kind::kExponential, {}, 0.01}};
    CHECK(optim::learning_rate(r, 50, 100) == doctest::Approx(0.1));
    CHECK(optim::learning_rate(r, 100, 100) == doctest::Approx(0.01));
  }

  TEST_CASE("a stage without a length lasts to the end; no stages mean the peak") {
    Recipe r;
    r.batch.samples = 1;
    r.optimizer.peak_lr = 2.0;
    CHECK(optim::learning_rate(r, 7, 10) == 2.0);
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kFraction, 0.5}, 0}, {LrStage::Kind::kLinear, {}, 0}};
    CHECK(optim::learning_rate(r, 5, 10) == doctest::Approx(2.0));
    CHECK(optim::learning_rate(r, 10, 10) == doctest::Approx(0.0));
  }

  TEST_CASE("a change of the batch under way does not bend a rate that is read on samples") {
    Recipe r;
    r.batch.samples = 16;
    r.model.context = 32;
    r.stop = {Span::Unit::kSamples, 160};
    r.optimizer.peak_lr = 1.0;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSamples, 32}, 0}, {LrStage::Kind::kLinear, {}, 0}};
    const RunPast past{.points = {{10, 80, 80 * 32}}};  // of 8 until then
    for (int64_t step = 1; step <= 15; ++step) {
      CAPTURE(step);
      const double samples = step <= 10 ? 8.0 * step : 80 + 16.0 * (step - 10);
      const double wanted = samples <= 32 ? samples / 32 : 1 - (samples - 32) / 128;
      CHECK(optim::learning_rate(r, step, 15, past) == doctest::Approx(wanted));
    }
  }

  TEST_CASE("a schedule from its stage on begins at the rate so far, and fractions are of what remained") {
    Recipe r;
    r.batch.samples = 1;
    r.optimizer.peak_lr = 1.0;
    r.optimizer.lr_from = LrFrom::kStage;
    r.optimizer.lr = {{LrStage::Kind::kWarmup, {Span::Unit::kSteps, 10}, 0}, {LrStage::Kind::kLinear, {}, 0}};
    const RunPast past{.lr_step = 20, .lr = 0.2};
    CHECK(optim::learning_rate(r, 21, 50, past) == doctest::Approx(0.28));
    CHECK(optim::learning_rate(r, 30, 50, past) == doctest::Approx(1.0));
    CHECK(optim::learning_rate(r, 40, 50, past) == doctest::Approx(0.5));
    CHECK(optim::learning_rate(r, 50, 50, past) == doctest::Approx(0.0));
    r.optimizer.lr = {{LrStage::Kind::kHold, {Span::Unit::kFraction, 0.5}, 0}, {LrStage::Kind::kLinear, {}, 0}};
    CHECK(optim::learning_rate(r, 35, 50, past) == doctest::Approx(0.2));
    CHECK(optim::learning_rate(r, 50, 50, past) == doctest::Approx(0.0));
    CHECK(optim::learning_rate(r, 50, 50) == doctest::Approx(0.0));
  }
}
