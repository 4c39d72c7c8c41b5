// StableLM 3B, 2 1.6B and 12B: Llama with LayerNorm and a part of each head turning. Source: transformers
// models/stablelm.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.bias = false;
  return m;
}

/// Attention and MLP side by side behind one norm, or one after the other.
ConfigKey parallel_residual() {
  return {{"use_parallel_residual"},
          [](ConfigReader& in, M& m) {
            if (in.boolean("use_parallel_residual", false)) m.block = BlockKind::kParallelShared;
          },
          [](const M& m, nlohmann::ordered_json& out) {
            out["use_parallel_residual"] = m.block == BlockKind::kParallelShared;
          }};
}

/// LayerNorm of each head of q and k, without biases.
ConfigKey head_norms() {
  return {{"qk_layernorm"},
          [](ConfigReader& in, M& m) {
            if (in.boolean("qk_layernorm", false)) m.qk_norm = QkNorm::kHeadLayerNorm;
          },
          [](const M& m, nlohmann::ordered_json& out) { out["qk_layernorm"] = m.qk_norm == QkNorm::kHeadLayerNorm; }};
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_layernorm.norms.#.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_layernorm.norms.#.*"},
});

}  // namespace

Family stablelm_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 50304,
                       .width = 2560,
                       .ffn = 6912,
                       .kv_heads = 32,
                       .has_head_dim = HeadDim::kDivided,
                       .context = 4096,
                       .norm_eps = 1e-5,
                       .rope = {.partial = "partial_rotary_factor", .absent_partial = 0.25},
                       .norm_eps_key = "layer_norm_eps"},
                      {biases("use_qkv_bias", kQkv, false), head_norms(), parallel_residual(),
                       dropout("hidden_dropout", &M::residual_dropout),
                       // Published files have these; the class looks at none of them.
                       refuse_unless("rotary_scaling_factor", 1), unread({"norm_eps"})});
  return llama_like({.model_type = "stablelm",
                     .architecture = "StableLmForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
