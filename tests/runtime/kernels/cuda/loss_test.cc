#include "runtime/kernels/cuda/loss.h"

#include "runtime/kernels/cross_entropy.h"
#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

struct Shape {
  int64_t rows, cols, valid;
};
// Packs with padding; single elements; more columns than threads take at once; several packs under way, of which the
// last threads have fewer.
constexpr Shape kShapes[] = {{4, 64, 61}, {3, 37, 37}, {3, 2056, 2050}, {2, 16400, 16390}};

std::vector<int32_t> targets_of(const Shape& shape) {
  std::vector<int32_t> out = {static_cast<int32_t>(shape.valid - 1), -1, 0, 5};
  out.resize(static_cast<size_t>(shape.rows));
  return out;
}

/// Exponentials are within 1e-6 of each other, and sums of them.
const Tolerance kExp{2e-6, 1e-6};

template <typename T>
Tolerance gradients() {
  return pointwise<T>() + kExp;
}

kernels::LogitRows on_device(kernels::LogitRows of, const OnDevice<int32_t>& targets) {
  of.targets = DevicePtr<const int32_t>(targets.data());
  return of;
}

}  // namespace

TEST_SUITE("runtime/kernels/cuda/loss") {
  TEST_CASE_TEMPLATE("the loss and its gradient in one visit are the CPU's four kernels", T, float, bf16, f16) {
    for (const Shape& shape : kShapes) {
      for (const float z_loss : {0.0f, 0.01f}) {
        CAPTURE(shape.cols);
        const auto& [rows, cols, valid] = shape;
        const auto logits = normals<T>("logits", rows * cols, 3.0);
        const std::vector<int32_t> targets = targets_of(shape);
        std::vector<T> gradient = logits;
        std::vector<float> max(rows), sum(rows), loss(rows), scale(rows);
        const kernels::LogitRows of{rows, cols, valid, 0, DevicePtr<const int32_t>(targets.data())};
        kernels::row_sums<T>(of, logits.data(), max.data(), sum.data(), loss.data());
        kernels::row_losses(targets.data(), max.data(), sum.data(), rows, loss.data());
        kernels::row_scales(targets.data(), nullptr, 0.125f, rows, scale.data());
        kernels::cross_entropy_backward<T>(of, gradient.data(), max.data(), sum.data(), scale.data(), z_loss);
        in_every_order([&] {
          OnDevice<T> d_logits(logits);
          OnDevice<int32_t> d_targets(targets);
          OnDevice<float> d_loss(rows);
          Queue on;
          kernels::cuda::cross_entropy<T>(on, on_device(of, d_targets), d_logits.data(), 0.125f, z_loss, nullptr,
                                          nullptr, nullptr, d_loss.data());
          check_alike(d_loss.values(), loss, kExp);
          CHECK(d_loss.values()[1] == 0);
          check_alike(d_logits.values(), gradient, gradients<T>());
        });
      }
    }
  }

  TEST_CASE_TEMPLATE("a vocabulary cut over ranks has the CPU's pieces", T, float, bf16, f16) {
    for (const Shape& shape : kShapes) {
      CAPTURE(shape.cols);
      const auto& [rows, cols, valid] = shape;
      const int64_t first = 3;
      const auto logits = normals<T>("logits", rows * cols, 3.0);
      std::vector<int32_t> targets = targets_of(shape);  // 0 is in another part
      std::vector<T> gradient = logits, capped = logits;
      std::vector<float> max(rows), sum(rows), at(rows, 0.75f);
      const std::vector<float> scale = {0.5f, 0.0f, 2.0f, 1.0f};
      const kernels::LogitRows of{rows, cols, valid, first, DevicePtr<const int32_t>(targets.data())};
      kernels::row_sums<T>(of, logits.data(), max.data(), sum.data(), at.data());
      kernels::cross_entropy_backward<T>(of, gradient.data(), max.data(), sum.data(), scale.data(), 0.01f);
      kernels::cross_entropy_backward<T>(of, capped.data(), max.data(), sum.data(), scale.data(), 0.01f, 12.0f);
      in_every_order([&] {
        OnDevice<T> d_logits(logits);
        OnDevice<int32_t> d_targets(targets);
        OnDevice<float> d_max(rows), d_sum(rows), d_at(filled<float>(rows, 0.75f)), d_scale(scale);
        Queue on;
        const kernels::LogitRows there = on_device(of, d_targets);
        kernels::cuda::row_sums<T>(on, there, d_logits.data(), d_max.data(), d_sum.data(), d_at.data());
        CHECK(same_bits(d_max.values(), max));
        check_alike(d_sum.values(), sum, kExp);
        CHECK(same_bits(d_at.values(), at));
        kernels::cuda::cross_entropy_backward<T>(on, there, d_logits.data(), d_max.data(), d_sum.data(), d_scale.data(),
                                                 0.01f);
        check_alike(d_logits.values(), gradient, gradients<T>());
        OnDevice<T> d_capped(logits);
        kernels::cuda::cross_entropy_backward<T>(on, there, d_capped.data(), d_max.data(), d_sum.data(), d_scale.data(),
                                                 0.01f, 12.0f);
        check_alike(d_capped.values(), capped, gradients<T>());
      });
    }
  }

  TEST_CASE("parts of a vocabulary are joined as the CPU does") {
    constexpr int64_t kParts = 3, kRows = 5;
    const auto maxima = normals<float>("maxima", kParts * kRows);
    auto sums = normals<float>("sums", kParts * kRows);
    const std::vector<int32_t> targets = {1, -1, 0, 7, -1};
    std::vector<float> max(kRows), rescaled = sums, loss = normals<float>("at", kRows), scale(kRows);
    kernels::join_maxima(maxima.data(), kParts, kRows, max.data());
    kernels::rescale_sums(maxima.data(), max.data(), kParts, 2, kRows, rescaled.data());
    const std::vector<float> at = loss;
    std::vector<float> positive(kRows, 2.5f);
    kernels::row_losses(targets.data(), max.data(), positive.data(), kRows, loss.data());
    kernels::row_scales(targets.data(), nullptr, 0.25f, kRows, scale.data());
    const std::vector<float> weights = {0.3f, 1.0f, 0.0f, 2.5f, 1.0f};
    std::vector<float> weighed(kRows);
    kernels::row_scales(targets.data(), weights.data(), 0.1f, kRows, weighed.data());
    CHECK(weighed == std::vector<float>{0.1f * 0.3f, 0.0f, 0.0f, 0.1f * 2.5f, 0.0f});
    in_every_order([&] {
      OnDevice<float> d_maxima(maxima), d_sums(sums), d_max(kRows), d_loss(at), d_positive(positive), d_scale(kRows);
      OnDevice<int32_t> d_targets(targets);
      Queue on;
      kernels::cuda::join_maxima(on, d_maxima.data(), kParts, kRows, d_max.data());
      CHECK(same_bits(d_max.values(), max));
      kernels::cuda::rescale_sums(on, d_maxima.data(), d_max.data(), kParts, 2, kRows, d_sums.data());
      check_alike(d_sums.values(), rescaled, kExp);
      kernels::cuda::row_losses(on, d_targets.data(), d_max.data(), d_positive.data(), kRows, d_loss.data());
      check_alike(d_loss.values(), loss, kExp);
      kernels::cuda::row_scales(on, d_targets.data(), nullptr, 0.25f, kRows, d_scale.data());
      CHECK(same_bits(d_scale.values(), scale));
      OnDevice<float> d_weights(weights);
      kernels::cuda::row_scales(on, d_targets.data(), d_weights.data(), 0.1f, kRows, d_scale.data());
      CHECK(same_bits(d_scale.values(), weighed));
    });
  }

  TEST_CASE("a logit that is no number makes its row's loss none, and no other's") {
    std::vector<float> logits = normals<float>("logits", 3 * 64);
    logits[64 + 33] = NAN;
    OnDevice<float> d_logits(logits), loss(3);
    OnDevice<int32_t> targets(std::vector<int32_t>{1, 2, 3});
    Queue on;
    kernels::cuda::cross_entropy<float>(on, on_device({3, 64, 64, 0, {}}, targets), d_logits.data(), 1.0f, 0.0f,
                                        nullptr, nullptr, nullptr, loss.data());
    CHECK_FALSE(std::isnan(loss.values()[0]));
    CHECK(std::isnan(loss.values()[1]));
    CHECK_FALSE(std::isnan(loss.values()[2]));
  }
}
