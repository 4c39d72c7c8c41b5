// Command R: attention and MLP side by side behind a LayerNorm without bias, scaled logits. Source: transformers
// models/cohere.
#include "converters/cohere_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

/// LayerNorm of each head of q and k (Command R+).
ConfigKey head_norms() {
  return {{"use_qk_norm"},
          [](ConfigReader& in, M& m) {
            if (in.boolean("use_qk_norm", false)) m.qk_norm = QkNorm::kHeadLayerNorm;
          },
          [](const M& m, nlohmann::ordered_json& out) { out["use_qk_norm"] = m.qk_norm == QkNorm::kHeadLayerNorm; }};
}

constexpr auto kTensors = with_llama_rows(kQkNormRows);

}  // namespace

Family cohere_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      cohere_defaults({.absent_base = 10000, .absent_base_5 = 500000, .old_type_counts = false}),
      {factor("logit_scale", &M::logit_scale, 0.0625), head_norms(), biases("attention_bias", kQkv | kOut, false),
       // Published files have these; the class looks at none of them.
       refuse_unless("position_embedding_type", "rope_gptj")});
  return llama_like({.model_type = "cohere",
                     .architecture = "CohereForCausalLM",
                     .base = cohere_base,
                     .keys = kKeys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
