#include "runtime/kernels/cuda/head_clip.h"

#include "tests/runtime/kernels/cuda/cuda_testing.h"

using namespace cairn;
using namespace cairn::testing;

TEST_SUITE("runtime/kernels/cuda/head_clip") {
  TEST_CASE("QK clip has the CPU's bits: factors of more heads than threads, and runs of several chunks") {
    constexpr int64_t kKeyHeads = 300, kGroup = 2, kHead = 100;
    const kernels::HeadClip of{.most = 1.5, .group = kGroup, .key_heads = kKeyHeads};
    auto scores = normals<float>("scores", kKeyHeads * kGroup, 2.0);
    scores[7] = NAN;  // clips nothing
    std::vector<float> query(kKeyHeads * kGroup), key(kKeyHeads), clipped(1);
    kernels::head_factors(of, scores.data(), query.data(), key.data(), clipped.data());
    REQUIRE(clipped[0] > 20);
    const std::vector<int64_t> counts = {kHead * kGroup * kKeyHeads - 5, 17};
    const auto before = normals<float>("master", counts[0] + counts[1]);
    const auto table = [&](float* master, bf16* low, const float* of_query, const float* of_key) {
      return std::vector<kernels::cuda::ScaledRun>{{.master = master,
                                                    .factors = of_query,
                                                    .weights = low,
                                                    .begin = 5,
                                                    .count = counts[0],
                                                    .head_elems = kHead,
                                                    .dtype = DType::kBf16},
                                                   {.master = master + counts[0],
                                                    .factors = of_key,
                                                    .weights = low + counts[0],
                                                    .count = counts[1],
                                                    .head_elems = 4,
                                                    .dtype = DType::kBf16}};
    };
    for (const auto& [some, finite] : {std::pair(1.0f, 1), {0.0f, 1}, {1.0f, 0}}) {
      const kernels::Clip clip{.finite = finite};
      auto master = before;
      std::vector<bf16> low(before.size());
      std::vector<kernels::HeadRun> runs;
      for (const kernels::cuda::ScaledRun& run : table(master.data(), low.data(), query.data(), key.data())) {
        runs.push_back({DevicePtr(run.master), DevicePtr(run.factors), run.begin, run.count, run.head_elems, run.dtype,
                        DevicePtr(run.weights)});
      }
      kernels::scale_heads_of_runs(runs, &some, &clip);
      CHECK((master == before) == (some == 0 || finite == 0));
      in_every_order([&] {
        OnDevice<float> d_scores(scores), d_query(std::ssize(query)), d_key(kKeyHeads), d_clipped(1), d_master(before),
            d_some(std::vector<float>{some});
        OnDevice<bf16> d_low(std::vector<bf16>(before.size()));
        OnDevice<kernels::Clip> d_clip(std::vector<kernels::Clip>{clip});
        ScratchQueue on(1);
        kernels::cuda::head_factors(on, of, d_scores.data(), d_query.data(), d_key.data(), d_clipped.data());
        CHECK(d_query.values() == query);
        CHECK(d_key.values() == key);
        CHECK(d_clipped.values() == clipped);
        auto there = table(d_master.data(), d_low.data(), d_query.data(), d_key.data());
        const int64_t chunks = kernels::cuda::RunTable<kernels::cuda::ScaledRun>::number_chunks(there);
        const OnDevice<kernels::cuda::ScaledRun> d_table(there);
        kernels::cuda::scale_heads(on, {d_table.data(), std::ssize(there), chunks}, d_some.data(), d_clip.data());
        CHECK(d_master.values() == master);
        const std::vector<bf16> got = d_low.values();
        for (size_t i = 0; i < got.size(); ++i) {
          if (got[i].bits != low[i].bits) FAIL("weight ", i, " of ", got.size());
        }
      });
    }
  }
}
