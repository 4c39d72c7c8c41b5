#include "runtime/core/exact_sum.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/core/random.h"

using namespace cairn;

TEST_SUITE("runtime/core/exact_sum") {
  TEST_CASE("nothing is lost, whatever the sizes and signs") {
    ExactSum sum;
    for (const double x : {1e30, 1.0, -1e30, 0x1p-100, 3.5}) sum.add(x);
    CHECK(sum.value() == 4.5 + 0x1p-100);
    sum.add(-4.5);
    CHECK(sum.value() == 0x1p-100);
    sum.add(-0x1p-100);
    CHECK(sum.value() == 0);
    sum.add(-7.25);
    CHECK(sum.value() == -7.25);
  }

  TEST_CASE("an exact sum depends on neither order nor grouping, and its value is the sum") {
    std::vector<double> terms;
    for (uint64_t i = 0; i < 5000; ++i) {
      terms.push_back(std::ldexp(static_cast<double>(normal_at(3, i)), static_cast<int>(mix64(i) % 80) - 60));
    }
    ExactSum whole;
    long double wanted = 0;
    for (const double x : terms) {
      whole.add(x);
      wanted += x;
    }
    CHECK(whole.value() == doctest::Approx(static_cast<double>(wanted)).epsilon(1e-14));
    for (const size_t parts : {1, 3, 7}) {
      std::reverse(terms.begin(), terms.end());
      std::rotate(terms.begin(), terms.begin() + 1234, terms.end());
      std::vector<double> words(ExactSum::kWords, 0.0);
      ExactSum merged;
      for (size_t p = 0; p < parts; ++p) {
        ExactSum part;
        for (size_t i = p; i < terms.size(); i += parts) part.add(terms[i]);
        for (int64_t w = 0; w < ExactSum::kWords; ++w) words[w] += part.words()[w];
        merged.add(part);
      }
      CHECK(merged.value() == whole.value());
      CHECK(ExactSum::from(std::span<const double, ExactSum::kWords>(words)).value() == whole.value());
    }
  }

  TEST_CASE("infinities, NaN and what is too large show; what is too small is cut off") {
    const double inf = std::numeric_limits<double>::infinity();
    ExactSum sum;
    sum.add(1);
    sum.add(1e40);
    CHECK(sum.value() == inf);
    sum.add(-inf);
    CHECK(std::isnan(sum.value()));
    ExactSum small;
    small.add(1e-60);
    small.add(5e-324);
    CHECK(small.value() == 0);
    small.add(0x1p-168 * 1.5);
    CHECK(small.value() == 0x1p-168);
  }
}
