// Mixtral. Source: transformers models/mixtral.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m = llama_like_base();
  m.moe.experts = 8;
  return m;
}

constexpr int64_t kMaxExperts = 1 << 16;  // as the recipe's schema has it

ConfigKey experts() {
  return {{"num_local_experts", "num_experts", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"},
          [](ConfigReader& in, M& m) {
            const int64_t alias = in.integer("num_experts", 8);  // transformers 5 has both names
            m.moe.experts = in.integer("num_local_experts", alias);
            if (in.find("num_experts") != nullptr && alias != m.moe.experts) {
              in.invalid(
                  fmt::format("num_local_experts = {} and num_experts = {} are two names of one number, and disagree",
                              m.moe.experts, alias));
            }
            m.moe.top_k = in.integer("num_experts_per_tok", 2);
            const double coefficient = in.number("router_aux_loss_coef", 0.001);
            if (in.boolean("output_router_logits", false)) m.moe.aux_loss = coefficient;
            m.moe.aux_scope = AuxScope::kModel;
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
            const bool balances = m.moe.aux_loss > 0 && m.moe.aux_scope == AuxScope::kModel;
            out["router_aux_loss_coef"] = m.moe.aux_loss > 0 ? m.moe.aux_loss : 0.001;
            out["output_router_logits"] = balances;  // which switches the loss on
          }};
}

const std::vector<ConfigKey>& last_keys() {
  static const std::vector<ConfigKey> kKeys = {
      constant("router_jitter_noise", 0.0),
  };
  return kKeys;
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.moe.router.*", "model.layers.*.block_sparse_moe.gate.*"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.block_sparse_moe.experts.*.w1.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.block_sparse_moe.experts.*.w3.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.block_sparse_moe.experts.*.w2.*"},
});

/// In transformers 5's memory the experts of a layer are stacked, gate above up. Source: transformers 5.24
/// conversion_mapping.py, "mixtral".
constexpr TensorRow kAlso[] = {
    {"layers.*.moe.router.*", "model.layers.*.mlp.gate.*"},
    {"layers.*.moe.experts.#.{gate,up}.weight", "model.layers.*.mlp.experts.gate_up_proj"},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

}  // namespace

Family mixtral_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.ffn = 14336, .kv_heads = 8, .context = 131072, .norm_eps = 1e-5, .rope = {.absent_base = 1e6}},
                      {sliding_window(0), experts()}, last_keys());
  return llama_like({.model_type = "mixtral",
                     .architecture = "MixtralForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso});
}

}  // namespace cairn::convert
