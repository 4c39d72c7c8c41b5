// Qwen3 with experts, in some layers or in all. Source: transformers models/qwen3_moe.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.qk_norm = QkNorm::kHead;
  return m;
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

/// The size of layers without experts. Where there are none, it means nothing.
constexpr int64_t kDenseFfn = 6144;

constexpr auto kTensors = with_llama_rows(kQkNormRows, kExpertRows);

}  // namespace

Family qwen3_moe_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 151936,
                       .width = 2048,
                       .ffn = kDenseFfn,
                       .layers = 24,
                       .kv_heads = 4,
                       .has_head_dim = HeadDim::kIfUnusual,
                       .context = 32768},
                      {biases("attention_bias", kQkv | kOut, false), switched_window(),
                       expert_width("moe_intermediate_size", 768, kDenseFfn), experts("num_experts", 128, 8),
                       renormalised_experts(), sparse_steps()});
  return llama_like({.model_type = "qwen3_moe",
                     .architecture = "Qwen3MoeForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kQwenMoeStacks});
}

}  // namespace cairn::convert
