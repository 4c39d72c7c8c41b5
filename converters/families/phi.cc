// Phi-1, 1.5 and 2: one norm for attention and MLP side by side, biases everywhere, also on the head. Source:
// transformers models/phi.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.block = BlockKind::kParallelShared;
  m.head_bias = true;
  return m;
}

/// LayerNorms of heads, one for those of q and one for those of k.
ConfigKey head_norms() {
  return {{"qk_layernorm"},
          [](ConfigReader& in, M& m) {
            if (in.boolean("qk_layernorm", false)) m.qk_norm = QkNorm::kSharedLayerNorm;
          },
          [](const M& m, nlohmann::ordered_json& out) { out["qk_layernorm"] = m.qk_norm == QkNorm::kSharedLayerNorm; }};
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_layernorm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_layernorm.*"},
    {"layers.*.attn.o.*", "model.layers.*.self_attn.dense.*"},
    {"layers.*.mlp.up.*", "model.layers.*.mlp.fc1.*"},
    {"layers.*.mlp.down.*", "model.layers.*.mlp.fc2.*"},
    {"final_norm.*", "model.final_layernorm.*"},
    {"head.*", "lm_head.*"},
});

}  // namespace

Family phi_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 51200,
       .width = 2048,
       .ffn = 8192,
       .layers = 24,
       .has_head_dim = HeadDim::kIfUnusual,
       .activation = "gelu_new",
       .gated = false,
       .norm_eps = 1e-5,
       .rope = {.partial = "partial_rotary_factor", .absent_partial = 0.5},
       .norm_eps_key = "layer_norm_eps"},
      {head_norms(), dropout("resid_pdrop", &M::residual_dropout), dropout("embd_pdrop", &M::embedding_dropout)});
  return llama_like(
      {.model_type = "phi", .architecture = "PhiForCausalLM", .base = base, .keys = kKeys, .tensors = kTensors});
}

}  // namespace cairn::convert
