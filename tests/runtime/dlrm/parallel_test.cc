// Training on several ranks against one rank, and the state between cuts.

#include <doctest/doctest.h>

#include "tests/runtime/dlrm/worlds.h"

using namespace cairn;
using namespace cairn::dlrm;
using namespace cairn::dlrm::testing;

namespace {

DlrmConfig small_config(Interaction interaction) {
  return {.dense = 5,
          .dim = 6,
          .tables = {{"a", 17}, {"b", 3}, {"c", 40}, {"d", 1}, {"e", 9}},
          .bottom = {8, 6},
          .top = {7, 1},
          .interaction = interaction,
          .cross_layers = 2,
          .cross_rank = 4};
}

std::vector<ClickBatch> batches_of(const DlrmConfig& config, int64_t steps, int64_t samples) {
  std::vector<ClickBatch> batches;
  for (int64_t i = 0; i < steps; ++i)
    batches.push_back(drawn_batch(config, samples + i, 100 + static_cast<uint64_t>(i)));
  return batches;
}

/// Each table another cut, and another in each case.
std::vector<TableCut> mixed_cuts(const DlrmConfig& config, int64_t world, int64_t turn, bool with_columns = true) {
  std::vector<int64_t> all, some;
  for (int64_t r = 0; r < world; ++r) {
    all.push_back((r + turn) % world);
    if (r % 2 == 0) some.push_back((r + 2 * turn) % world);
  }
  std::vector<TableCut> cuts;
  for (size_t t = 0; t < config.tables.size(); ++t) {
    switch ((static_cast<int64_t>(t) + turn) % 5) {
      case 0:
        cuts.push_back(rows(all));
        break;
      case 1:
        cuts.push_back(with_columns ? columns({0, world - 1, world / 2}) : on(world / 2));
        break;
      case 2:
        cuts.push_back(copies());
        break;
      case 3:
        cuts.push_back(on((turn + static_cast<int64_t>(t)) % world));
        break;
      default:
        cuts.push_back(rows(some));
    }
  }
  return cuts;
}

const DlrmOptimizer kSgd{.rule = DlrmRule::kSgd, .lr = 0.3};
const DlrmOptimizer kAdagrad{.rule = DlrmRule::kRowAdagrad, .lr = 0.05, .lr_decay = 0.1};

std::vector<TableCut> one_rank(const DlrmConfig& config) { return std::vector<TableCut>(config.tables.size(), on(0)); }

}  // namespace

