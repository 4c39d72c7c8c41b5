// SmolLM3: Llama with layers whose heads do not turn. Source: transformers models/smollm3.
#include <fmt/format.h>

#include "converters/llama_like.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;

/// The class could put a window on the layers that do not turn.
ConfigKey no_window() {
  ConfigKey out = only("use_sliding_window", false);
  out.names.insert(out.names.end(), {"sliding_window", "layer_types", "max_window_layers"});
  out.read = [plain = out.read](ConfigReader& in, M& m) {
    plain(in, m);
    const json* types = in.find("layer_types");
    if (types != nullptr && !types->is_array()) {
      return in.invalid(fmt::format("layer_types must be a list of {} strings, got {}", m.layers, json_text(*types)));
    }
    for (size_t layer = 0; types != nullptr && layer < types->size(); ++layer) {
      if ((*types)[layer] == "full_attention") continue;
      in.unsupported(fmt::format("layer_types[{}] = {}: windows of this family are not supported here", layer,
                                 json_text((*types)[layer])));
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
