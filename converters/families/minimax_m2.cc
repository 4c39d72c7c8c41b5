// MiniMax-M2: Mixtral's names, norms of whole q and k, sigmoids with biases of the choice. Source: transformers 5
// models/minimax_m2; 4.x has no class.
#include <fmt/format.h>

#include <cmath>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qk_norm = QkNorm::kWhole;
  m.moe.router = RouterKind::kSigmoid;
  m.moe.choice_bias = true;
  return m;
}

/// The published files say how many channels turn, the class how large a part.
ConfigKey turning_channels() {
  return {{"rotary_dim"},
          [](ConfigReader& in, ModelConfig& m) {
            const int64_t dims = in.integer("rotary_dim", m.rope.dims);
            if (dims == m.rope.dims) return;
            const bool stated = in.contains("partial_rotary_factor") || in.contains("rope_parameters");
            if (stated) return in.invalid(fmt::format("rotary_dim = {}, and {} channels turn", dims, m.rope.dims));
            m.rope.dims = dims;
            if (dims < 2 || dims > m.head_dim) {
              in.invalid(fmt::format("rotary_dim = {} must be at least 2 and at most the {} channels of a head", dims,
                                     m.head_dim));
            }
          },
          [](const ModelConfig& m, nlohmann::ordered_json& out) {
            out["rotary_dim"] = m.rope.dims > 0 ? m.rope.dims : m.head_dim;
          }};
}

/// The class weighs softmaxes of the logits, which its router does not look at: no loss of this runtime's.
ConfigKey unbalanced() {
  return {{"router_aux_loss_coef", "output_router_logits"},
          [](ConfigReader& in, ModelConfig&) {
            if (in.boolean("output_router_logits", false)) {
              in.note("output_router_logits = true: the class's loss is of softmaxes beside sigmoids; left out");
            }
          },
          [](const ModelConfig&, nlohmann::ordered_json& out) {
            out["router_aux_loss_coef"] = 0.001;
            out["output_router_logits"] = false;
          }};
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_norm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_norm.*"},
    {"layers.*.moe.router.bias", "model.layers.*.block_sparse_moe.e_score_correction_bias"},
    {"layers.*.moe.router.weight", "model.layers.*.block_sparse_moe.gate.weight"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.block_sparse_moe.experts.*.w1.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.block_sparse_moe.experts.*.w3.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.block_sparse_moe.experts.*.w2.*"},
});

/// In transformers 5's memory. Source: transformers 5.24 conversion_mapping.py, "minimax_m2".
constexpr TensorRow kAlso[] = {
    {"layers.*.moe.router.bias", "model.layers.*.mlp.e_score_correction_bias"},
    {"layers.*.moe.router.weight", "model.layers.*.mlp.gate.weight"},
    kQwenMoeStacks[0],
    kQwenMoeStacks[1],
};

}  // namespace

Family minimax_m2_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 200064,
       .width = 3072,
       .ffn = 1536,
       .layers = 62,
       .heads = 48,
       .kv_heads = 8,
       .head_dim = 128,
       .context = 196608,
       .rope = {.partial = "partial_rotary_factor", .absent_base = 5000000.0, .old_type_counts = false}},
      {turning_channels(),
       experts({.count = "num_local_experts", .alias = "num_experts", .absent = 256, .absent_top_k = 8}), unbalanced(),
       only("use_qk_norm", true), only("qk_norm_type", "per_layer"), only("scoring_func", "sigmoid"),
       only("use_routing_bias", true), refuse_unless("shared_intermediate_size", 0), constant("num_mtp_modules", 0),
       unread({"use_mtp", "mtp_transformer_layers", "attn_type_list"})},
      {constant("router_jitter_noise", 0.0)});
  return llama_like({.model_type = "minimax_m2",
                     .architecture = "MiniMaxM2ForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso,
                     .since_5 = true});
}

}  // namespace cairn::convert
