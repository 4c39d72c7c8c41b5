#include "runtime/optim/after/qk_clip.h"

#include <doctest/doctest.h>

#include <vector>

using namespace cairn;

TEST_SUITE("runtime/optim/after/qk_clip") {
  TEST_CASE("heads are clipped whose score is above the threshold, however far") {
    const ModelConfig model{.layers = 2, .heads = 2, .kv_heads = 1};
    CHECK(optim::clipped_heads(model, 10, std::vector<float>{40, 10, 10.5F, 0}) == 2);
    CHECK(optim::clipped_heads(model, 41, std::vector<float>{40, 10, 10.5F, 0}) == 0);
  }
}
