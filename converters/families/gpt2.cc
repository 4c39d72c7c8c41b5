// GPT-2. Source: transformers models/gpt2/{configuration,modeling}_gpt2.py; Conv1D of pytorch_utils.py.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50257),
      size("n_positions", "max_position_embeddings", &M::context, 1024),
      size("n_embd", "hidden_size", &M::width, 768),
      size("n_layer", "num_hidden_layers", &M::layers, 12),
      size("n_head", "num_attention_heads", &M::heads, 12),
      divided_heads(),
      size("n_inner", &M::ffn, [](const M& m) { return 4 * m.width; }),
      activation("activation_function", "gelu_new", plain_activations()),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      scaled_attention(),
      flag("scale_attn_by_inverse_layer_idx", &M::attention_scale_by_layer, false),
      constant("reorder_and_upcast_attn", false),  // the same scores, in float32
      only("add_cross_attention", false),
      dropout("embd_pdrop", &M::embedding_dropout),
      dropout("attn_pdrop", &M::attention_dropout),
      dropout("resid_pdrop", &M::residual_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("initializer_range", &M::init_std, 0.02),
      unread({"n_ctx", "summary_use_proj", "summary_proj_to_labels"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.wte.weight"},
    {"embed.positions", "transformer.wpe.weight"},
    {"layers.*.attn_norm.*", "transformer.h.*.ln_1.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.h.*.attn.c_attn.*", Fuse::kBlocks, true},
    {"layers.*.attn.o.*", "transformer.h.*.attn.c_proj.*", Fuse::kBlocks, true},
    {"layers.*.mlp_norm.*", "transformer.h.*.ln_2.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.c_fc.*", Fuse::kBlocks, true},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.c_proj.*", Fuse::kBlocks, true},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

constexpr std::string_view kIgnored[] = {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias",
                                         "transformer.h.*.crossattention.bias"};

}  // namespace

Family gpt2_family() {
  return {.model_type = "gpt2",
          .architecture = "GPT2LMHeadModel",
          .prefix = "transformer.",
          .base = [] { return M{}; },
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
