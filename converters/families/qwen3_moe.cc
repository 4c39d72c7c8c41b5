// Qwen3 with experts in every layer. Source: transformers models/qwen3_moe.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qk_norm = QkNorm::kHead;
  return m;
}

/// The weights of a token's experts are divided by their sum, or left as the softmax gave them.
ConfigKey renormalise() {
  return {{"norm_topk_prob"},
          [](ConfigReader& in, ModelConfig& m) { m.moe.renormalise = in.boolean("norm_topk_prob", false); },
          [](const ModelConfig& m, nlohmann::ordered_json& out) { out["norm_topk_prob"] = m.moe.renormalise; }};
}

/// Of all layers or of none: unlike Qwen3's, the class does not look at max_window_layers.
ConfigKey switched_window() {
  return {{"use_sliding_window", "sliding_window", "max_window_layers"},
          [](ConfigReader& in, ModelConfig& m) {
            if (!in.boolean("use_sliding_window", false)) return;
            m.sliding_window = in.integer("sliding_window", 4096);
            if (m.sliding_window < 1) in.invalid(fmt::format("sliding_window = {} must be positive", m.sliding_window));
          },
          [](const ModelConfig& m, nlohmann::ordered_json& out) {
            out["use_sliding_window"] = m.sliding_window > 0;
            out["sliding_window"] = m.sliding_window > 0 ? nlohmann::ordered_json(m.sliding_window) : nullptr;
          }};
}

/// The class can give some layers a plain MLP of intermediate_size. Where none has one, the size means nothing.
constexpr int64_t kUnusedFfn = 6144;

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.q_norm.*", "model.layers.*.self_attn.q_norm.*"},
    {"layers.*.attn.k_norm.*", "model.layers.*.self_attn.k_norm.*"},
    {"layers.*.moe.router.*", "model.layers.*.mlp.gate.*"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.mlp.experts.*.gate_proj.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.mlp.experts.*.up_proj.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.mlp.experts.*.down_proj.*"},
});

/// In transformers 5's memory. Source: transformers 5.24 conversion_mapping.py, "qwen2_moe".
constexpr TensorRow kAlso[] = {
    {"layers.*.moe.experts.#.{gate,up}.weight", "model.layers.*.mlp.experts.gate_up_proj"},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

}  // namespace

Family qwen3_moe_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 151936,
                       .width = 2048,
                       .ffn = 768,
                       .layers = 24,
                       .kv_heads = 4,
                       .has_head_dim = HeadDim::kIfUnusual,
                       .context = 32768,
                       .ffn_key = "moe_intermediate_size"},
                      {biases("attention_bias", kQkv | kOut, false), switched_window(), experts("num_experts", 128, 8),
                       renormalise(), only("decoder_sparse_step", 1), only("mlp_only_layers", nlohmann::json::array()),
                       constant("intermediate_size", kUnusedFfn)});
  return llama_like({.model_type = "qwen3_moe",
                     .architecture = "Qwen3MoeForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso});
}

}  // namespace cairn::convert
