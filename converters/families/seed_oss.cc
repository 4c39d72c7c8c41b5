// Seed-OSS: Llama with a switch of its own for the bias of o. Source: transformers models/seed_oss.
#include "converters/llama_like.h"

namespace cairn::convert {

Family seed_oss_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 155136, .ffn = 27648, .layers = 64, .heads = 80, .kv_heads = 8, .head_dim = 128, .context = 524288},
      {biases("attention_bias", kQkv, true), biases("attention_out_bias", kOut, false), biases("mlp_bias", kMlp, false),
       dropout("residual_dropout", &ModelConfig::residual_dropout)},
      {constant("pretraining_tp", 1)});
  return llama_like({.model_type = "seed_oss", .architecture = "SeedOssForCausalLM", .keys = kKeys});
}

}  // namespace cairn::convert
