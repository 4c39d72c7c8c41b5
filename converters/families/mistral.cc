// Mistral. Source: transformers models/mistral.
#include "converters/llama_like.h"

namespace cairn::convert {

Family mistral_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.ffn = 14336, .kv_heads = 8, .context = 131072, .rope = {.old_type_counts = false}}, {sliding_window(4096)});
  return llama_like({.model_type = "mistral", .architecture = "MistralForCausalLM", .keys = kKeys});
}

}  // namespace cairn::convert
