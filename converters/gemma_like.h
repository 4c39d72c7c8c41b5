#pragma once
// What the Gemma families share; included by families/*.cc only.

#include <vector>

#include "converters/llama_like.h"

namespace cairn::convert {

/// Sizes that the class takes where config.json has none.
struct GemmaDefaults {
  int64_t vocab, width, ffn, layers, heads, kv_heads, context;
};

/// The keys of config.json: `gate` says the activation, `rotary` the positions; `own` come after them.
std::vector<ConfigKey> gemma_like_keys(const GemmaDefaults& absent, ConfigKey gate, ConfigKey rotary,
                                       const std::vector<ConfigKey>& own);

/// The MLP's activation under this name, gelu_pytorch_tanh when it is absent; written so where it is the tanh form.
ConfigKey gemma_gate(std::string_view name);

/// RMSNorm with weights from 1, no biases, the gate of tanh's GELU.
ModelConfig gemma_like_base();

/// Norms before and behind both branches.
inline constexpr auto kSandwichRows = with_llama_rows({
    {"layers.*.attn_out_norm.*", "model.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp_norm.*", "model.layers.*.pre_feedforward_layernorm.*"},
    {"layers.*.mlp_out_norm.*", "model.layers.*.post_feedforward_layernorm.*"},
});

}  // namespace cairn::convert
