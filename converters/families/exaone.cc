// EXAONE 3 and 3.5: Llama under names of its own. Source: transformers 5.24 models/exaone and conversion_mapping.py,
// "exaone"; 4.x has no class for it.
#include <fmt/format.h>

#include "converters/llama_like.h"
#include "runtime/json/json.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

/// The value of a key that has two names, of which transformers 5 reads either.
const nlohmann::json* either(ConfigReader& in, const char* name, const char* alias) {
  const nlohmann::json *const one = in.find(name), *const other = in.find(alias);
  if (one != nullptr && other != nullptr && *one != *other) {
    in.invalid(fmt::format("{} = {} and {} = {} are two names of one value, and disagree", name, json_text(*one), alias,
                           json_text(*other)));
  }
  return one != nullptr ? one : other;
}

ConfigKey norm_eps() {
  return {{"layer_norm_epsilon", "rms_norm_eps"},
          [](ConfigReader& in, M& m) {
            const bool alias = either(in, "layer_norm_epsilon", "rms_norm_eps") == in.find("rms_norm_eps");
            m.norm_eps = in.number(alias ? "rms_norm_eps" : "layer_norm_epsilon", 1e-5);
          },
          [](const M& m, ordered_json& out) { out["layer_norm_epsilon"] = m.norm_eps; }};
}

ConfigKey named_activation() {
  ConfigKey out = activation("activation_function", "silu", gated_activations());
  out.names.push_back("hidden_act");
  out.read = [own = out.read, alias = activation("hidden_act", "silu", gated_activations()).read](ConfigReader& in,
                                                                                                  M& m) {
    const bool by_alias = either(in, "activation_function", "hidden_act") == in.find("hidden_act");
    (by_alias ? alias : own)(in, m);
  };
  return out;
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 102400),
      size("hidden_size", &M::width, 4096),
      size("intermediate_size", &M::ffn, 14336),
      size("num_layers", "num_hidden_layers", &M::layers, 32),
      size("num_attention_heads", &M::heads, 32),
      kv_heads(8),
      head_dim(0),
      named_activation(),
      size("max_position_embeddings", &M::context, 4096),
      norm_eps(),
      rope({.absent_base = 500000.0, .old_type_counts = false}),
      biases("attention_bias", kQkv | kOut, false),
      biases("mlp_bias", kMlp, false),
      dropout("attention_dropout", &M::attention_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
      unread({"embed_dropout"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.wte.weight"},
    {"layers.*.attn_norm.*", "transformer.h.*.ln_1.*"},
    {"layers.*.attn.q.*", "transformer.h.*.attn.attention.q_proj.*"},
    {"layers.*.attn.k.*", "transformer.h.*.attn.attention.k_proj.*"},
    {"layers.*.attn.v.*", "transformer.h.*.attn.attention.v_proj.*"},
    {"layers.*.attn.o.*", "transformer.h.*.attn.attention.out_proj.*"},
    {"layers.*.mlp_norm.*", "transformer.h.*.ln_2.*"},
    {"layers.*.mlp.gate.*", "transformer.h.*.mlp.c_fc_0.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.c_fc_1.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.c_proj.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

/// In transformers 5's memory the names are Llama's, the head's too. Source: transformers 5.24 conversion_mapping.py.
constexpr std::span<const TensorRow> kAlso = std::span(kLlamaRows).first(std::size(kLlamaRows) - 1);
static_assert(kLlamaRows[std::size(kLlamaRows) - 1].logical == "head.weight");

}  // namespace

Family exaone_family() {
  return {.model_type = "exaone",
          .architecture = "ExaoneForCausalLM",
          .prefix = "transformer.",
          .base = llama_like_base,
          .keys = keys(),
          .tensors = kTensors,
          .also = kAlso,
          .last_choice = true,
          .since_5 = true};
}

}  // namespace cairn::convert
