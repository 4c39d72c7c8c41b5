// Qwen3: a norm on each head of q and k, before they turn. Source: transformers models/qwen3.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qk_norm = QkNorm::kHead;
  return m;
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_norm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_norm.*"},
});

}  // namespace

Family qwen3_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 151936, .ffn = 22016, .kv_heads = 32, .head_dim = 128, .context = 32768},
                      {biases("attention_bias", kQkv | kOut, false), windowed_layers()});
  return llama_like(
      {.model_type = "qwen3", .architecture = "Qwen3ForCausalLM", .base = base, .keys = kKeys, .tensors = kTensors});
}

}  // namespace cairn::convert
