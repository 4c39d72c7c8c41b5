#include "runtime/core/random.h"

#include <doctest/doctest.h>

using namespace cairn;

TEST_SUITE("core/random") {
  TEST_CASE("mix64 gives the published sequence of SplitMix64") {
    constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;  // what the generator adds before each output
    uint64_t state = 1234567;
    for (const uint64_t next : {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull,
                                4593380528125082431ull, 16408922859458223821ull}) {
      CHECK(mix64(state) == next);
      state += kGamma;
    }
  }

  TEST_CASE("a stream is its seed and its name, and uniform numbers lie in [0, 1)") {
    CHECK(stream_key(1, "a") == stream_key(1, "a"));
    CHECK(stream_key(1, "a") != stream_key(1, "b"));
    CHECK(stream_key(1, "a") != stream_key(2, "a"));
    const uint64_t key = stream_key(7, "uniform");
    double sum = 0;
    for (uint64_t i = 0; i < 1000; ++i) {
      const double value = uniform_at(key, i);
      REQUIRE(value >= 0);
      REQUIRE(value < 1);
      CHECK(value == uniform_at(key, i));
      sum += value;
    }
    CHECK(sum / 1000 == doctest::Approx(0.5).epsilon(0.05));
  }
}
