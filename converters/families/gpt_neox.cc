// GPT-NeoX, Pythia. Source: transformers models/gpt_neox.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m;
  return m;
}

/// x + attention(norm x) + mlp(norm' x), or one after the other.
ConfigKey parallel_residual() {
  return {{"use_parallel_residual"},
          [](ConfigReader& in, M& m) {
            m.block = in.boolean("use_parallel_residual", true) ? BlockKind::kParallel : BlockKind::kPreNorm;
          },
          [](const M& m, ordered_json& out) { out["use_parallel_residual"] = m.block == BlockKind::kParallel; }};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50432),
      size("hidden_size", &M::width, 6144),
      size("num_hidden_layers", &M::layers, 44),
      size("num_attention_heads", &M::heads, 64),
      divided_heads(),
      size("intermediate_size", &M::ffn, 24576),
      activation("hidden_act", "gelu", plain_activations()),
      size("max_position_embeddings", &M::context, 2048),
      number("layer_norm_eps", &M::norm_eps, 1e-5),
      rope({.base = "rotary_emb_base", .partial = "rotary_pct", .absent_partial = 0.25}),
      parallel_residual(),
      biases("attention_bias", kQkv | kOut, true),
      dropout("attention_dropout", &M::attention_dropout),
      dropout("hidden_dropout", &M::residual_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "gpt_neox.embed_in.weight"},
    {"layers.*.attn_norm.*", "gpt_neox.layers.*.input_layernorm.*"},
    {"layers.*.attn.{q,k,v}.*", "gpt_neox.layers.*.attention.query_key_value.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "gpt_neox.layers.*.attention.dense.*"},
    {"layers.*.mlp_norm.*", "gpt_neox.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.up.*", "gpt_neox.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "gpt_neox.layers.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "gpt_neox.final_layer_norm.*"},
    {"head.weight", "embed_out.weight"},
};

constexpr std::string_view kIgnored[] = {"gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias",
                                         "gpt_neox.layers.*.attention.rotary_emb.inv_freq"};

}  // namespace

Family gpt_neox_family() {
  return {.model_type = "gpt_neox",
          .architecture = "GPTNeoXForCausalLM",
          .prefix = "gpt_neox.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
