// Llama 2 and 3, and the many models that use their class. Source: transformers models/llama.
#include "converters/llama_like.h"

namespace cairn::convert {

Family llama_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({}, {biases("attention_bias", kQkv | kOut, false), biases("mlp_bias", kMlp, false)},
                      {constant("pretraining_tp", 1)});
  return llama_like({.model_type = "llama", .architecture = "LlamaForCausalLM", .keys = kKeys});
}

}  // namespace cairn::convert