TEST_SUITE("runtime/dlrm/cuts") {
  TEST_CASE("1 to 8 ranks with mixed cuts give the losses and the state of one rank") {
    for (const Interaction interaction : {Interaction::kDot, Interaction::kCat, Interaction::kCross}) {
      for (const DlrmOptimizer& optimizer : {kSgd, kAdagrad}) {
        const DlrmConfig config = small_config(interaction);
        const bool columns_too = optimizer.rule == DlrmRule::kSgd;  // parts of columns have sums of their own
        const auto batches = batches_of(config, 4, 13);
        const Trained<double> want = train<double>(config, optimizer, one_rank(config), 1, batches);
        const Trained<float> want_f32 = train<float>(config, optimizer, one_rank(config), 1, batches);
        REQUIRE(want.error == "");
        for (int64_t world = 1; world <= 8; ++world) {
          CAPTURE(world);
          CAPTURE(static_cast<int>(interaction));
          const auto cuts = mixed_cuts(config, world, world, columns_too);
          const Trained<double> got = train<double>(config, optimizer, cuts, world, batches);
          REQUIRE(got.error == "");
          REQUIRE(got.losses.size() == 4);
          for (size_t i = 0; i < 4; ++i) CHECK(std::abs(got.losses[i] - want.losses[i]) <= 1e-12);
          CHECK(distance(got.state, want.state) <= 1e-11);
          const Trained<float> f32 = train<float>(config, optimizer, cuts, world, batches);
          REQUIRE(f32.error == "");
          for (size_t i = 0; i < 4; ++i) CHECK(std::abs(f32.losses[i] - want_f32.losses[i]) <= 2e-5);
          CHECK(distance(f32.state, want_f32.state) <= 2e-5);
        }
      }
    }
  }

  TEST_CASE("row-wise Adagrad with columns gives the same whichever ranks own the parts") {
    const DlrmConfig config = small_config(Interaction::kDot);
    const auto batches = batches_of(config, 4, 13);
    const std::vector<TableCut> on_one(config.tables.size(), columns({0, 0}));
    const std::vector<TableCut> on_three(config.tables.size(), columns({2, 1}));
    const Trained<double> want = train<double>(config, kAdagrad, on_one, 1, batches);
    const Trained<double> got = train<double>(config, kAdagrad, on_three, 3, batches);
    REQUIRE(want.error + got.error == "");
    CHECK(want.state.at("table.a.square_sums").size() == 2 * 17);
    CHECK(distance(got.state, want.state) <= 1e-11);
    const Trained<double> whole = train<double>(config, kAdagrad, one_rank(config), 1, batches);
    CHECK(distance(State<double>{{"a", whole.state.at("table.a")}}, {{"a", want.state.at("table.a")}}) > 1e-6);
  }

  TEST_CASE("state of one cut continues on other cuts and ranks as if it had not stopped") {
    for (const DlrmOptimizer& optimizer : {kSgd, kAdagrad}) {
      const DlrmConfig config = small_config(Interaction::kDot);
      const auto batches = batches_of(config, 6, 11);
      const Trained<double> want = train<double>(config, optimizer, one_rank(config), 1, batches);
      Trained<double> got;
      int64_t steps = 0;
      for (const int64_t world : {4, 7, 2}) {
        const bool columns_too = optimizer.rule == DlrmRule::kSgd;
        got = train<double>(config, optimizer, mixed_cuts(config, world, world, columns_too), world,
                            {batches[steps], batches[steps + 1]}, got.state, steps);
        REQUIRE(got.error == "");
        for (size_t i = 0; i < 2; ++i) CHECK(std::abs(got.losses[i] - want.losses[steps + i]) <= 1e-12);
        steps += 2;
      }
      CHECK(distance(got.state, want.state) <= 1e-11);
    }
  }

  TEST_CASE("two runs of one cut give the same bits") {
    const DlrmConfig config = small_config(Interaction::kDot);
    const auto batches = batches_of(config, 4, 64);
    const auto cuts = mixed_cuts(config, 4, 1);
    const Trained<float> first = train<float>(config, kAdagrad, cuts, 4, batches);
    const Trained<float> second = train<float>(config, kAdagrad, cuts, 4, batches);
    REQUIRE(first.error + second.error == "");
    CHECK(first.losses == second.losses);
    CHECK(first.state == second.state);
  }

  TEST_CASE("the first values of a table do not depend on its cut") {
    const DlrmConfig config = small_config(Interaction::kDot);
    const Trained<float> want = train<float>(config, kSgd, one_rank(config), 1, {});
    const Trained<float> got = train<float>(config, kSgd, mixed_cuts(config, 5, 3), 5, {});
    REQUIRE(want.error + got.error == "");
    CHECK(want.state == got.state);
    const double bound = std::sqrt(1.0 / 17);
    for (const float w : want.state.at("table.a")) CHECK(std::abs(w) <= bound);
    CHECK(want.state.at("table.a") != std::vector<float>(want.state.at("table.a").size(), 0.0f));
  }

  TEST_CASE("a cut that the world does not have is refused with its table") {
    const DlrmConfig config = small_config(Interaction::kDot);
    const auto refused = [&](const TableCut& cut) {
      auto cuts = one_rank(config);
      cuts[2] = cut;
      const auto shards = cut_tables(config, cuts, 4);
      return shards.ok() ? "" : shards.error().message;
    };
    CHECK(refused(on(3)) == "");
    CHECK(refused(on(4)) == "cut of table c: ranks are 0 to 3, got 4");
    CHECK(refused(rows({0, -1})) == "cut of table c: ranks are 0 to 3, got -1");
    CHECK(refused(columns({})) == "cut of table c: it names no ranks");
    CHECK(refused({CutKind::kTable, {1, 2}}) == "cut of table c: a whole table has 1 rank, got 2");
    CHECK(refused({CutKind::kCopies, {1}}) ==
          "cut of table c: copies are on every rank, so it names none; got 1 ranks");
    const auto few = cut_tables(config, {on(0)}, 4);
    REQUIRE(!few.ok());
    CHECK(few.error().message == "1 cuts for 5 tables");
  }

  TEST_CASE("a batch that does not fit the model is refused with its place, on every rank") {
    const DlrmConfig config = small_config(Interaction::kDot);
    const auto refused = [&](const std::function<void(ClickBatch&)>& change, int64_t world) {
      ClickBatch batch = drawn_batch(config, 8, 5);
      for (Bags& bags : batch.tables) {  // one row a sample
        bags = {};
        for (int64_t s = 0; s < 8; ++s) {
          bags.rows.push_back(0);
          bags.offsets.push_back(s + 1);
        }
      }
      change(batch);
      return train<float>(config, kSgd, std::vector<TableCut>(5, on(world - 1)), world, {batch}).error;
    };
    CHECK(refused([](ClickBatch&) {}, 2) == "");
    CHECK(refused([](ClickBatch& b) { b.tables[0].rows[5] = 17; }, 1) ==
          "rank 0: batch: sample 5 reads row 17 of table a, which has rows 0 to 16");
    CHECK(refused([](ClickBatch& b) { b.tables[1].rows[6] = -1; }, 2).find("sample 6 reads row -1 of table b") !=
          std::string::npos);
    CHECK(refused([](ClickBatch& b) { b.tables[4].offsets[3] = 9; }, 1).find("offsets of table e") !=
          std::string::npos);
    CHECK(refused([](ClickBatch& b) { b.tables.pop_back(); }, 1) == "rank 0: batch: bags of 4 tables, the model has 5");
    CHECK(refused([](ClickBatch& b) { b.dense[3] = std::nanf(""); }, 1) ==
          "rank 0: step 1: the loss is nan; no update was made");
  }
}
