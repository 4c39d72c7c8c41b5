#include "runtime/kernels/clip.h"

#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using kernels::Clip;

namespace {

Clip clip_by(std::span<const double> squares, const kernels::ClipNumbers& numbers) {
  ExactSum sum;
  for (const double square : squares) sum.add(square);
  const auto words = sum.words();
  Clip out;
  kernels::clip_by_norm(words.data(), &numbers, nullptr, nullptr, &out);
  return out;
}

}  // namespace

TEST_SUITE("runtime/kernels/clip") {
  TEST_CASE("gradients above the largest norm are scaled down to it, others only to what they count") {
    const std::vector<double> squares = {9, 16};  // norm 5
    const Clip above = clip_by(squares, {.most = 2});
    CHECK(above.norm == 5);
    CHECK(above.grad_scale == static_cast<float>(2 / (5 + 1e-6)));
    CHECK(above.finite == 1);
    CHECK(clip_by(squares, {.most = 6}).grad_scale == 1);
    CHECK(clip_by(squares, {}).grad_scale == 1);
    const Clip scaled = clip_by(squares, {.most = 2, .gradient_scale = 1.5, .loss_scale = 1024});
    CHECK(scaled.norm == 5.0 / 1024 * 1.5);
    CHECK(scaled.grad_scale == static_cast<float>(1.5 / 1024));
  }

  TEST_CASE("a square that is infinite or no number is told") {
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
      CHECK(clip_by(std::vector<double>{1, bad}, {.most = 1}).finite == 0);
    }
  }
}
