#pragma once
// What Llama and the families that follow it share; included by families/*.cc only. A family's file says where it
// differs: its class's defaults, its own keys and the rows of its own tensors.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <vector>

#include "converters/family_table.h"

namespace cairn::convert {

/// head_dim, of a class that has the key; of one that reads it where it is there, so that it is written only where it
/// is unusual; of one whose heads divide the width, whatever a key says.
enum class HeadDim { kKey, kIfUnusual, kDivided };

/// What the class takes where config.json has no such key, and names that differ: Llama's, unless a family says
/// otherwise.
struct LlamaDefaults {
  int64_t vocab = 32000, width = 4096, ffn = 11008, layers = 32, heads = 32;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: width / heads
  HeadDim has_head_dim = HeadDim::kKey;
  std::string_view activation = "silu";
  bool gated = true;  // the MLP; decides what the activation's name means
  int64_t context = 2048;
  double norm_eps = 1e-6;
  RopeKeys rope = {};
  bool has_dropout = true;  // the class has attention_dropout
  bool tied = false;
  double init_std = 0.02;
  std::string_view ffn_key = "intermediate_size", norm_eps_key = "rms_norm_eps";
};

/// The keys of config.json, in the order in which they are written: those that all have, with `own` after the rotary
/// ones and `last` at the end.
std::vector<ConfigKey> llama_like_keys(const LlamaDefaults& absent, const std::vector<ConfigKey>& own = {},
                                       const std::vector<ConfigKey>& last = {});

/// RMSNorm and no biases, whatever config.json says.
ModelConfig llama_like_base();

inline constexpr TensorRow kLlamaRows[] = {
    {"embed.tokens", "model.embed_tokens.weight"},
    {"layers.*.attn_norm.*", "model.layers.*.input_layernorm.*"},
    {"layers.*.attn.q.*", "model.layers.*.self_attn.q_proj.*"},
    {"layers.*.attn.k.*", "model.layers.*.self_attn.k_proj.*"},
    {"layers.*.attn.v.*", "model.layers.*.self_attn.v_proj.*"},
    {"layers.*.attn.o.*", "model.layers.*.self_attn.o_proj.*"},
    {"layers.*.mlp_norm.*", "model.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.gate.*", "model.layers.*.mlp.gate_proj.*"},
    {"layers.*.mlp.up.*", "model.layers.*.mlp.up_proj.*"},
    {"layers.*.mlp.down.*", "model.layers.*.mlp.down_proj.*"},
    {"final_norm.*", "model.norm.*"},
    {"head.weight", "lm_head.weight"},
};

/// A family's own rows, then those of Llama: of two that fit a tensor the first counts.
template <size_t kCount>
constexpr auto with_llama_rows(const TensorRow (&own)[kCount]) {
  std::array<TensorRow, kCount + std::size(kLlamaRows)> out{};
  std::copy(std::begin(own), std::end(own), out.begin());
  std::copy(std::begin(kLlamaRows), std::end(kLlamaRows), out.begin() + kCount);
  return out;
}

/// The same with `more` between the two.
template <size_t kOne, size_t kTwo>
constexpr auto with_llama_rows(const TensorRow (&own)[kOne], const TensorRow (&more)[kTwo]) {
  std::array<TensorRow, kOne + kTwo + std::size(kLlamaRows)> out{};
  const auto behind = std::copy(std::begin(own), std::end(own), out.begin());
  std::copy(std::begin(kLlamaRows), std::end(kLlamaRows), std::copy(std::begin(more), std::end(more), behind));
  return out;
}

/// Norms of q and k.
inline constexpr TensorRow kQkNormRows[] = {
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_norm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_norm.*"},
};
/// Norms behind the branches alone, and of q and k.
inline constexpr TensorRow kOutNormRows[] = {
    {"layers.*.attn_out_norm.*", "model.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp_out_norm.*", "model.layers.*.post_feedforward_layernorm.*"},
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_norm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_norm.*"},
};

/// Experts as the classes of Qwen and DeepSeek call them, and those that share their names.
inline constexpr TensorRow kExpertRows[] = {
    {"layers.*.moe.router.bias", "model.layers.*.mlp.gate.e_score_correction_bias"},
    {"layers.*.moe.router.weight", "model.layers.*.mlp.gate.weight"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.mlp.experts.*.gate_proj.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.mlp.experts.*.up_proj.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.mlp.experts.*.down_proj.*"},
    {"layers.*.moe.shared.gate.*", "model.layers.*.mlp.shared_experts.gate_proj.*"},
    {"layers.*.moe.shared.up.*", "model.layers.*.mlp.shared_experts.up_proj.*"},
    {"layers.*.moe.shared.down.*", "model.layers.*.mlp.shared_experts.down_proj.*"},
};
/// The same in transformers 5's memory. Source: transformers 5.24 conversion_mapping.py, "qwen2_moe".
inline constexpr TensorRow kQwenMoeStacks[] = {
    {"layers.*.moe.experts.#.{gate,up}.weight", "model.layers.*.mlp.experts.gate_up_proj"},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

/// Of layers behind the model's that predict further tokens (model.mtp), what no other layer has.
inline constexpr TensorRow kMtpRows[] = {
    {"layers.*.embed_norm.*", "model.layers.*.enorm.*"},
    {"layers.*.hidden_norm.*", "model.layers.*.hnorm.*"},
    {"layers.*.project.*", "model.layers.*.eh_proj.*"},
    {"layers.*.norm.*", "model.layers.*.shared_head.norm.*"},
};

/// Two lists of rows as one.
template <size_t kOne, size_t kTwo>
constexpr auto with_rows(const std::array<TensorRow, kOne>& one, const TensorRow (&two)[kTwo]) {
  std::array<TensorRow, kOne + kTwo> out{};
  std::copy(one.begin(), one.end(), out.begin());
  std::copy(std::begin(two), std::end(two), out.begin() + kOne);
  return out;
}

/// `own` with Llama's prefix, and Llama's base, tensors and ignored ones where it has none.
Family llama_like(Family own);

}  // namespace cairn::convert
