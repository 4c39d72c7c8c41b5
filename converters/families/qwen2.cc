// Qwen2 and Qwen2.5: biases on q, k and v always, without a key. Source: transformers models/qwen2.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qkv_bias = true;
  return m;
}

}  // namespace

Family qwen2_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 151936, .ffn = 22016, .kv_heads = 32, .has_head_dim = HeadDim::kIfUnusual, .context = 32768},
      {windowed_layers()});
  return llama_like({.model_type = "qwen2", .architecture = "Qwen2ForCausalLM", .base = base, .keys = kKeys});
}

}  // namespace cairn::convert
