#include "runtime/core/token_runs.h"

#include <doctest/doctest.h>

#include <utility>
#include <vector>

using namespace cairn;

namespace {

using Places = std::vector<std::pair<int64_t, int64_t>>;

Places places_of(const TokenRuns& held, int64_t samples) {
  Places out;
  for (int64_t row = 0; row < samples * held.count; ++row) {
    const auto [sample, position] = held.place(row, samples);
    out.emplace_back(sample, position);
  }
  return out;
}

}  // namespace

TEST_SUITE("runtime/core/token_runs") {
  TEST_CASE("a rank has a chunk from either end, a sample after the other") {
    CHECK(places_of(TokenRuns(3), 2) == Places{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}});
    CHECK(places_of(TokenRuns::of_rank(8, 2, 1), 2) ==
          Places{{0, 2}, {0, 3}, {0, 4}, {0, 5}, {1, 2}, {1, 3}, {1, 4}, {1, 5}});
    CHECK(places_of(TokenRuns::of_rank(8, 2, 0), 1) == Places{{0, 0}, {0, 1}, {0, 6}, {0, 7}});
  }

  TEST_CASE("token runs: the rows of all cp ranks, one after the other, are those of one rank") {
    CHECK(places_of(TokenRuns::of_rank(8, 1, 0, 2), 2) == Places{{0, 0},
                                                                 {0, 1},
                                                                 {0, 6},
                                                                 {0, 7},
                                                                 {1, 0},
                                                                 {1, 1},
                                                                 {1, 6},
                                                                 {1, 7},  //
                                                                 {0, 2},
                                                                 {0, 3},
                                                                 {0, 4},
                                                                 {0, 5},
                                                                 {1, 2},
                                                                 {1, 3},
                                                                 {1, 4},
                                                                 {1, 5}});
    constexpr int64_t kTokens = 48, kSamples = 3, kParts = 8;
    const Places one = places_of(TokenRuns::of_rank(kTokens, 1, 0, kParts), kSamples);
    std::vector<int> seen(kSamples * kTokens);
    for (const auto& [sample, position] : one) ++seen[sample * kTokens + position];
    CHECK(seen == std::vector<int>(kSamples * kTokens, 1));
    for (const int64_t cp : {2, 4, 8}) {
      Places all;
      for (int64_t rank = 0; rank < cp; ++rank) {
        const TokenRuns held = TokenRuns::of_rank(kTokens, cp, rank, kParts),
                        run = TokenRuns::of_rank(kTokens, cp, rank);
        CHECK(held.first == run.first);
        CHECK(held.second == run.second);
        CHECK(held.count == run.count);
        const Places mine = places_of(held, kSamples);
        all.insert(all.end(), mine.begin(), mine.end());
      }
      CHECK(all == one);
    }
  }
}
