// Command R7B and A: Command R with windows in three of four layers, of which alone the heads turn. Source:
// transformers models/cohere2.
#include "converters/cohere_like.h"

namespace cairn::convert {

Family cohere2_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      cohere_defaults({.old_type_counts = false}),
      {factor("logit_scale", &ModelConfig::logit_scale, 0.0625),
       windows_by_pattern({.pattern = "sliding_window_pattern", .full_is_nope = true}),
       biases("attention_bias", kQkv | kOut, false),
       // Published files have these; the class looks at none of them.
       refuse_unless("position_embedding_type", "rope_gptj"), unread({"layer_switch", "order_of_interleaved_layers"})});
  return llama_like(
      {.model_type = "cohere2", .architecture = "Cohere2ForCausalLM", .base = cohere_base, .keys = kKeys});
}

}  // namespace cairn::convert
