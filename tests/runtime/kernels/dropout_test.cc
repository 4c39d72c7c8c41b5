#include "runtime/kernels/dropout.h"

#include <algorithm>
#include <set>

#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/dropout") {
  TEST_CASE("as many elements are dropped as the rate says, and none depends on its neighbours") {
    constexpr int64_t kRows = 400, kWidth = 1000;
    for (const double rate : {0.1, 0.5, 0.9}) {
      CAPTURE(rate);
      const auto drop = kernels::DropoutRate::of(rate);
      std::vector<float> f(kRows * kWidth);
      for (int64_t r = 0; r < kRows; ++r) {
        kernels::dropout_factors(kernels::dropout_row_key(3, 7, r), 0, kWidth, drop, &f[r * kWidth]);
      }
      int64_t dropped = 0, beside = 0, below = 0;
      for (int64_t i = 0; i < kRows * kWidth; ++i) {
        CHECK_UNARY(f[i] == 0 || f[i] == static_cast<float>(1 / (1 - rate)));
        if (f[i] != 0) continue;
        ++dropped;
        if (i % kWidth != 0 && f[i - 1] == 0) ++beside;
        if (i >= kWidth && f[i - kWidth] == 0) ++below;
      }
      const double n = kRows * kWidth, pairs = rate * rate * n;
      CHECK(std::abs(static_cast<double>(dropped) - rate * n) < 5 * std::sqrt(rate * (1 - rate) * n));
      CHECK(std::abs(static_cast<double>(beside) - pairs) < 6 * std::sqrt(pairs));
      CHECK(std::abs(static_cast<double>(below) - pairs) < 6 * std::sqrt(pairs));
    }
  }

  TEST_CASE("key, site, row and element all matter; where a run of elements begins does not") {
    const auto half = kernels::DropoutRate::of(0.5);
    const auto draw = [&](uint64_t key, uint64_t site, uint64_t row) {
      std::vector<float> f(256);
      kernels::dropout_factors(kernels::dropout_row_key(key, site, row), 0, 256, half, f.data());
      return f;
    };
    std::set<std::vector<float>> seen;
    for (uint64_t key = 0; key < 4; ++key) {
      for (const uint64_t site :
           {kernels::dropout_site(-1, 0), kernels::dropout_site(0, 0), kernels::dropout_site(0, 3)}) {
        for (uint64_t row = 0; row < 4; ++row) seen.insert(draw(key, site, row));
      }
    }
    CHECK(seen.size() == 48);
    std::vector<float> tail(100);
    kernels::dropout_factors(kernels::dropout_row_key(1, 2, 3), 156, 100, half, tail.data());
    const std::vector<float> whole = draw(1, 2, 3);
    CHECK(std::equal(tail.begin(), tail.end(), whole.begin() + 156));
  }

  TEST_CASE_TEMPLATE("rows are masked by their sample and token, in place or not, whatever the threads", T, float, bf16,
                     f16) {
    constexpr int64_t kRows = 300, kWidth = 700, kTokens = 128, kFirst = 60;
    const auto rate = kernels::DropoutRate::of(0.25);
    const std::vector<uint64_t> keys = {11, 12, 13};
    const auto x = normals<T>("x", kRows * kWidth);
    std::vector<double> wanted(x.size());
    for (int64_t r = 0; r < kRows; ++r) {
      std::vector<float> f(kWidth);
      const int64_t row = kFirst + r;
      kernels::dropout_factors(kernels::dropout_row_key(keys[row / kTokens], 5, row % kTokens), 0, kWidth, rate,
                               f.data());
      for (int64_t c = 0; c < kWidth; ++c)
        wanted[r * kWidth + c] = static_cast<double>(to_f32(x[r * kWidth + c])) * f[c];
    }
    std::vector<T> out(x.size()), in_place = x;
    const kernels::DropoutRows of{
        kRows, kWidth, kFirst, kTokens, std::ssize(keys), DevicePtr<const uint64_t>(keys.data()), 5, rate};
    kernels::dropout(of, x.data(), out.data());
    check_close(out, wanted, pointwise<T>());
    omp_set_num_threads(1);
    kernels::dropout(of, in_place.data(), in_place.data());
    omp_set_num_threads(omp_get_num_procs());
    CHECK(std::memcmp(in_place.data(), out.data(), out.size() * sizeof(T)) == 0);
  }
}
