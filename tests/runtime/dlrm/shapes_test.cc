#include "runtime/dlrm/shapes.h"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>

using namespace cairn;
using namespace cairn::dlrm;

namespace {

DlrmConfig with_tables(const std::vector<int64_t>& rows, int64_t dim) {
  DlrmConfig config{.dense = 13, .dim = dim};
  for (size_t i = 0; i < rows.size(); ++i) config.tables.push_back({"C" + std::to_string(i + 1), rows[i]});
  return config;
}

DlrmConfig kaggle() {
  DlrmConfig config =
      with_tables({1460, 583,   10131227, 2202608, 305,  24,   12517, 633,     3,  93145, 5683,   8351593, 3194,
                   27,   14992, 5461306,  10,      5652, 2173, 4,     7046547, 18, 15,    286181, 105,     142572},
                  16);
  config.bottom = {512, 256, 64, 16};
  config.top = {512, 256, 1};
  return config;
}

std::string refusal(const DlrmConfig& config) {
  const Status status = check(config);
  return status.ok() ? "" : status.error().message;
}

}  // namespace

TEST_SUITE("runtime/dlrm/shapes") {
  TEST_CASE("the Kaggle preset has the published number of parameters") {
    const DlrmConfig config = kaggle();
    REQUIRE(refusal(config) == "");
    CHECK(interaction_width(config) == 367);
    CHECK(count_elems(table_tensors(config)) == 540201232);
    CHECK(count_elems(dense_tensors(config)) == 475985);
  }

  TEST_CASE("the MLPerf presets have the published number of parameters") {
    DlrmConfig config = with_tables(
        {40000000, 39060, 17295, 7424, 20265, 3,  7122,     1543,     63,       40000000, 3067956, 405282, 10,
         2209,     11938, 155,   4,    976,   14, 40000000, 40000000, 40000000, 590152,   12973,   108,    36},
        128);
    config.bottom = {512, 256, 128};
    config.top = {1024, 1024, 512, 256, 1};
    REQUIRE(refusal(config) == "");
    CHECK(interaction_width(config) == 479);
    CHECK(count_elems(table_tensors(config)) == 26135627264);
    CHECK(count_elems(dense_tensors(config)) == 2368897);
    config.interaction = Interaction::kCross;
    CHECK(interaction_width(config) == 3456);
    const auto tensors = dense_tensors(config);
    CHECK(tensors[6].name == "cross.0.v");
    CHECK(tensors[6].shape == Shape{512, 3456});
    CHECK(tensors[7].shape == Shape{3456, 512});
    CHECK(tensors.back().name == "top.4.bias");
  }

  TEST_CASE("the diagonal makes the interaction wider by one for each vector") {
    DlrmConfig config = kaggle();
    config.self_interaction = true;
    CHECK(interaction_width(config) == 367 + 27);
  }

  TEST_CASE("a model that cannot be built is refused with its field") {
    const auto changed = [](const std::function<void(DlrmConfig&)>& change) {
      DlrmConfig config = kaggle();
      change(config);
      return refusal(config);
    };
    CHECK(changed([](auto& c) { c.bottom.back() = 15; }) == "bottom[4] must be 16 (as dim), got 15");
    CHECK(changed([](auto& c) { c.top = {}; }) == "top has no layers; its last width must be 1 (the logit of a click)");
    CHECK(changed([](auto& c) { c.top[1] = 0; }) == "top[2] must be 1 to 1048576, got 0");
    CHECK(changed([](auto& c) { c.tables[3].rows = 0; }) == "rows of table C4 must be 1 to 2147483647, got 0");
    CHECK(changed([](auto& c) { c.tables[3].rows = int64_t{1} << 31; }).find("got 2147483648") != std::string::npos);
    CHECK(changed([](auto& c) { c.tables[3].name = "C1"; }) == "two tables are called C1");
    CHECK(changed([](auto& c) { c.tables[3].hot = -1; }) == "hot of table C4 must be a number from 0 on, got -1");
    CHECK(changed([](auto& c) { c.tables.clear(); }) == "the number of tables must be 1 to 65536, got 0");
    CHECK(changed([](auto& c) { c.dense = 0; }) == "dense must be 1 to 1048576, got 0");
    const auto rate = [](const DlrmOptimizer& optimizer) {
      const Status status = check(optimizer);
      return status.ok() ? "" : status.error().message;
    };
    CHECK(rate({}) == "");
    CHECK(rate({.lr = 0}) == "lr must be above 0, got 0");
    CHECK(rate({.lr = NAN}) == "lr must be above 0, got nan");
    CHECK(rate({.eps = 1e-40}) == "eps must be at least 1e-30, got 1e-40");
    CHECK(rate({.warmup = 9, .decay_start = 8, .decay_steps = 1}) == "decay_start must be at least warmup (9), got 8");
  }

  TEST_CASE("the rate rises in a line, stays, falls as a square and keeps its last value") {
    const DlrmOptimizer optimizer{.lr = 8, .warmup = 4, .decay_start = 6, .decay_steps = 4};
    const double want[] = {2, 4, 6, 8, 8, 8, 4.5, 2, 0.5, 0.5, 0.5};
    for (int64_t step = 1; step <= 11; ++step) CHECK(learning_rate(optimizer, step) == doctest::Approx(want[step - 1]));
    CHECK(learning_rate({.lr = 1e-6, .decay_start = 0, .decay_steps = 1000}, 900) == 1e-7);
    const DlrmOptimizer adagrad{.rule = DlrmRule::kRowAdagrad, .lr = 1, .lr_decay = 0.5};
    CHECK(learning_rate(adagrad, 1) == 1);
    CHECK(learning_rate(adagrad, 3) == 0.5);
  }
}
