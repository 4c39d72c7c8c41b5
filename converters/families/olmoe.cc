// OLMoE: experts in every layer, norms of whole q and k. Source: transformers models/olmoe.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qk_norm = QkNorm::kWhole;
  return m;
}

constexpr auto kTensors = with_llama_rows(kQkNormRows, kExpertRows);

}  // namespace

Family olmoe_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 50304,
                       .width = 2048,
                       .ffn = 2048,
                       .layers = 16,
                       .heads = 16,
                       .has_head_dim = HeadDim::kDivided,
                       .context = 4096,
                       .norm_eps = 1e-5},
                      {biases("attention_bias", kQkv | kOut, false), experts("num_experts", 64, 8, 0.01),
                       renormalised_experts(), only("clip_qkv", nullptr)});
  return llama_like({.model_type = "olmoe",
                     .architecture = "OlmoeForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kQwenMoeStacks});
}

}  // namespace cairn::convert
