// GPT-J. Source: transformers models/gptj.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.block = BlockKind::kParallelShared;
  m.rope.pairs = RotaryPairs::kInterleaved;
  m.bias = false;
  m.mlp_bias = true;
  m.head_bias = true;
  return m;
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50400),
      size("n_positions", "max_position_embeddings", &M::context, 2048),
      size("n_embd", "hidden_size", &M::width, 4096),
      size("n_layer", "num_hidden_layers", &M::layers, 28),
      size("n_head", "num_attention_heads", &M::heads, 16),
      divided_heads(),
      rotary_dim(64),
      size("n_inner", &M::ffn, [](const M& m) { return 4 * m.width; }),
      activation("activation_function", "gelu_new", plain_activations()),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      dropout("embd_pdrop", &M::embedding_dropout),
      dropout("attn_pdrop", &M::attention_dropout),
      dropout("resid_pdrop", &M::residual_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
      unread({"summary_use_proj", "summary_proj_to_labels", "scale_attn_weights", "rotary"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.wte.weight"},
    {"layers.*.attn_norm.*", "transformer.h.*.ln_1.*"},
    {"layers.*.attn.q.*", "transformer.h.*.attn.q_proj.*"},
    {"layers.*.attn.k.*", "transformer.h.*.attn.k_proj.*"},
    {"layers.*.attn.v.*", "transformer.h.*.attn.v_proj.*"},
    {"layers.*.attn.o.*", "transformer.h.*.attn.out_proj.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.fc_in.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.fc_out.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.*", "lm_head.*"},
};

constexpr std::string_view kIgnored[] = {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"};

}  // namespace

Family gptj_family() {
  return {.model_type = "gptj",
          .architecture = "GPTJForCausalLM",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
