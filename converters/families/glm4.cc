// GLM-4-0414: also a norm on what attention and MLP give. Source: transformers models/glm4.
#include "converters/llama_like.h"

namespace cairn::convert {

Family glm_family();  // its config.json has the same keys with the same defaults

namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  m.block = BlockKind::kSandwich;
  return m;
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn_out_norm.*", "model.layers.*.post_self_attn_layernorm.*"},
    {"layers.*.mlp.{gate,up}.*", "model.layers.*.mlp.gate_up_proj.*"},
    {"layers.*.mlp_out_norm.*", "model.layers.*.post_mlp_layernorm.*"},
});

}  // namespace

Family glm4_family() {
  return llama_like({.model_type = "glm4",
                     .architecture = "Glm4ForCausalLM",
                     .base = base,
                     .keys = glm_family().keys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
