// SmolLM3: Llama with layers whose heads do not turn. Source: transformers models/smollm3.
#include <fmt/format.h>

#include "converters/llama_like.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

/// no_rope_layers has 1 for a layer that turns and 0 for one that does not.
ConfigKey turning_layers() {
  return {{"no_rope_layers", "no_rope_layer_interval"},
          [](ConfigReader& in, M& m) {
            const int64_t interval = in.integer("no_rope_layer_interval", 4);
            const json* stated = in.find("no_rope_layers");
            if (interval < 1) return in.invalid(fmt::format("no_rope_layer_interval = {} must be positive", interval));
            if (stated != nullptr && (!stated->is_array() || static_cast<int64_t>(stated->size()) != m.layers)) {
              return in.invalid(fmt::format("no_rope_layers must be a list of {} numbers, 1 or 0", m.layers));
            }
            for (int64_t layer = 0; layer < m.layers; ++layer) {
              const json turns = stated == nullptr ? json((layer + 1) % interval != 0 ? 1 : 0) : (*stated)[layer];
              if (turns != 0 && turns != 1) {
                return in.invalid(fmt::format("no_rope_layers[{}] = {} must be 1 or 0", layer, turns.dump()));
              }
              if (turns == 0) m.nope_layers.push_back(layer);
            }
          },
          [](const M& m, ordered_json& out) {
            ordered_json turns = ordered_json::array();
            for (int64_t layer = 0; layer < m.layers; ++layer) turns.push_back(has_rotary(m, layer) ? 1 : 0);
            out["no_rope_layers"] = turns;
            out["no_rope_layer_interval"] = 4;
          }};
}

/// The class could put a window on the layers that do not turn.
ConfigKey no_window() {
  ConfigKey out = only("use_sliding_window", false);
  out.names.insert(out.names.end(), {"sliding_window", "layer_types"});
  out.read = [plain = out.read](ConfigReader& in, M& m) {
    plain(in, m);
    const json* types = in.find("layer_types");
    for (size_t layer = 0; types != nullptr && layer < types->size(); ++layer) {
      if ((*types)[layer] == "full_attention") continue;
      in.unsupported(fmt::format("layer_types[{}] = {}: windows of this family are not supported here", layer,
                                 (*types)[layer].dump()));
    }
  };
  return out;
}

}  // namespace

Family smollm3_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 128256,
       .width = 2048,
       .layers = 36,
       .heads = 16,
       .kv_heads = 4,
       .has_head_dim = HeadDim::kIfUnusual,
       .context = 32768,
       .rope = {.absent_base = 2e6},
       .tied = true},
      {biases("attention_bias", kQkv | kOut, false), biases("mlp_bias", kMlp, false), turning_layers(), no_window()});
  return llama_like({.model_type = "smollm3", .architecture = "SmolLM3ForCausalLM", .keys = kKeys});
}

}  // namespace cairn::convert
