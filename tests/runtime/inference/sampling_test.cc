#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "runtime/inference/sampling.h"

using namespace cairn;
using namespace cairn::inference;

TEST_SUITE("runtime/inference/sampling") {
  TEST_CASE("greedy takes the largest; top-k and top-p cut; frequencies follow the softmax") {
    const std::vector<float> logits = {0.0f, 1.0f, 2.0f, -1.0f};
    CHECK(sample_token(logits, {.temperature = 0}, 0) == 2);
    CHECK(sample_token(logits, {.top_k = 1}, 5) == 2);
    CHECK(sample_token(logits, {.top_p = 0.5}, 5) == 2);  // its probability is 0.64
    std::map<int32_t, int> seen;
    for (int k = 0; k < 20000; ++k) ++seen[sample_token(logits, {.seed = 3}, k)];
    CHECK(seen[2] / 20000.0 == doctest::Approx(0.6439).epsilon(0.03));
    CHECK(seen[1] / 20000.0 == doctest::Approx(0.2369).epsilon(0.05));
    std::map<int32_t, int> two;
    for (int k = 0; k < 2000; ++k) ++two[sample_token(logits, {.top_k = 2}, k)];
    CHECK(two.size() == 2);
  }
}
