// Helium: Llama with neighbouring rotary channels as pairs, and no bias on o. Source: transformers models/helium.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  return m;
}

/// The class has the key, and an output projection of the width by the width: the heads must fill it.
ConfigKey written_head_dim() {
  return {{}, nullptr, [](const ModelConfig& m, nlohmann::ordered_json& out) { out["head_dim"] = m.head_dim; }};
}

}  // namespace

Family helium_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 48000,
                       .width = 2560,
                       .ffn = 7040,
                       .layers = 24,
                       .heads = 20,
                       .kv_heads = 20,
                       .has_head_dim = HeadDim::kDivided,
                       .context = 4096,
                       .norm_eps = 1e-8,
                       .rope = {.absent_base = 100000.0, .old_type_counts = false}},
                      {written_head_dim(), biases("attention_bias", kQkv, false), biases("mlp_bias", kMlp, false)});
  return llama_like({.model_type = "helium", .architecture = "HeliumForCausalLM", .base = base, .keys = kKeys});
}

}  // namespace cairn::convert
