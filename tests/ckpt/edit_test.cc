// Which model comes out of an edit. Tensors: tests/tools/ckpt_tools_test.py.
#include "ckpt/edit.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::ckpt;

namespace {

using Layers = std::vector<int64_t>;

ModelConfig model_of_lists() {
  ModelConfig model;
  model.layers = 6;
  model.vocab = 100;
  model.sliding_window = 16;
  model.attention_chunk = 32;
  model.window_layers = {0, 2, 4};
  model.chunk_layers = {5};
  model.nope_layers = {3};
  model.moe.dense_layers = {0, 1};
  return model;
}

ModelConfig edited(const ModelConfig& model, const Layers& layers) {
  const Result<ModelConfig> out = edited_model(model, {.layers = layers});
  REQUIRE_OK(out);
  return out.value();
}

}  // namespace

TEST_SUITE("ckpt/edit") {
  TEST_CASE("lists of layers move with their layers") {
    const ModelConfig out = edited(model_of_lists(), {0, 1, 2, 3, 2, 3, 4, 5});
    CHECK(out.layers == 8);
    CHECK(out.vocab == 100);
    CHECK(out.window_layers == Layers{0, 2, 4, 6});
    CHECK(out.nope_layers == Layers{3, 5});
    CHECK(out.chunk_layers == Layers{7});
    CHECK(out.moe.dense_layers == Layers{0, 1});
    const ModelConfig turned = edited(model_of_lists(), {5, 0});
    CHECK(turned.window_layers == Layers{1});
    CHECK(turned.chunk_layers == Layers{0});
    CHECK(turned.moe.dense_layers == Layers{1});
    CHECK((turned.nope_layers.empty() && turned.sliding_window == 16 && turned.attention_chunk == 32));
  }

  TEST_CASE("a model whose last layer with a window goes has no window") {  // an empty list would mean all layers
    const ModelConfig out = edited(model_of_lists(), {1, 3});
    CHECK((out.window_layers.empty() && out.sliding_window == 0));
    CHECK((out.chunk_layers.empty() && out.attention_chunk == 0));
    ModelConfig all = model_of_lists();
    all.window_layers.clear();
    CHECK(edited(all, {1, 3}).sliding_window == 16);
  }

  TEST_CASE("an edit without layers keeps them, and the vocabulary is as asked") {
    const Result<ModelConfig> out = edited_model(model_of_lists(), {.vocab = 128});
    REQUIRE_OK(out);
    CHECK((out.value().layers == 6 && out.value().vocab == 128 && out.value().window_layers == Layers{0, 2, 4}));
  }

  TEST_CASE("layers that do not exist, or that compute by their number, are refused") {
    for (const int64_t layer : {int64_t{6}, int64_t{-1}}) {
      const Result<ModelConfig> out = edited_model(model_of_lists(), {.layers = {0, layer}});
      REQUIRE_FALSE(out.ok());
      CHECK(out.error().message == "layer " + std::to_string(layer) + ": the model has layers 0 to 5");
    }
    ModelConfig model = model_of_lists();
    model.attention_scale_by_layer = true;
    const Result<ModelConfig> out = edited_model(model, {.layers = {0, 1}});
    REQUIRE_FALSE(out.ok());
    CHECK(out.error().code == ErrorCode::kUnsupported);
  }
}
