#include "runtime/kernels/state_copies.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "runtime/kernels/state_ops.h"
#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

uint64_t sum_of(const std::vector<float>& of) {
  return word_sums_plain(reinterpret_cast<const std::byte*>(of.data()), std::ssize(of));
}

}  // namespace

TEST_SUITE("runtime/kernels/state_copies") {
  TEST_CASE("blocks that are copied or summed one after another leave the sums of the whole array") {
    constexpr int64_t kCount = 200'003;
    const auto from = normals<float>("from", kCount);
    for (const int threads : {1, 3}) {
      with_threads(threads, [&] {
        std::vector<float> to(kCount, -1.0f);
        uint64_t sums[2] = {7, 7};  // of an update before, and of no use
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 70'001}, {70'001, 70'002}, {70'002, kCount}}) {
          kernels::copy_summed(&from[begin], &to[begin], end - begin, {{&sums[0], 1}, begin});
          kernels::copy_summed(&to[begin], &to[begin], end - begin, {{&sums[1], 1}, begin});
        }
        CHECK(same_bits(to, from));
        CHECK(sums[0] == sum_of(from));
        CHECK(sums[1] == sum_of(from));
        std::ranges::fill(to, -1.0f);
        kernels::copy_state(from.data(), to.data(), kCount - 1);
        CHECK(std::equal(to.begin(), to.end() - 1, from.begin()));
        CHECK(to.back() == -1.0f);
      });
    }
  }

  TEST_CASE("weights are the masters, rounded, in the type that they have") {
    constexpr int64_t kCount = 100'001;
    const auto master = normals<float>("w", kCount);
    for (const auto put : {&kernels::put_weights, &kernels::put_first_weights}) {
      std::vector<float> full(kCount);
      std::vector<bf16> low(kCount);
      std::vector<f16> half(kCount);
      put(master.data(), kCount, DType::kF32, full.data());
      put(master.data(), kCount, DType::kBf16, low.data());
      put(master.data(), kCount, DType::kF16, half.data());
      CHECK(same_bits(full, master));
      for (int64_t i = 0; i < kCount; ++i) {
        REQUIRE(low[i].bits == to_bf16(master[i]).bits);
        REQUIRE(half[i].bits == to_f16(master[i]).bits);
      }
    }
  }

  TEST_CASE("first weights of a box are those of its elements' numbers in the tensor, on any number of threads") {
    using Kind = kernels::FirstWeights::Kind;
    constexpr int64_t kRows = 129, kWidth = 67, kFirst = 1003, kStride = 90;
    for (const int threads : {1, 3}) {
      with_threads(threads, [&] {
        for (const Kind kind : {Kind::kNormal, Kind::kOnes, Kind::kZeros}) {
          std::vector<float> out(kRows * kWidth, -7.0f);
          kernels::draw_weights({.kind = kind,
                                 .key = 11,
                                 .std = 0.02f,
                                 .rows = kRows,
                                 .width = kWidth,
                                 .first = kFirst,
                                 .stride = kStride},
                                out.data());
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t c = 0; c < kWidth; ++c) {
              const float want = kind == Kind::kNormal ? 0.02f * normal_at(11, kFirst + r * kStride + c)
                                 : kind == Kind::kOnes ? 1.0f
                                                       : 0.0f;
              REQUIRE(out[r * kWidth + c] == want);
            }
          }
        }
      });
    }
  }

  TEST_CASE("a bias steps towards the mean of the choices, and stays where it is met") {
    const std::vector<float> choices = {1, 4, 9, 4.5f}, from = {0.5f, -0.5f, 0, 1};
    std::vector<float> to(4);
    kernels::balance_bias(0.25f, 4, nullptr, choices.data(), from.data(), to.data(), 4);
    CHECK(to == std::vector<float>{0.75f, -0.5f, -0.25f, 0.75f});
    const kernels::Clip ruined{.finite = 0};
    kernels::balance_bias(0.5f, 4, &ruined, choices.data(), from.data(), to.data(), 4);
    CHECK(to == std::vector<float>{0.75f, -0.5f, -0.25f, 0.75f});
  }

  TEST_CASE("squares of runs are those of one sum, however runs are cut at multiples of 16") {
    constexpr int64_t kCount = 100'000;
    const auto x = normals<float>("x", kCount);
    const auto norm = [&](const std::vector<kernels::ElemRun>& runs) {
      std::vector<double> words(ExactSum::kWords, 5.0);
      kernels::add_squares_of_runs(x.data(), runs.data(), std::ssize(runs), words.data());
      return ExactSum::from(std::span<const double, ExactSum::kWords>(words)).value();
    };
    const double whole = norm({{0, kCount}});
    double plain = 0;
    for (const float value : x) plain += static_cast<double>(value) * static_cast<double>(value);
    CHECK(whole == doctest::Approx(plain).epsilon(1e-12));
    CHECK(norm({{0, 48}, {48, 60'000}, {60'048, kCount - 60'048}}) == whole);
    CHECK(norm({{16, kCount - 16}}) < whole);
    CHECK(norm({}) == 0);
  }

  TEST_CASE("what is no number is counted, and added to what was") {
    std::vector<float> x(100'000, 1.0f);
    x[3] = NAN;
    x[99'999] = std::numeric_limits<float>::infinity();
    int64_t count = 5;
    kernels::count_not_finite(x.data(), std::ssize(x), {&count, 1});
    CHECK(count == 7);
  }

  TEST_CASE("norms of a tensor are added up block by block") {
    std::vector<double> words(kernels::TensorNorms::kWords);
    const kernels::TensorNorms norms{words};
    ExactSum a, b;
    a.add(0.1);
    b.add(1e6);
    norms.add(a, b);
    norms.add(a, a);
    CHECK(norms.weight().value() == 0.2);
    CHECK(norms.step().value() == doctest::Approx(1e6 + 0.1).epsilon(1e-15));
    CHECK_FALSE(kernels::TensorNorms{}.wanted());
  }

  TEST_CASE("the table has a function for each of its names, and runs it on the stream's device") {
    const std::unique_ptr<Stream> stream = make_cpu_stream();
    const kernels::StateExec on = kernels::state_exec_on(*stream);
    std::vector<float> x = {1, 2, 3}, y(3);
    on.copy_state(DevicePtr<const float>(x.data()), DevicePtr(y.data()), 3);
    CHECK(y == x);
    on.clear_floats(DevicePtr(y.data()), 2);
    CHECK(y == std::vector<float>{0, 0, 3});
  }
}
