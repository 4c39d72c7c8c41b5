#include "runtime/optim/after/qk_clip.h"

#include <doctest/doctest.h>

#include <vector>

using namespace cairn;

TEST_SUITE("runtime/optim/after/qk_clip") {
  TEST_CASE("each head's scores shrink to the threshold and no further; heads below it keep theirs") {
    const ModelConfig model{.layers = 2, .heads = 4, .kv_heads = 2};
    const std::vector<float> scores = {1, 50, 100, 400, 100, 99, 3, 0};
    const optim::HeadFactors got = optim::qk_clip_factors(model, 100, scores);
    CHECK(got.clipped_heads == 1);
    for (size_t head = 0; head < scores.size(); ++head) {
      CAPTURE(head);
      const double factor = static_cast<double>(got.query[head]) * static_cast<double>(got.key[head / 2]);
      CHECK(factor * static_cast<double>(scores[head]) ==
            doctest::Approx(std::min(100.0, static_cast<double>(scores[head]))));
    }
    CHECK(got.key == std::vector<float>{1, 0.5f, 1, 1});
    CHECK(got.query == std::vector<float>{1, 1, 2, 0.5f, 1, 1, 1, 1});
  }

  TEST_CASE("QK clip: query and key take the root each where every query head has a key head") {
    const ModelConfig model{.layers = 1, .heads = 2, .kv_heads = 2};
    const optim::HeadFactors got = optim::qk_clip_factors(model, 10, std::vector<float>{40, 10});
    CHECK(got.query == std::vector<float>{0.5f, 1});
    CHECK(got.key == got.query);
    CHECK(optim::qk_clip_factors(model, 41, std::vector<float>{40, 10}).clipped_heads == 0);
  }
}
