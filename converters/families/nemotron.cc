// Nemotron and Minitron: LayerNorm with weights that count from 1, squared ReLUs without a gate. Source: transformers
// models/nemotron.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.bias = false;
  m.norm_plus_one = true;
  return m;
}

ConfigKey no_scaling() {
  return {{},
          [](ConfigReader& in, M& m) {
            if (m.rope.scaling == RopeScaling::kNone) return;
            in.unsupported("rope_scaling: transformers 4 passes over it in this family, transformers 5 computes it");
          },
          nullptr};
}

}  // namespace

Family nemotron_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 256000,
                       .width = 6144,
                       .ffn = 24576,
                       .heads = 48,
                       .activation = "relu2",
                       .gated = false,
                       .context = 4096,
                       .norm_eps = 1e-5,
                       .rope = {.partial = "partial_rotary_factor", .absent_partial = 0.5},
                       .init_std = 0.0134,
                       .norm_eps_key = "norm_eps"},
                      {no_scaling(), biases("attention_bias", kQkv | kOut, false), biases("mlp_bias", kMlp, false)});
  return llama_like({.model_type = "nemotron", .architecture = "NemotronForCausalLM", .base = base, .keys = kKeys});
}

}  // namespace cairn::convert
