// GPT-Neo: GPT-2 with scores that are not scaled and windows in some layers. Source: transformers models/gpt_neo.
#include <fmt/format.h>

#include "converters/family_table.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

M base() {
  M m;
  m.qkv_bias = false;
  m.attention_scale = 1;
  return m;
}

/// attention_types, [[[kind, ...], times], ...], a kind a layer: "global", or "local", which sees window_size keys.
/// attention_layers is the same written out, as the class saves it.
class Kinds {
 public:
  static void read(ConfigReader& in, M& m) {
    static const json kAbsent = json::array({json::array({json::array({"global", "local"}), 12})});
    const json* stated = in.find("attention_types");
    json kinds = json::array();
    if (!expand(stated == nullptr ? kAbsent : *stated, m.layers, kinds)) {
      return in.invalid("attention_types must be a list of pairs [list of \"global\" and \"local\", how many times]");
    }
    if (static_cast<int64_t>(kinds.size()) != m.layers) {
      return in.invalid(
          fmt::format("attention_types names {} layers, num_layers = {}",
                      kinds.size() > static_cast<size_t>(m.layers) ? "more" : std::to_string(kinds.size()), m.layers));
    }
    if (const json* layers = in.find("attention_layers"); layers != nullptr && *layers != kinds) {
      return in.invalid("attention_types and attention_layers disagree");
    }
    const int64_t window = in.integer("window_size", 256);
    if (window < 1) return in.invalid(fmt::format("window_size = {} must be positive", window));
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (kinds[layer] == "local") m.window_layers.push_back(layer);
    }
    if (!m.window_layers.empty()) m.sliding_window = window;
  }

  static void write(const M& m, ordered_json& out) {
    ordered_json kinds = ordered_json::array();
    for (int64_t layer = 0; layer < m.layers; ++layer) kinds.push_back(has_window(m, layer) ? "local" : "global");
    out["attention_types"] = {{kinds, 1}};
    out["attention_layers"] = kinds;
    out["window_size"] = m.sliding_window > 0 ? m.sliding_window : 256;
  }

 private:
  /// Stops behind `most` layers: the number of times is a stranger's.
  static bool expand(const json& types, int64_t most, json& kinds) {
    if (!types.is_array()) return false;
    for (const json& type : types) {
      if (!type.is_array() || type.size() != 2 || !type[0].is_array() || type[0].empty() ||
          !type[1].is_number_integer())
        return false;
      for (int64_t time = 0; time < type[1].get<int64_t>() && std::ssize(kinds) <= most; ++time) {
        for (const json& kind : type[0]) {
          if (kind != "global" && kind != "local") return false;
          kinds.push_back(kind);
        }
      }
    }
    return true;
  }
};

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50257),
      size("max_position_embeddings", &M::context, 2048),
      size("hidden_size", &M::width, 2048),
      size("num_layers", "num_hidden_layers", &M::layers, 24),
      size("num_heads", "num_attention_heads", &M::heads, 16),
      divided_heads(),
      {{"attention_types", "attention_layers", "window_size"}, Kinds::read, Kinds::write},
      size("intermediate_size", &M::ffn, [](const M& m) { return 4 * m.width; }),
      activation("activation_function", "gelu_new", plain_activations()),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      dropout("resid_dropout", &M::residual_dropout),
      dropout("embed_dropout", &M::embedding_dropout),
      dropout("attention_dropout", &M::attention_dropout),
      constant("classifier_dropout", 0.1),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("initializer_range", &M::init_std, 0.02),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.wte.weight"},
    {"embed.positions", "transformer.wpe.weight"},
    {"layers.*.attn_norm.*", "transformer.h.*.ln_1.*"},
    {"layers.*.attn.q.*", "transformer.h.*.attn.attention.q_proj.*"},
    {"layers.*.attn.k.*", "transformer.h.*.attn.attention.k_proj.*"},
    {"layers.*.attn.v.*", "transformer.h.*.attn.attention.v_proj.*"},
    {"layers.*.attn.o.*", "transformer.h.*.attn.attention.out_proj.*"},
    {"layers.*.mlp_norm.*", "transformer.h.*.ln_2.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.c_fc.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.c_proj.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

constexpr std::string_view kIgnored[] = {"transformer.h.*.attn.attention.bias",
                                         "transformer.h.*.attn.attention.masked_bias"};

}  // namespace

Family gpt_neo_family() {
  return {.model_type = "gpt_neo",
          .architecture = "GPTNeoForCausalLM",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
