// Backward against finite differences of the loss, for every element of the state.

#include <doctest/doctest.h>

#include "tests/runtime/dlrm/worlds.h"

using namespace cairn;
using namespace cairn::dlrm;
using namespace cairn::dlrm::testing;

namespace {

void check_gradients(const DlrmConfig& config) {
  const std::vector<TableCut> cuts = {copies(), on(0), rows({0, 0})};
  const DlrmOptimizer sgd{.rule = DlrmRule::kSgd, .lr = 1};
  ClickBatch batch = drawn_batch(config, 6, 3);
  for (int64_t s = 0; s < 6; ++s) batch.labels[static_cast<size_t>(s)] = 0.2f * static_cast<float>(s);
  const State<double> start = train<double>(config, sgd, cuts, 1, {}).state;
  const Trained<double> step = train<double>(config, sgd, cuts, 1, {batch}, start);
  REQUIRE(step.error == "");
  const auto loss_with = [&](const std::string& name, size_t i, double change) {
    State<double> moved = start;
    moved[name][i] += change;
    return train<double>(config, sgd, cuts, 1, {batch}, moved).losses.at(0);
  };
  constexpr double kStep = 1e-5;
  double largest = 0;
  for (const auto& [name, tensor] : start) {
    CAPTURE(name);
    for (size_t i = 0; i < tensor.size(); ++i) {
      CAPTURE(i);
      const double got = tensor[i] - step.state.at(name)[i];  // the rate is 1
      const double want = (loss_with(name, i, kStep) - loss_with(name, i, -kStep)) / (2 * kStep);
      CHECK(std::abs(got - want) <= 1e-8);
      largest = std::max(largest, std::abs(want));
    }
  }
  CHECK(largest > 1e-2);  // there is something to compare
}

DlrmConfig tiny(Interaction interaction) {
  return {.dense = 3,
          .dim = 3,
          .tables = {{"a", 4}, {"b", 2}, {"c", 5}},
          .bottom = {4, 3},
          .top = {4, 1},
          .interaction = interaction,
          .cross_layers = 2,
          .cross_rank = 2};
}

}  // namespace

TEST_SUITE("runtime/dlrm/gradients") {
  TEST_CASE("gradients equal finite differences with dot products") { check_gradients(tiny(Interaction::kDot)); }

  TEST_CASE("gradients equal finite differences with dot products of a vector with itself too") {
    DlrmConfig config = tiny(Interaction::kDot);
    config.self_interaction = true;
    check_gradients(config);
  }

  TEST_CASE("gradients equal finite differences with vectors side by side") {
    check_gradients(tiny(Interaction::kCat));
  }

  TEST_CASE("gradients equal finite differences with cross layers") { check_gradients(tiny(Interaction::kCross)); }

  TEST_CASE("gradients equal finite differences with the mean square") {
    DlrmConfig config = tiny(Interaction::kDot);
    config.loss = ClickLoss::kMeanSquare;
    check_gradients(config);
  }
}
