#include "runtime/dlrm/cut_planner.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "tests/runtime/dlrm/worlds.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::dlrm;
using namespace cairn::dlrm::testing;

namespace {

DlrmConfig with_rows(const std::vector<int64_t>& rows, int64_t dim) {
  DlrmConfig config{.dense = 13, .dim = dim, .bottom = {dim}, .top = {1}};
  for (size_t i = 0; i < rows.size(); ++i) config.tables.push_back({"C" + std::to_string(i + 1), rows[i]});
  return config;
}

DlrmConfig mlperf() {
  return with_rows(
      {40000000, 39060, 17295, 7424, 20265, 3,  7122,     1543,     63,       40000000, 3067956, 405282, 10,
       2209,     11938, 155,   4,    976,   14, 40000000, 40000000, 40000000, 590152,   12973,   108,    36},
      128);
}

int64_t most_bytes(const CutCost& cost) { return std::ranges::max(cost.ranks, {}, &RankCost::table_bytes).table_bytes; }

constexpr int64_t kGiB = int64_t{1} << 30;

}  // namespace

TEST_SUITE("runtime/dlrm/cut_planner") {
  TEST_CASE("a step sends the bytes that are planned, on each rank, by every kind of cut") {
    DlrmConfig config = with_rows({30, 7, 12, 5, 9}, 6);
    for (DlrmTable& table : config.tables) table.hot = 3;
    ClickBatch batch = drawn_batch(config, 11, 1);
    for (size_t t = 0; t < 5; ++t) {
      batch.tables[t] = {};
      for (int64_t s = 0; s < 11; ++s) {
        for (int64_t i = 0; i < 3; ++i)
          batch.tables[t].rows.push_back(static_cast<int32_t>((7 * s + i) % config.tables[t].rows));
        batch.tables[t].offsets.push_back(3 * (s + 1));
      }
    }
    for (int64_t world = 1; world <= 4; ++world) {
      const std::vector<TableCut> cuts = {rows({0, world - 1, 0}), columns({world - 1, 0}), copies(), on(world / 2),
                                          rows({world / 3})};
      const Trained<float> trained = train<float>(config, {}, cuts, world, {batch});
      REQUIRE(trained.error == "");
      for (int64_t rank = 0; rank < world; ++rank) {
        CAPTURE(world);
        CAPTURE(rank);
        const auto planned = step_traffic(config, cuts, world, rank, 11, 4);
        REQUIRE_OK(planned);
        CHECK(planned.value() == trained.traffic[static_cast<size_t>(rank)]);
      }
    }
  }

  TEST_CASE("tables of 100 GB fit 8 ranks of 16 GiB only in parts, and no rank has more than its memory") {
    const DlrmConfig config = mlperf();
    for (const DlrmRule rule : {DlrmRule::kSgd, DlrmRule::kRowAdagrad}) {
      for (const int64_t gib : {13, 14, 16, 40}) {
        CAPTURE(gib);
        const CutRequest request{.world = 8, .global_samples = 65536, .memory_bytes = gib * kGiB, .rule = rule};
        const auto cuts = plan_cuts(config, request);
        REQUIRE_OK(cuts);
        const auto cost = cost_of(config, cuts.value(), request);
        REQUIRE_OK(cost);
        CHECK(most_bytes(cost.value()) <= gib * kGiB);
        if (gib < 19) CHECK(cuts.value()[0].kind != CutKind::kTable);  // 40 million rows of 512 bytes
      }
    }
  }

  TEST_CASE("tables beyond the memory of all ranks are refused with the numbers") {
    const auto cuts = plan_cuts(mlperf(), {.world = 4, .global_samples = 65536, .memory_bytes = 16 * kGiB});
    REQUIRE(!cuts.ok());
    CHECK(cuts.error().code == ErrorCode::kNoSpace);
    CHECK(cuts.error().message ==
          "the tables take 97.4 GiB (the largest, C22, has 40000000 rows of 512 B), and 4 ranks have 16.0 GiB each, "
          "64.0 GiB in all; give more ranks, or more memory to each");
  }

  TEST_CASE("the chosen cut costs no more than whole tables in turn, and balances the ranks") {
    const DlrmConfig config = mlperf();
    for (const int64_t world : {1, 2, 3, 8, 64}) {
      CAPTURE(world);
      const CutRequest request{.world = world, .global_samples = 16384};
      std::vector<TableCut> in_turn;
      for (int64_t t = 0; t < 26; ++t) in_turn.push_back(on(t % world));
      const auto cuts = plan_cuts(config, request);
      REQUIRE_OK(cuts);
      const CutCost chosen = cost_of(config, cuts.value(), request).value();
      CHECK(chosen.seconds <= cost_of(config, in_turn, request).value().seconds * (1 + 1e-12));
      CHECK(chosen.seconds <= 1.6 * chosen.mean_seconds);
    }
  }

  TEST_CASE("one table whose bags are long is cut, and tiny tables are copied") {
    DlrmConfig config = with_rows({1000000, 3, 4, 5, 6}, 64);
    config.tables[0].hot = 100;
    const auto cuts = plan_cuts(config, {.world = 4, .global_samples = 8192});
    REQUIRE_OK(cuts);
    CHECK(cuts.value()[0].ranks.size() == 4);
    for (size_t t = 1; t < 5; ++t) CHECK(cuts.value()[t].kind == CutKind::kCopies);
  }

  TEST_CASE("thousands of ranks are planned, and a request without sense is refused") {
    const auto cuts = plan_cuts(mlperf(), {.world = 3360, .global_samples = 65536, .memory_bytes = kGiB});
    REQUIRE_OK(cuts);
    CHECK(cut_tables(mlperf(), cuts.value(), 3360).ok());
    const auto refused = [](const CutRequest& request) {
      const auto result = plan_cuts(mlperf(), request);
      return result.ok() ? "" : result.error().message;
    };
    CHECK(refused({.world = 0}) == "a cut needs at least 1 rank, got 0");
    CHECK(refused({.world = 1, .global_samples = 0}) == "a step needs at least 1 sample, got 0");
    CHECK(refused({.memory_bytes = -1}) == "memory_bytes must be at least 0, got -1");
    CHECK(refused({.link_bytes_per_s = 0}).find("bytes a second must be above 0") == 0);
  }
}
