// Mixtral. Source: transformers models/mixtral.
#include <fmt/format.h>

#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m;
  m.norm = NormKind::kRmsNorm;
  m.bias = false;
  m.moe.experts = 8;
  return m;
}

constexpr int64_t kMaxExperts = 1 << 16;  // as the recipe's schema has it

ConfigKey experts() {
  return {{"num_local_experts", "num_experts", "num_experts_per_tok", "router_aux_loss_coef"},
          [](ConfigReader& in, M& m) {
            const int64_t alias = in.integer("num_experts", 8);  // transformers 5 has both names
            m.moe.experts = in.integer("num_local_experts", alias);
            if (in.find("num_experts") != nullptr && alias != m.moe.experts) {
              in.invalid(
                  fmt::format("num_local_experts = {} and num_experts = {} are two names of one number, and disagree",
                              m.moe.experts, alias));
            }
            m.moe.top_k = in.integer("num_experts_per_tok", 2);
            m.moe.aux_loss = in.number("router_aux_loss_coef", 0.001);
            if (m.moe.experts > kMaxExperts) {
              in.invalid(fmt::format("num_local_experts = {} is out of range, 1 to {}", m.moe.experts, kMaxExperts));
            } else if (m.moe.experts < 1 || m.moe.top_k < 1 || m.moe.top_k > m.moe.experts) {
              in.invalid(
                  fmt::format("num_experts_per_tok = {} of num_local_experts = {}: each token takes at least one "
                              "expert and at most all",
                              m.moe.top_k, m.moe.experts));
            }
          },
          [](const M& m, ordered_json& out) {
            out["num_local_experts"] = m.moe.experts;
            out["num_experts_per_tok"] = m.moe.top_k;
            out["router_aux_loss_coef"] = m.moe.aux_loss;
          }};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 32000),
      size("hidden_size", &M::width, 4096),
      size("intermediate_size", &M::ffn, 14336),
      size("num_hidden_layers", &M::layers, 32),
      size("num_attention_heads", &M::heads, 32),
      size("num_key_value_heads", &M::kv_heads, 8),
      head_dim(0),
      activation("hidden_act", "silu", gated_activations()),
      size("max_position_embeddings", &M::context, 131072),
      number("rms_norm_eps", &M::norm_eps, 1e-5),
      rope({.absent_base = 1e6}),
      sliding_window(0),
      experts(),
      dropout("attention_dropout", &M::attention_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
      constant("router_jitter_noise", 0.0),
      constant("output_router_logits", false),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "model.embed_tokens.weight"},
    {"layers.*.attn_norm.*", "model.layers.*.input_layernorm.*"},
    {"layers.*.attn.q.*", "model.layers.*.self_attn.q_proj.*"},
    {"layers.*.attn.k.*", "model.layers.*.self_attn.k_proj.*"},
    {"layers.*.attn.v.*", "model.layers.*.self_attn.v_proj.*"},
    {"layers.*.attn.o.*", "model.layers.*.self_attn.o_proj.*"},
    {"layers.*.mlp_norm.*", "model.layers.*.post_attention_layernorm.*"},
    {"layers.*.moe.router.*", "model.layers.*.block_sparse_moe.gate.*"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.block_sparse_moe.experts.*.w1.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.block_sparse_moe.experts.*.w3.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.block_sparse_moe.experts.*.w2.*"},
    {"final_norm.*", "model.norm.*"},
    {"head.weight", "lm_head.weight"},
};

/// In transformers 5's memory the experts of a layer are stacked, gate above up. Source: transformers 5.24
/// conversion_mapping.py, "mixtral".
constexpr TensorRow kAlso[] = {
    {"layers.*.moe.router.*", "model.layers.*.mlp.gate.*"},
    {"layers.*.moe.experts.#.{gate,up}.weight", "model.layers.*.mlp.experts.gate_up_proj"},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

constexpr std::string_view kIgnored[] = {"model.layers.*.self_attn.rotary_emb.inv_freq"};

}  // namespace

Family mixtral_family() {
  return {.model_type = "mixtral",
          .architecture = "MixtralForCausalLM",
          .prefix = "model.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .also = kAlso,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
