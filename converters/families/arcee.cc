// Arcee's AFM: Llama with an MLP without a gate, of squared ReLUs. Source: transformers models/arcee.
#include "converters/llama_like.h"

namespace cairn::convert {

Family arcee_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.width = 2560, .ffn = 18432, .activation = "relu2", .gated = false, .context = 4096, .norm_eps = 1e-5},
      {biases("attention_bias", kQkv | kOut, false), biases("mlp_bias", kMlp, false)});
  return llama_like({.model_type = "arcee", .architecture = "ArceeForCausalLM", .keys = kKeys});
}

}  // namespace cairn::convert
