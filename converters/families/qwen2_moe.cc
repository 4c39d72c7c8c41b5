// Qwen1.5-MoE and Qwen2-MoE: beside the experts an MLP with a gate of its own. Source: transformers models/qwen2_moe.
#include <fmt/format.h>

#include "converters/llama_like.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.moe.shared_gate = true;
  return m;
}

/// The lines make other layers of the same keys, so that no window can be meant.
ConfigKey no_window() {
  return {{"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
          [](ConfigReader& in, ModelConfig&) {
            if (in.boolean("use_sliding_window", false)) {
              in.unsupported(
                  "use_sliding_window = true: transformers 4 gives the window to the layers from max_window_layers on, "
                  "transformers 5 to every second one before it");
            }
          },
          [](const ModelConfig&, nlohmann::ordered_json& out) { out["use_sliding_window"] = false; }};
}

ConfigKey shared_width() {
  constexpr const char* kName = "shared_expert_intermediate_size";
  return {{kName},
          [=](ConfigReader& in, ModelConfig& m) {
            m.moe.shared_ffn = in.integer(kName, 5632);
            if (m.moe.shared_ffn < 1 || m.moe.shared_ffn > (1 << 22)) {
              in.invalid(fmt::format("{} = {} is out of range, 1 to {}", kName, m.moe.shared_ffn, 1 << 22));
            }
          },
          [=](const ModelConfig& m, nlohmann::ordered_json& out) { out[kName] = shared_ffn(m); }};
}

constexpr int64_t kDenseFfn = 5632;

constexpr TensorRow kSharedRows[] = {
    {"layers.*.moe.shared.gate.*", "model.layers.*.mlp.shared_expert.gate_proj.*"},
    {"layers.*.moe.shared.up.*", "model.layers.*.mlp.shared_expert.up_proj.*"},
    {"layers.*.moe.shared.down.*", "model.layers.*.mlp.shared_expert.down_proj.*"},
    {"layers.*.moe.shared_gate.*", "model.layers.*.mlp.shared_expert_gate.*"},
};
constexpr auto kTensors = with_llama_rows(kSharedRows, kExpertRows);

}  // namespace

Family qwen2_moe_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 151936,
       .width = 2048,
       .ffn = kDenseFfn,
       .layers = 24,
       .heads = 16,
       .kv_heads = 16,
       .has_head_dim = HeadDim::kIfUnusual,
       .context = 32768},
      {biases("qkv_bias", kQkv, true), no_window(), expert_width("moe_intermediate_size", 1408, kDenseFfn),
       shared_width(), experts("num_experts", 60, 4), renormalised_experts(), sparse_steps()});
  return llama_like({.model_type = "qwen2_moe",
                     .architecture = "Qwen2MoeForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kQwenMoeStacks});
}

}  // namespace cairn::convert
