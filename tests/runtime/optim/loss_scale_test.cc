#include "runtime/optim/loss_scale.h"

#include <doctest/doctest.h>

using namespace cairn;
using optim::LossScale;

TEST_SUITE("runtime/optim/loss_scale") {
  TEST_CASE("the loss scale doubles after a window of good steps and halves after hysteresis overflows") {
    const LossScaleConfig config{.initial = 1024, .window = 3, .hysteresis = 2, .min = 256};
    LossScale s = optim::initial_loss_scale(config);
    const auto step = [&](bool overflow) {
      const auto next = optim::next_loss_scale(config, s, overflow);
      REQUIRE(next.ok());
      s = next.value();
    };
    for (int k = 0; k < 3; ++k) step(false);
    CHECK(s == LossScale{.scale = 2048, .good_steps = 0, .hysteresis_left = 2, .skipped = 0});
    step(false);
    step(true);  // forgiven, but the window begins anew
    CHECK(s == LossScale{.scale = 2048, .good_steps = 0, .hysteresis_left = 1, .skipped = 1});
    step(true);
    CHECK(s.scale == 1024);
    step(true);  // the hysteresis is used up until it grows again
    CHECK(s.scale == 512);
    for (int k = 0; k < 3; ++k) step(false);
    CHECK(s == LossScale{.scale = 1024, .good_steps = 0, .hysteresis_left = 2, .skipped = 3});
  }

  TEST_CASE("an overflow at the smallest scale is an error, once the hysteresis is used up") {
    LossScale lowered{.scale = 1024, .good_steps = 40, .hysteresis_left = 1};
    const Result<LossScale> grown = next_loss_scale({.window = 10, .hysteresis = 2}, lowered, false);
    REQUIRE(grown.ok());
    CHECK(grown.value().scale == 2048);  // the window was 1000 before
    CHECK(grown.value().good_steps == 0);
    CHECK(grown.value().hysteresis_left == 2);
    const LossScaleConfig config{.initial = 3, .window = 0, .hysteresis = 2, .min = 2};
    LossScale s = optim::initial_loss_scale(config);
    for (int k = 0; k < 5; ++k) s = optim::next_loss_scale(config, s, false).value();
    CHECK(s.scale == 3);  // no window: it never grows
    s = optim::next_loss_scale(config, s, true).value();
    s = optim::next_loss_scale(config, s, true).value();
    CHECK(s.scale == 2);  // not 1.5
    const auto last = optim::next_loss_scale(config, s, true);
    REQUIRE(!last.ok());
    CHECK(last.error().code == ErrorCode::kGuard);
    CHECK(last.error().message.find("loss_scale.min = 2") != std::string::npos);
  }
}
