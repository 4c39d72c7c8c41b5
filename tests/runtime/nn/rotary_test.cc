// Scalings of rotary angles against published values and the formulas' own properties.
#include "runtime/nn/rotary.h"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "runtime/kernels/elementwise.h"

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
  TEST_CASE("frequencies and angles are rounded as transformers rounds them, far from the first position too") {
    // transformers 5.24, LlamaRotaryEmbedding: inv_freq, and cos at position 100001. The exact angle of the first
    // case's second pair has the cosine -0.00517.
    struct {
      RopeConfig rope;
      double theta;
      int64_t context;
      std::vector<float> frequencies, cosines;
    } const cases[] = {
        {{},
         370,
         512,
         {1.0f, 0.477501571f, 0.228007734f, 0.108874038f, 0.0519875251f, 0.024824122f, 0.0118535571f, 0.00566009199f},
         {-0.570038497f, -0.00472572027f, 0.779125571f, 0.317748815f, -0.862223029f, 0.837111235f, -0.551092565f,
          0.863738835f}},
        {{.scaling = RopeScaling::kLinear, .factor = 2.7},
         370,
         512,
         {0.370370358f, 0.176852435f, 0.0844473094f, 0.0403237157f, 0.0192546379f, 0.0091941189f, 0.00439020619f,
          0.00209633028f},
         {-0.38973102f, -0.175015494f, 0.977109134f, 0.176760703f, -0.951332688f, -0.484009027f, 0.698156059f,
          -0.658798337f}},
        {{.scaling = RopeScaling::kLlama3, .factor = 8, .original_context = 8192},
         500000,
         131072,
         {1.0f, 0.193922758f, 0.0376060307f, 0.00729266508f, 0.000524846022f, 3.42810235e-05f, 6.64786967e-06f,
          1.28917316e-06f},
         {-0.570038497f, -0.836052775f, -0.988131881f, 0.911323786f, -0.60426867f, -0.959226429f, 0.787044108f,
          0.991701484f}},
        {{.scaling = RopeScaling::kYarn, .factor = 8, .original_context = 256},
         10000,
         2048,
         {1.0f, 0.247052938f, 0.0562500022f, 0.01087033f, 0.00124999997f, 0.000395284733f, 0.000125000006f,
          3.95284733e-05f},
         {-0.688574672f, 1.20602429f, -0.0422626212f, 1.20626295f, 0.952439785f, -0.30932644f, 1.20529461f,
          -0.831742585f}}};
    for (const auto& [rope, theta, context, frequencies, cosines] : cases) {
      CAPTURE(static_cast<int>(rope.scaling));
      const RotaryAngles angles = rotary_angles(model(rope, theta, 16, context), context);
      CHECK(angles.frequencies == frequencies);
      std::vector<float> table(16);
      kernels::rotary_table(table.data(), 100001, 1, angles.frequencies, angles.factor);
      for (size_t i = 0; i < cosines.size(); ++i) CHECK(std::abs(table[2 * i] - cosines[i]) < 2e-7);
    }
  }

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
      CHECK(std::abs(scaled.frequencies[j] / wanted - 1) < 4e-7);
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
      const double short_one = plain.frequencies[i] / rope.short_factor[i],
                   long_one = plain.frequencies[i] / rope.long_factor[i];
      CHECK(within.frequencies[i] == doctest::Approx(short_one).epsilon(2e-7));
      CHECK(beyond.frequencies[i] == doctest::Approx(long_one).epsilon(2e-7));
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
