#include "runtime/data/order.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <vector>

using namespace cairn;
using namespace cairn::data;

TEST_SUITE("runtime/data/order") {
  TEST_CASE("mixing, keys and permutations give the published vectors") {
    CHECK(mix64(0) == 0xe220a8397b1dcdafull);
    CHECK(order_key(1234, 0, 0) == 0x52b6d2127195ace2ull);
    const auto first = [](int64_t n, uint64_t key, int64_t count) {
      std::vector<int64_t> out;
      for (int64_t i = 0; i < count; ++i) out.push_back(permute(n, key, i));
      return out;
    };
    CHECK(first(10, order_key(1234, 0, 0), 10) == std::vector<int64_t>{4, 7, 3, 2, 6, 1, 0, 5, 8, 9});
    CHECK(first(10, order_key(1234, 0, 1), 10) == std::vector<int64_t>{9, 3, 2, 1, 4, 8, 5, 6, 7, 0});
    CHECK(first(1000, order_key(1234, 3, 0), 8) == std::vector<int64_t>{702, 269, 392, 461, 796, 145, 995, 986});
    CHECK(permute(1'000'000'000'000, order_key(1234, 0, 0), 0) == 358675583242);
  }

  TEST_CASE("every length is permuted without gap or repeat") {
    for (int64_t n = 1; n <= 700; ++n) {
      std::vector<bool> seen(static_cast<size_t>(n), false);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t place = permute(n, order_key(7, 1, static_cast<uint64_t>(n)), i);
        REQUIRE((place >= 0 && place < n));
        REQUIRE(!seen[static_cast<size_t>(place)]);
        seen[static_cast<size_t>(place)] = true;
      }
    }
  }

  TEST_CASE("over many keys each place is as likely as any other") {
    constexpr int64_t kN = 16, kKeys = 20000;
    std::vector<int64_t> hits(kN * kN);
    for (uint64_t key = 0; key < kKeys; ++key)
      for (int64_t i = 0; i < kN; ++i) ++hits[static_cast<size_t>(i * kN + permute(kN, order_key(key, 0, 0), i))];
    double chi2 = 0;
    const double expected = static_cast<double>(kKeys) / kN;
    for (const int64_t h : hits) chi2 += (h - expected) * (h - expected) / expected;
    const double per_degree = chi2 / ((kN - 1) * (kN - 1));
    CHECK(per_degree > 0.7);  // 225 degrees of freedom: one standard deviation is 0.094
    CHECK(per_degree < 1.3);
  }

  TEST_CASE("a blend draws by shortfall, as the published vector does") {
    const std::vector<double> weights = {.5, .3, .2};
    std::vector<int64_t> taken(3), sources, samples;
    for (int64_t g = 0; g < 12; ++g) {
      const int64_t s = blend_next(weights, taken, g);
      sources.push_back(s);
      samples.push_back(taken[static_cast<size_t>(s)]++);
    }
    CHECK(sources == std::vector<int64_t>{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1});
    CHECK(samples == std::vector<int64_t>{0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3});
  }

  TEST_CASE("an exhaustive blend draws every source exactly out") {
    std::vector<int64_t> left = {3, 2, 1}, taken(3), sources, samples;
    const std::vector<double> weights = {3.0 / 6, 2.0 / 6, 1.0 / 6};
    for (int64_t g = 0; g < 6; ++g) {
      const int64_t s = blend_next(weights, taken, g, left);
      sources.push_back(s);
      samples.push_back(taken[static_cast<size_t>(s)]++);
      --left[static_cast<size_t>(s)];
    }
    CHECK(sources == std::vector<int64_t>{0, 1, 2, 0, 1, 0});
    CHECK(samples == std::vector<int64_t>{0, 0, 0, 1, 1, 2});
    CHECK(blend_next(weights, taken, 6, left) == -1);
  }

  TEST_CASE("a blend stays within one sample of its weights") {
    const std::vector<double> weights = {0.05, 0.6, 0.15, 0.2};
    std::vector<int64_t> taken(4);
    for (int64_t g = 0; g < 10000; ++g) {
      ++taken[static_cast<size_t>(blend_next(weights, taken, g))];
      for (size_t i = 0; i < 4; ++i) REQUIRE(std::abs(static_cast<double>(taken[i]) - weights[i] * (g + 1)) < 2.0);
    }
  }
}
