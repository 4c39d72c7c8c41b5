#include "runtime/kernels/cross_entropy.h"

#include "kernel_testing.h"
#include "runtime/kernels/elementwise.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

/// Mean loss over rows in double; columns from valid_cols on are not there.
double naive_loss(const std::vector<double>& logits, int64_t rows, int64_t cols, int64_t valid_cols,
                  const std::vector<int32_t>& targets, const std::vector<float>& scale) {
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double max = -INFINITY, sum = 0;
    for (int64_t c = 0; c < valid_cols; ++c) max = std::max(max, logits[r * cols + c]);
    for (int64_t c = 0; c < valid_cols; ++c) sum += std::exp(logits[r * cols + c] - max);
    loss += scale[r] * (std::log(sum) + max - logits[r * cols + targets[r]]);
  }
  return loss;
}

template <typename T>
struct Pieces {
  std::vector<float> max, sum, target;
  std::vector<T> gradient;
};

/// The three steps over `parts` ranges of columns, each a rank with its own padding, joined as the collectives would.
template <typename T>
Pieces<T> run_in_parts(const std::vector<T>& logits, int64_t rows, int64_t valid_cols, int64_t parts,
                       const std::vector<int32_t>& targets, const std::vector<float>& scale) {
  const int64_t share = (valid_cols + parts - 1) / parts, cols = share + 3;
  std::vector<std::vector<T>> part(parts, std::vector<T>(rows * cols));
  std::vector<int64_t> valid(parts);
  Pieces<T> all;
  all.max.assign(rows, -INFINITY);
  all.sum.assign(rows, 0.0f);
  all.target.assign(rows, 0.0f);
  std::vector<std::vector<float>> max(parts, std::vector<float>(rows)), sum = max;
  for (int64_t p = 0; p < parts; ++p) {
    valid[p] = std::min(share, valid_cols - p * share);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        part[p][r * cols + c] = c < valid[p] ? logits[r * valid_cols + p * share + c] : normals<T>("pad", 1, 1e4)[0];
      }
    }
    const kernels::LogitRows of{rows, cols, valid[p], p * share, DevicePtr<const int32_t>(targets.data())};
    kernels::row_sums(of, part[p].data(), max[p].data(), sum[p].data(), all.target.data());
    for (int64_t r = 0; r < rows; ++r) all.max[r] = std::max(all.max[r], max[p][r]);
  }
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t r = 0; r < rows; ++r) all.sum[r] += sum[p][r] * std::exp(max[p][r] - all.max[r]);
  }
  all.gradient.resize(logits.size());
  for (int64_t p = 0; p < parts; ++p) {
    const kernels::LogitRows of{rows, cols, valid[p], p * share, DevicePtr<const int32_t>(targets.data())};
    kernels::cross_entropy_backward(of, part[p].data(), all.max.data(), all.sum.data(), scale.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        if (c < valid[p]) {
          all.gradient[r * valid_cols + p * share + c] = part[p][r * cols + c];
        } else {
          REQUIRE(to_f32(part[p][r * cols + c]) == 0.0f);
        }
      }
    }
  }
  return all;
}

}  // namespace

