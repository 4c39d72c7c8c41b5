#include "runtime/core/dtype.h"

#include <doctest/doctest.h>

#include <cmath>

#include "runtime/core/random.h"

using namespace cairn;

TEST_SUITE("runtime/core/dtype") {
  TEST_CASE("every half survives the way to float and back") {
    for (uint32_t h = 0; h < 0x10000; ++h) {
      const float x = f16_to_f32(static_cast<uint16_t>(h));
      if (std::isnan(x)) continue;
      REQUIRE(f32_to_f16(x) == h);
    }
  }

  TEST_CASE("rounding to half and to bf16 is to the nearest even") {
    CHECK(f32_to_f16(1.0f + 0x1p-11f) == 0x3c00);      // a tie goes down to even
    CHECK(f32_to_f16(1.0f + 3 * 0x1p-11f) == 0x3c02);  // a tie goes up to even
    CHECK(f32_to_f16(65520.0f) == 0x7c00);             // rounds to infinity
    CHECK(f32_to_f16(0x1p-25f) == 0);                  // a tie at the smallest subnormal goes to zero
    CHECK(to_bf16(1.0f + 0x1p-8f).bits == 0x3f80);
    CHECK(to_bf16(1.0f + 3 * 0x1p-8f).bits == 0x3f82);
    CHECK(std::isnan(to_f32(to_bf16(NAN))));
  }

  TEST_CASE("mix64 gives the published vector, normals have unit variance") {
    CHECK(mix64(0) == 0xe220a8397b1dcdafull);
    const uint64_t key = stream_key(7, "x");
    double sum = 0, squares = 0;
    const int n = 200000;
    for (int i = 0; i < n; ++i) {
      const double x = normal_at(key, i);
      sum += x;
      squares += x * x;
    }
    CHECK(std::abs(sum / n) < 0.01);
    CHECK(std::abs(squares / n - 1.0) < 0.02);
  }
}
