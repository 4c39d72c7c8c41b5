// GPTBigCode: SantaCoder, StarCoder. GPT-2 with one key/value head, and matrices stored [out, in]. Source: transformers
// models/gpt_bigcode.
#include <fmt/format.h>

#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

/// One key/value head for all heads, or one for each.
ConfigKey multi_query() {
  return {{"multi_query", "num_key_value_heads"},
          [](ConfigReader& in, M& m) {
            m.kv_heads = in.boolean("multi_query", true) ? 1 : m.heads;
            if (const int64_t stated = in.integer("num_key_value_heads", m.kv_heads); stated != m.kv_heads) {
              in.invalid(fmt::format("num_key_value_heads = {} and multi_query, which means {}, disagree", stated,
                                     m.kv_heads));
            }
          },
          [](const M& m, ordered_json& out) {
            out["multi_query"] = m.kv_heads == 1;
            out["num_key_value_heads"] = m.kv_heads;
          }};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50257),
      size("n_positions", "max_position_embeddings", &M::context, 1024),
      size("n_embd", "hidden_size", &M::width, 768),
      size("n_layer", "num_hidden_layers", &M::layers, 12),
      size("n_head", "num_attention_heads", &M::heads, 12),
      divided_heads(),
      multi_query(),
      size("n_inner", &M::ffn, [](const M& m) { return 4 * m.width; }),
      activation("activation_function", "gelu_pytorch_tanh", plain_activations()),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      scaled_attention(),
      only("add_cross_attention", false),
      // How scores are rounded, not what they are.
      constant("attention_softmax_in_fp32", true),
      constant("scale_attention_softmax_in_fp32", true),
      dropout("embd_pdrop", &M::embedding_dropout),
      dropout("attn_pdrop", &M::attention_dropout),
      dropout("resid_pdrop", &M::residual_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("initializer_range", &M::init_std, 0.02),
      // Of published files: ways to compute, which the class has no more.
      unread({"attention_type", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
              "pre_allocate_kv_cache", "validate_runner_input", "runner_max_sequence_length", "n_ctx"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.wte.weight"},
    {"embed.positions", "transformer.wpe.weight"},
    {"layers.*.attn_norm.*", "transformer.h.*.ln_1.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.h.*.attn.c_attn.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "transformer.h.*.attn.c_proj.*"},
    {"layers.*.mlp_norm.*", "transformer.h.*.ln_2.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.c_fc.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.c_proj.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

constexpr std::string_view kIgnored[] = {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"};

}  // namespace

Family gpt_bigcode_family() {
  return {.model_type = "gpt_bigcode",
          .architecture = "GPTBigCodeForCausalLM",
          .prefix = "transformer.",
          .base = [] { return M{}; },
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
