#include "runtime/kernels/head_clip.h"

#include "tests/runtime/kernels/kernel_testing.h"

using namespace cairn;
using namespace cairn::testing;

namespace {

struct Factors {
  std::vector<float> query, key;
  float clipped = -1;
};

Factors factors_of(const kernels::HeadClip& of, const std::vector<float>& scores) {
  Factors out{std::vector<float>(scores.size()), std::vector<float>(static_cast<size_t>(of.key_heads))};
  kernels::head_factors(of, scores.data(), out.query.data(), out.key.data(), &out.clipped);
  return out;
}

}  // namespace

TEST_SUITE("runtime/kernels/head_clip") {
  TEST_CASE("each head's scores shrink to the threshold and no further; heads below it keep theirs") {
    const std::vector<float> scores = {1, 50, 100, 400, 100, 99, 3, 0};  // of two layers
    const Factors got = factors_of({.most = 100, .group = 2, .key_heads = 4}, scores);
    CHECK(got.clipped == 1);
    for (size_t head = 0; head < scores.size(); ++head) {
      CAPTURE(head);
      const double factor = static_cast<double>(got.query[head]) * static_cast<double>(got.key[head / 2]);
      CHECK(factor * static_cast<double>(scores[head]) ==
            doctest::Approx(std::min(100.0, static_cast<double>(scores[head]))));
    }
    CHECK(got.key == std::vector<float>{1, 0.5f, 1, 1});
    CHECK(got.query == std::vector<float>{1, 1, 2, 0.5f, 1, 1, 1, 1});
  }

  TEST_CASE("query and key take the root each where every query head has a key head") {
    const Factors got = factors_of({.most = 10, .group = 1, .key_heads = 2}, {40, 10});
    CHECK(got.query == std::vector<float>{0.5f, 1});
    CHECK(got.key == got.query);
    CHECK(factors_of({.most = 41, .group = 1, .key_heads = 2}, {40, 10}).clipped == 0);
  }

  TEST_CASE("runs of a projection take the factors of their heads, and their weights; none where nothing is clipped") {
    constexpr int64_t kHead = 6, kBegin = 4, kCount = 13;  // of heads 0, 1 and 2
    const std::vector<float> factors = {0.5F, 2, 4}, before(kCount, 1.5F);
    std::vector<float> master = before;
    std::vector<bf16> low(kCount);
    const kernels::HeadRun run{.master = DevicePtr(master.data()),
                               .factors = DevicePtr(factors.data()),
                               .begin = kBegin,
                               .count = kCount,
                               .head_elems = kHead,
                               .dtype = DType::kBf16,
                               .weights = DevicePtr<void>(low.data())};
    const kernels::Clip good, ruined{.finite = 0};
    const float none = 0, some = 1;
    kernels::scale_heads_of_runs({&run, 1}, &none, &good);
    CHECK(master == before);
    kernels::scale_heads_of_runs({&run, 1}, &some, &ruined);
    CHECK(master == before);
    CHECK(low[0].bits == 0);
    kernels::scale_heads_of_runs({&run, 1}, &some, &good);
    for (int64_t i = 0; i < kCount; ++i) {
      CAPTURE(i);
      CHECK(master[i] == 1.5F * factors[(kBegin + i) / kHead]);
      CHECK(low[i].bits == to_bf16(master[i]).bits);
    }
  }
}
