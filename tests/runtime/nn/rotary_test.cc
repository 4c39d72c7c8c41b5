// Scalings of rotary angles against published values and the formulas' own properties.
#include "runtime/nn/rotary.h"

#include <doctest/doctest.h>

#include <cmath>

using namespace cairn;
using namespace cairn::nn;

namespace {

ModelConfig model(RopeConfig rope, double theta, int64_t head_dim, int64_t context) {
  ModelConfig m;
  m.head_dim = head_dim;
  m.context = context;
  m.positions = Positions::kRotary;
  m.rope_theta = theta;
  m.rope = rope;
  return m;
}

}  // namespace

TEST_SUITE("runtime/nn/rotary") {
  TEST_CASE("llama3: the published frequencies") {
    // Base 500000, 128 channels, factor 8, low 1, high 4, trained on 8192; to nine digits.
    const RopeConfig rope{.scaling = RopeScaling::kLlama3, .factor = 8, .original_context = 8192};
    const RotaryAngles scaled = rotary_angles(model(rope, 500000, 128, 131072), 131072);
    REQUIRE(scaled.frequencies.size() == 64);
    CHECK(scaled.factor == 1);
    const std::pair<size_t, double> published[] = {{0, 1},
                                                   {28, 0.00321144599},
                                                   {29, 0.00216657076},
                                                   {30, 0.00137189357},
                                                   {31, 0.000856751413},
                                                   {32, 0.000524846161},
                                                   {33, 0.00031269375},
                                                   {34, 0.000178507813},
                                                   {35, 9.55621235e-05},
                                                   {63, 3.06892599e-07}};
    for (const auto& [j, wanted] : published) {
      CAPTURE(j);
      CHECK(std::abs(scaled.frequencies[j] / wanted - 1) < 3e-9);
    }
  }

  TEST_CASE("linear divides, dynamic keeps the original context and stretches beyond it") {
    const auto plain = rotary_angles(model({}, 10000, 64, 512), 512);
    const auto linear = rotary_angles(model({.scaling = RopeScaling::kLinear, .factor = 4}, 10000, 64, 512), 512);
    const RopeConfig rope{.scaling = RopeScaling::kDynamic, .factor = 4, .original_context = 512};
    const auto within = rotary_angles(model(rope, 10000, 64, 512), 300);
    const auto beyond = rotary_angles(model(rope, 10000, 64, 1024), 1024);
    for (size_t i = 0; i < plain.frequencies.size(); ++i) {
      CHECK(linear.frequencies[i] == plain.frequencies[i] / 4);
      CHECK(within.frequencies[i] == plain.frequencies[i]);
      const double base = 10000 * std::pow(4 * 1024.0 / 512 - 3, 64.0 / 62);
      CHECK(beyond.frequencies[i] == doctest::Approx(std::pow(base, -2.0 * static_cast<double>(i) / 64)));
    }
  }

  TEST_CASE("longrope: the short factors within the original context, the long ones for all positions beyond it") {
    const RopeConfig rope{.dims = 4,
                          .scaling = RopeScaling::kLongRope,
                          .factor = 32,
                          .original_context = 4096,
                          .short_factor = {1, 1.5},
                          .long_factor = {2, 40}};
    const auto plain = rotary_angles(model({.dims = 4}, 10000, 8, 131072), 4096);
    const auto within = rotary_angles(model(rope, 10000, 8, 131072), 4096);
    const auto beyond = rotary_angles(model(rope, 10000, 8, 131072), 4097);
    for (size_t i = 0; i < 2; ++i) {
      CHECK(within.frequencies[i] == plain.frequencies[i] / rope.short_factor[i]);
      CHECK(beyond.frequencies[i] == plain.frequencies[i] / rope.long_factor[i]);
    }
    // Phi-3's published factor of 128k, on either side.
    CHECK(within.factor == doctest::Approx(1.1902380714238083));
    CHECK(beyond.factor == within.factor);
    RopeConfig given = rope;
    given.attention_factor = 1.5;
    CHECK(rotary_angles(model(given, 10000, 8, 131072), 10).factor == 1.5);
    given = rope;
    given.factor = 1;
    CHECK(rotary_angles(model(given, 10000, 8, 4096), 10).factor == 1);
  }

  TEST_CASE("yarn keeps fast dimensions, divides slow ones, and scales cosines") {
    const RopeConfig rope{.dims = 32, .scaling = RopeScaling::kYarn, .factor = 8, .original_context = 256};
    const auto plain = rotary_angles(model({.dims = 32}, 10000, 64, 2048), 2048);
    const auto yarn = rotary_angles(model(rope, 10000, 64, 2048), 2048);
    // transformers 5.x, _compute_yarn_parameters for these settings: the ramp goes from dimension 0 to 7
    CHECK(yarn.frequencies[0] == plain.frequencies[0]);
    CHECK(yarn.frequencies[3] == doctest::Approx(plain.frequencies[3] * (3.0 / 7 / 8 + 4.0 / 7)));
    CHECK(yarn.frequencies[7] == plain.frequencies[7] / 8);
    CHECK(yarn.frequencies[15] == plain.frequencies[15] / 8);
    CHECK(yarn.factor == doctest::Approx(0.1 * std::log(8.0) + 1));
    RopeConfig given = rope;
    given.mscale = 0.7;
    given.mscale_all_dim = 1.4;
    CHECK(rotary_angles(model(given, 10000, 64, 2048), 2048).factor ==
          doctest::Approx((0.07 * std::log(8.0) + 1) / (0.14 * std::log(8.0) + 1)));
    given.attention_factor = 1.5;
    CHECK(rotary_angles(model(given, 10000, 64, 2048), 2048).factor == 1.5);
  }
}
