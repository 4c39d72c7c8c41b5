#include "tests/runtime/cuda/steps/models.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "tests/runtime/trainer/harness.h"

namespace cairn::testing {
namespace {

Recipe recipe_of(const ModelConfig& model, int64_t samples) {
  Recipe out;
  out.name = "steps";
  out.seed = 11;
  out.stop = {Span::Unit::kSteps, 1000};
  out.precision = Precision::kBf16;
  out.device = DeviceChoice::kCuda;
  out.model = model;
  constexpr int64_t kTokens = 100000, kMostToken = 60000;  // tokens of 16 bits
  const int64_t vocab = std::min(model.vocab, kMostToken);
  out.data.sources = {{.kind = DataSource::Kind::kTokenFile,
                       .name = "a",
                       .path = test::token_file(kTokens, vocab, "steps"),
                       .dtype = "uint16"}};
  out.batch = {.samples = samples, .micro = samples};
  out.optimizer = {.peak_lr = 6e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .clip = 1.0};
  out.checkpoint.snapshot_by = SnapshotBy::kCopy;
  return out;
}

ModelConfig gpt(int64_t layers, int64_t width, int64_t heads, int64_t context, int64_t vocab) {
  return {.layers = layers,
          .width = width,
          .heads = heads,
          .kv_heads = heads,
          .head_dim = width / heads,
          .ffn = 4 * width,
          .context = context,
          .vocab = vocab};
}

ModelConfig llama(int64_t layers, int64_t width, int64_t heads, int64_t kv_heads, int64_t ffn, int64_t context,
                  int64_t vocab) {
  ModelConfig out = gpt(layers, width, heads, context, vocab);
  out.kv_heads = kv_heads;
  out.ffn = ffn;
  out.positions = Positions::kRotary;
  out.norm = NormKind::kRmsNorm;
  out.activation = Activation::kSwiGlu;
  out.bias = false;
  out.tied_embeddings = false;
  return out;
}

ModelConfig with_experts(ModelConfig model, int64_t experts, int64_t top_k) {
  model.moe.experts = experts;
  model.moe.top_k = top_k;
  return model;
}

Recipe by_lamb(Recipe recipe) {
  recipe.optimizer.kind = OptimizerKind::kLamb;
  return recipe;
}

Recipe by_adafactor(Recipe recipe) {
  recipe.optimizer.kind = OptimizerKind::kAdafactor;
  recipe.optimizer.beta1 = 0;
  return recipe;
}

Recipe with_clipped_heads(Recipe recipe) {
  recipe.optimizer.qk_clip = 100;
  return recipe;
}

Recipe over_tp(Recipe recipe) {
  recipe.mesh.tp = 2;
  return recipe;
}

Recipe in_floats(Recipe recipe) {
  recipe.precision = Precision::kF32;
  return recipe;
}

Recipe with_biased_experts(Recipe recipe) {
  recipe.model.mlp_bias = true;
  return recipe;
}

Recipe balanced_over_layers(Recipe recipe) {
  recipe.model.moe.aux_loss = 0.01;
  recipe.model.moe.aux_scope = AuxScope::kModel;
  return recipe;
}

Recipe with_average(Recipe recipe) {
  recipe.optimizer.ema = 0.999;
  return recipe;
}

}  // namespace

std::vector<NamedModel> counted_models() {
  const Recipe small = recipe_of(gpt(12, 768, 12, 1024, 50257), 16),
               large = recipe_of(gpt(48, 1600, 25, 1024, 50257), 8),
               experts = recipe_of(with_experts(llama(8, 1024, 16, 8, 3584, 1024, 32000), 8, 2), 16);
  return {{"gpt2-124m", small},
          {"gpt2-124m-lamb", by_lamb(small)},
          {"gpt2-124m-adafactor", by_adafactor(small)},
          {"gpt2-124m-ema", with_average(small)},
          {"gpt2-124m-qk-clip", with_clipped_heads(small)},
          {"gpt2-124m-tp2", over_tp(small)},
          {"gpt2-1558m", large},
          {"gpt2-1558m-lamb-ema", with_average(by_lamb(large))},
          {"llama3-8-layers", recipe_of(llama(8, 4096, 32, 8, 14336, 8192, 128256), 1)},
          {"moe-8-experts", experts},
          {"moe-8-experts-fp32", in_floats(experts)},
          {"moe-8-experts-biases", with_biased_experts(experts)},
          {"moe-8-experts-model-loss", balanced_over_layers(experts)}};
}

std::vector<NamedModel> tiny_models() {
  // All experts of a token are chosen, so how often does not depend on what is computed.
  const Recipe experts = recipe_of(with_experts(llama(2, 32, 2, 1, 48, 16, 130), 2, 2), 2);
  return {{"gpt", recipe_of(gpt(2, 32, 2, 16, 130), 2)},
          {"llama", recipe_of(llama(2, 32, 2, 1, 48, 16, 130), 2)},
          {"lamb", by_lamb(recipe_of(gpt(2, 32, 2, 16, 130), 2))},
          {"adafactor", by_adafactor(recipe_of(gpt(2, 32, 2, 16, 130), 2))},
          {"qk clip", with_clipped_heads(recipe_of(gpt(2, 32, 2, 16, 130), 2))},
          {"experts", experts},
          {"experts in fp32", in_floats(experts)},
          {"experts with biases", with_biased_experts(experts)},
          {"experts balanced over layers", balanced_over_layers(experts)}};
}

}  // namespace cairn::testing
