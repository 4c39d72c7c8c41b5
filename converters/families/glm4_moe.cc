// GLM-4.5, 4.6 and Air: dense layers first, then experts behind DeepSeek-V3's router. Source: transformers
// models/glm4_moe.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

/// Norms of q and of k, head by head.
ConfigKey normed_heads() {
  return {{"use_qk_norm"},
          [](ConfigReader& in, ModelConfig& m) {
            m.qk_norm = in.boolean("use_qk_norm", false) ? QkNorm::kHead : QkNorm::kNone;
          },
          [](const ModelConfig& m, nlohmann::ordered_json& out) { out["use_qk_norm"] = m.qk_norm == QkNorm::kHead; }};
}

constexpr int64_t kDenseFfn = 10944;

constexpr auto kTensors = with_rows(with_llama_rows(kQkNormRows, kExpertRows), kMtpRows);

}  // namespace

Family glm4_moe_family() {
  static const std::vector<ConfigKey> kKeys = [] {
    std::vector<ConfigKey> own = {
        biases("attention_bias", kQkv, false),
        normed_heads(),
        expert_width("moe_intermediate_size", 1408, kDenseFfn),
        experts({.count = "n_routed_experts", .alias = "num_local_experts", .absent = 128, .absent_top_k = 8}),
        shared_experts("n_shared_experts", 1),
        first_dense("first_k_dense_replace", 1),
        renormalised_experts(true)};
    for (ConfigKey& key : grouped_router()) own.push_back(std::move(key));
    own.push_back(further_tokens("num_nextn_predict_layers"));
    own.push_back(unread({"num_mtp_layers", "output_router_logits"}));
    return llama_like_keys({.vocab = 151552,
                            .width = 4096,
                            .ffn = kDenseFfn,
                            .layers = 46,
                            .heads = 96,
                            .kv_heads = 8,
                            .context = 131072,
                            .norm_eps = 1e-5,
                            .rope = {.partial = "partial_rotary_factor", .absent_partial = 0.5}},
                           own);
  }();
  Family out =
      llama_like({.model_type = "glm4_moe", .architecture = "Glm4MoeForCausalLM", .keys = kKeys, .tensors = kTensors});
  out.also = kQwenMoeStacks;
  out.later_layers = "model.layers.";
  return out;
}

}  // namespace cairn::convert
