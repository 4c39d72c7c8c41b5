// Llama 2 and 3, and the many models that use their class. Source: transformers models/llama.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.norm = NormKind::kRmsNorm;
  m.bias = false;
  return m;
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 32000),
      size("hidden_size", &M::width, 4096),
      size("intermediate_size", &M::ffn, 11008),
      size("num_hidden_layers", &M::layers, 32),
      size("num_attention_heads", &M::heads, 32),
      size("num_key_value_heads", &M::kv_heads, [](const M& m) { return m.heads; }),
      head_dim(0),
      activation("hidden_act", "silu", gated_activations()),
      size("max_position_embeddings", &M::context, 2048),
      number("rms_norm_eps", &M::norm_eps, 1e-6),
      rope(),
      biases("attention_bias", kQkv | kOut, false),
      biases("mlp_bias", kMlp, false),
      dropout("attention_dropout", &M::attention_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
      constant("pretraining_tp", 1),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "model.embed_tokens.weight"},
    {"layers.*.attn_norm.*", "model.layers.*.input_layernorm.*"},
    {"layers.*.attn.q.*", "model.layers.*.self_attn.q_proj.*"},
    {"layers.*.attn.k.*", "model.layers.*.self_attn.k_proj.*"},
    {"layers.*.attn.v.*", "model.layers.*.self_attn.v_proj.*"},
    {"layers.*.attn.o.*", "model.layers.*.self_attn.o_proj.*"},
    {"layers.*.mlp_norm.*", "model.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.gate.*", "model.layers.*.mlp.gate_proj.*"},
    {"layers.*.mlp.up.*", "model.layers.*.mlp.up_proj.*"},
    {"layers.*.mlp.down.*", "model.layers.*.mlp.down_proj.*"},
    {"final_norm.*", "model.norm.*"},
    {"head.weight", "lm_head.weight"},
};

constexpr std::string_view kIgnored[] = {"model.layers.*.self_attn.rotary_emb.inv_freq"};

}  // namespace

Family llama_family() {
  return {.model_type = "llama",
          .architecture = "LlamaForCausalLM",
          .prefix = "model.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
