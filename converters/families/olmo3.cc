// OLMo 3: OLMo 2 with windows in three of four layers, whose rotary positions are never scaled. Source: transformers
// models/olmo3.
#include <fmt/format.h>

#include "converters/olmo_like.h"

namespace cairn::convert {
namespace {

constexpr auto kTensors = with_llama_rows(kOutNormRows);

std::string beyond_4(const ModelConfig& m) {
  if (m.window_rope_theta == 0 || m.window_rope_theta == m.rope_theta) return "";
  return fmt::format("4.x turns layers with a window by rope_theta = {} too, not by {}", m.rope_theta,
                     m.window_rope_theta);
}

}  // namespace

Family olmo3_family() {
  static const std::vector<ConfigKey> kKeys = [] {
    std::vector<ConfigKey> out =
        llama_like_keys({.vocab = 50304, .has_head_dim = HeadDim::kIfUnusual, .norm_eps = 1e-5},
                        {biases("attention_bias", kQkv | kOut, false), windows_by_pattern({})});
    // Of a file in the 4.x form transformers 5 gives the layers with a window 500000, whatever rope_theta says.
    const ConfigKey by_layer =
        rope({.absent_base = 10000, .absent_base_5 = 500000, .old_type_counts = false}, {.fixed_5 = 500000});
    for (ConfigKey& key : out) {
      if (!key.names.empty() && key.names.front() == "rope_theta") key = by_layer;
    }
    return out;
  }();
  return llama_like({.model_type = "olmo3",
                     .architecture = "Olmo3ForCausalLM",
                     .base = olmo2_base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .beyond_4 = beyond_4});
}

}  // namespace cairn::convert
