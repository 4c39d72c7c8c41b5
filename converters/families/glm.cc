// GLM-4 of 9B. Source: transformers models/glm.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  return m;
}

constexpr auto kTensors = with_llama_rows({{"layers.*.mlp.{gate,up}.*", "model.layers.*.mlp.gate_up_proj.*"}});

}  // namespace

Family glm_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 151552,
                       .ffn = 13696,
                       .layers = 40,
                       .kv_heads = 2,
                       .head_dim = 128,
                       .context = 131072,
                       .norm_eps = 1.5625e-7,
                       .rope = {.partial = "partial_rotary_factor", .absent_partial = 0.5, .old_type_counts = false}},
                      {biases("attention_bias", kQkv, true)});
  return llama_like(
      {.model_type = "glm", .architecture = "GlmForCausalLM", .base = base, .keys = kKeys, .tensors = kTensors});
}

}  // namespace cairn::convert
