#pragma once
// What the families with latent attention and DeepSeek's experts share; included by families/*.cc only. Source:
// transformers models/deepseek_v2, models/deepseek_v3.

#include <vector>

#include "converters/llama_like.h"

namespace cairn::convert {

/// What the class takes where config.json has no such key.
struct DeepseekDefaults {
  int64_t vocab = 129280, width = 7168, ffn = 18432, layers = 61, heads = 128;
  int64_t kv_heads = 128;  // 0: as many as heads
  int64_t context = 4096;
  // Scores are scaled by rope_scaling's mscale_all_dim in 5.x alone.
  bool scale_in_5_alone = false;
};

/// The keys of config.json, in the order in which they are written, with `own` at the end.
std::vector<ConfigKey> deepseek_keys(const DeepseekDefaults& absent, const std::vector<ConfigKey>& own);

/// Rows of latent attention.
inline constexpr TensorRow kDeepseekRows[] = {
    {"layers.*.attn.q_a.*", "model.layers.*.self_attn.q_a_proj.*"},
    {"layers.*.attn.q_a_norm.*", "model.layers.*.self_attn.q_a_layernorm.*"},
    {"layers.*.attn.q_b.*", "model.layers.*.self_attn.q_b_proj.*"},
    {"layers.*.attn.kv_a.*", "model.layers.*.self_attn.kv_a_proj_with_mqa.*"},
    {"layers.*.attn.kv_a_norm.*", "model.layers.*.self_attn.kv_a_layernorm.*"},
    {"layers.*.attn.kv_b.*", "model.layers.*.self_attn.kv_b_proj.*"},
};

/// `own` with these rows, those of layers that predict further tokens, and the stacks of transformers 5's memory.
Family deepseek(Family own);

/// The tables of deepseek_v3, which kimi_k2 has with other numbers.
std::vector<ConfigKey> deepseek_v3_keys();

}  // namespace cairn::convert
