#include "runtime/optim/rules/groups.h"

#include <doctest/doctest.h>

#include "runtime/plan/plan.h"

using namespace cairn;

TEST_SUITE("runtime/optim/rules/groups") {
  TEST_CASE("the last group that names a tensor counts; decay is of matrices unless a group says") {
    OptimizerConfig config{.weight_decay = 0.1};
    const TensorSpec matrix{.name = "layers.3.attn.q.weight", .shape = {4, 4}, .decay = true};
    const TensorSpec bias{.name = "layers.3.attn.q.bias", .shape = {4}};
    CHECK(optim::rates_of(config, matrix).weight_decay == 0.1);
    CHECK(optim::rates_of(config, bias).weight_decay == 0);
    config.groups = {{.tensors = "layers.*", .lr = 0.5}, {.tensors = "*.q.*", .lr = 2, .weight_decay = 0.3}};
    CHECK(optim::rates_of(config, matrix).lr == 2);
    CHECK(optim::rates_of(config, matrix).weight_decay == 0.3);
    CHECK(optim::rates_of(config, bias).weight_decay == 0.3);
    config.groups.pop_back();
    CHECK(optim::rates_of(config, matrix).lr == 0.5);
    CHECK(optim::rates_of(config, matrix).weight_decay == 0.1);
    CHECK(optim::rates_of(config, bias).weight_decay == 0);
  }

  TEST_CASE("a group of no tensor is refused") {
    Recipe recipe;
    recipe.name = "one";
    recipe.stop = {Span::Unit::kSteps, 1};
    recipe.model = {
        .layers = 1, .width = 8, .heads = 2, .kv_heads = 2, .head_dim = 4, .ffn = 16, .context = 4, .vocab = 9};
    recipe.batch = {.samples = 1, .micro = 1};
    recipe.optimizer.groups = {{.tensors = "layer.*"}};
    const auto plan = make_plan(recipe, 1);
    REQUIRE(!plan.ok());
    CHECK(plan.error().message.find("\"layer.*\" is of no tensor of the model") != std::string::npos);
  }
}
