#include "runtime/dlrm/click_loss.h"

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

using namespace cairn;
using namespace cairn::dlrm;

namespace {

std::string refusal(const std::vector<float>& scores, const std::vector<float>& labels) {
  const auto area = area_under_curve(scores, labels);
  return area.ok() ? "" : area.error().message;
}

}  // namespace

TEST_SUITE("runtime/dlrm/click_loss") {
  TEST_CASE("the loss is right and finite where the sigmoid is saturated") {
    const float labels[] = {1, 0, 1, 0};
    const double logits[] = {40, 40, -800, -1};
    double scores[4], gradients[4];
    const double sum = click_loss(ClickLoss::kBinaryCrossEntropy, logits, labels, 4, 1.0, scores, gradients);
    CHECK(sum == doctest::Approx(std::exp(-40) + 40 + 800 + std::log1p(std::exp(-1))).epsilon(1e-15));
    CHECK(gradients[0] == doctest::Approx(-std::exp(-40)).epsilon(1e-3).scale(0));
    CHECK(gradients[1] == 1);
    CHECK(gradients[2] == -1);
    CHECK(scores[2] == 0);
    CHECK(scores[3] == doctest::Approx(1 / (1 + std::exp(1))));
  }

  TEST_CASE("accuracy counts scores above one half as clicks") {
    const std::vector<float> scores = {0.5f, 0.51f, 0.2f, 0.9f}, labels = {0, 1, 1, 0};
    CHECK(accuracy(scores, labels) == 0.5);
    CHECK(accuracy({}, {}) == 0);
  }

  TEST_CASE("the area equals the part of pairs that are in order, with ties as halves") {
    std::mt19937 random(4);
    for (int round = 0; round < 50; ++round) {
      std::vector<float> scores, labels;
      for (int i = 0; i < 40; ++i) {
        scores.push_back(static_cast<float>(random() % 12) / 12);
        labels.push_back(i < 2 ? static_cast<float>(i) : static_cast<float>(random() % 2));
      }
      double right = 0, pairs = 0;
      for (size_t a = 0; a < 40; ++a) {
        for (size_t b = 0; b < 40; ++b) {
          if (labels[a] != 1 || labels[b] != 0) continue;
          ++pairs;
          right += scores[a] > scores[b] ? 1 : scores[a] == scores[b] ? 0.5 : 0;
        }
      }
      const auto area = area_under_curve(scores, labels);
      REQUIRE(area.ok());
      CHECK(area.value() == doctest::Approx(right / pairs).epsilon(1e-14));
    }
  }

  TEST_CASE("an area that is not defined is refused") {
    CHECK(refusal({0.1f, 0.2f}, {1, 0}) == "");
    CHECK(refusal({0.1f, 0.2f}, {1, 1}) == "AUC: all 2 labels are 1; it needs both 0 and 1");
    CHECK(refusal({0.1f}, {1, 0}) == "AUC: 1 scores for 2 labels");
    CHECK(refusal({0.1f, NAN}, {1, 0}) == "AUC: the score of sample 1 is NaN");
    CHECK(refusal({0.1f, 0.2f}, {0.5f, 0}) == "AUC: the label of sample 0 is 0.5, expected 0 or 1");
  }
}