TEST_SUITE("runtime/kernels/cross_entropy") {
  TEST_CASE_TEMPLATE("loss and gradient agree with the naive softmax, whole and cut over ranks", T, float, bf16, f16) {
    const int64_t rows = 7, cols = 53;
    const auto logits = normals<T>("logits", rows * cols, 3.0);
    const std::vector<int32_t> targets{0, 52, 17, 18, 35, 36, 7};
    const std::vector<float> scale{0.25f, 1.0f, 0.0f, 0.5f, 1.0f, 0.125f, 2.0f};
    std::vector<double> at = doubles(logits);
    std::vector<double> slopes(at.size());
    for (size_t i = 0; i < at.size(); ++i) {
      slopes[i] = slope([&] { return naive_loss(at, rows, cols, cols, targets, scale); }, at[i]);
    }
    for (const int64_t parts : {1, 2, 3}) {
      CAPTURE(parts);
      const Pieces<T> got = run_in_parts(logits, rows, cols, parts, targets, scale);
      double loss = 0;
      for (int64_t r = 0; r < rows; ++r) {
        loss += scale[r] * (std::log(static_cast<double>(got.sum[r])) + got.max[r] - got.target[r]);
      }
      CHECK(sum_of<float>(cols).accepts(loss, naive_loss(at, rows, cols, cols, targets, scale)));
      check_close(got.gradient, slopes, pointwise<T>() + kFiniteDifference);
      for (int64_t c = 0; c < cols; ++c) REQUIRE(to_f32(got.gradient[2 * cols + c]) == 0.0f);  // scale 0
    }
  }

  TEST_CASE("the gradient of capped logits is that by what was capped") {
    const int64_t rows = 3, cols = 21;
    const float cap = 1.7f;
    const auto logits = normals<float>("logits", rows * cols, 3.0);
    const std::vector<int32_t> targets{0, 20, 11};
    const std::vector<float> scale{0.25f, 1.0f, 2.0f};
    std::vector<double> at = doubles(logits), slopes(at.size());
    const auto loss = [&] {
      std::vector<double> capped = at;
      for (double& z : capped) z = cap * std::tanh(z / cap);
      return naive_loss(capped, rows, cols, cols, targets, scale);
    };
    for (size_t i = 0; i < at.size(); ++i) slopes[i] = slope(loss, at[i]);
    std::vector<float> got = logits, max(rows), sum(rows), target(rows);
    kernels::cap(got.data(), cap, rows * cols);
    const kernels::LogitRows of{rows, cols, cols, 0, DevicePtr<const int32_t>(targets.data())};
    kernels::row_sums(of, got.data(), max.data(), sum.data(), target.data());
    kernels::cross_entropy_backward(of, got.data(), max.data(), sum.data(), scale.data(), 0, cap);
    check_close(got, slopes, pointwise<float>() + kFiniteDifference);
  }

  TEST_CASE_TEMPLATE("a long vocabulary keeps its digits", T, float, bf16, f16) {
    const int64_t cols = 50257;
    const auto logits = normals<T>("logits", cols, 2.0);
    double sum = 0, max = -INFINITY;
    for (const double x : doubles(logits)) max = std::max(max, x);
    for (const double x : doubles(logits)) sum += std::exp(x - max);
    const Pieces<T> got = run_in_parts(logits, 1, cols, 1, {50256}, {1.0f});
    CHECK(got.max[0] == max);
    CHECK(got.target[0] == to_f32(logits[50256]));
    CHECK(std::abs(got.sum[0] / sum - 1) < 1e-6);
  }

  TEST_CASE("logits of any size neither overflow nor lose the gradient; a NaN shows, a masked row is zero") {
    std::vector<float> logits{3e38f, -3e38f, 1e4f, 0.0f, -1e4f, 1e4f, NAN, 1.0f, 2.0f, NAN, 1.0f, 2.0f};
    const std::vector<int32_t> targets{0, 0, 1, 1};
    const Pieces<float> got = run_in_parts(logits, 4, 3, 1, targets, {1.0f, 1.0f, 1.0f, 0.0f});
    CHECK(got.sum[0] == 1.0f);
    CHECK(got.gradient[0] == 0.0f);
    CHECK(got.gradient[1] == 0.0f);
    CHECK(got.gradient[3] == -1.0f);
    CHECK(got.gradient[5] == 1.0f);
    CHECK(std::isnan(got.sum[2]));
    CHECK(std::isnan(got.gradient[7]));
    CHECK(got.gradient[9] == 0.0f);
  }

  TEST_CASE("a small loss of large logits keeps its digits") {
    const int32_t target = 0;
    const float max = 300, sum = 1 + 0x1p-11f;
    float loss = 300;  // the target's logit
    kernels::row_losses(&target, &max, &sum, 1, &loss);
    CHECK(loss / std::log1p(0x1p-11) == doctest::Approx(1).epsilon(1e-6));
  }

  TEST_CASE("a rank that holds padding only adds nothing") {
    std::vector<float> logits{5.0f, 6.0f}, max(1), sum(1, -1.0f), target(1, -1.0f);
    const float global_max = 2.0f, global_sum = 1.0f, one = 1.0f;
    const int32_t id = 9;
    const kernels::LogitRows of{1, 2, 0, 8, DevicePtr<const int32_t>(&id)};
    kernels::row_sums(of, logits.data(), max.data(), sum.data(), target.data());
    CHECK(max[0] == -INFINITY);
    CHECK(sum[0] == 0.0f);
    CHECK(target[0] == -1.0f);
    kernels::cross_entropy_backward(of, logits.data(), &global_max, &global_sum, &one);
    CHECK(logits == std::vector<float>{0.0f, 0.0f});
  }
}
