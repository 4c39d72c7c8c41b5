// ChatGLM2, ChatGLM3 and GLM-4-9B as published with code of their own; import only, a model goes out as `glm`.
// Source: transformers models/glm/convert_glm_weights_to_hf.py, vLLM model_executor/models/chatglm.py. The former drops
// rope_ratio; it multiplies the base.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.norm = NormKind::kRmsNorm;
  m.activation = Activation::kSwiGlu;
  m.bias = false;
  m.tied_embeddings = false;
  m.positions = Positions::kRotary;
  m.rope.pairs = RotaryPairs::kInterleaved;
  return m;
}

ConfigKey groups() {
  return {{"multi_query_attention", "multi_query_group_num"},
          [](ConfigReader& in, M& m) {
            m.kv_heads = in.boolean("multi_query_attention", false)
                             ? read_size(in, "multi_query_group_num", &M::kv_heads, 1)
                             : m.heads;
          },
          nullptr};
}

/// The first half of each head turns.
ConfigKey half_rotary() {
  return {{"rope_ratio"},
          [](ConfigReader& in, M& m) {
            m.rope_theta = 10000.0 * in.number("rope_ratio", 1.0);
            m.rope.dims = m.head_dim / 2;
          },
          nullptr};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("padded_vocab_size", &M::vocab, 65024),
      size("hidden_size", &M::width, 4096),
      size("ffn_hidden_size", &M::ffn, 13696),
      size("num_layers", &M::layers, 28),
      size("num_attention_heads", &M::heads, 32),
      size("kv_channels", &M::head_dim, 128),
      groups(),
      half_rotary(),
      size("seq_length", &M::context, 2048),
      number("layernorm_epsilon", &M::norm_eps, 1e-5),
      biases("add_qkv_bias", kQkv, false),
      only("rmsnorm", true),
      only("apply_residual_connection_post_layernorm", false),
      only("post_layer_norm", true),
      only("add_bias_linear", false),
      only("prefix_projection", false),
      refuse_unless("pre_seq_len", nullptr),
      only("tie_word_embeddings", false),
      // How scores are rounded, not what they are.
      unread({"apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp32_residual_connection",
              "bias_dropout_fusion", "original_rope"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.embedding.word_embeddings.weight"},
    {"layers.*.attn_norm.*", "transformer.encoder.layers.*.input_layernorm.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.encoder.layers.*.self_attention.query_key_value.*"},
    {"layers.*.attn.o.*", "transformer.encoder.layers.*.self_attention.dense.*"},
    {"layers.*.mlp_norm.*", "transformer.encoder.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.{gate,up}.*", "transformer.encoder.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "transformer.encoder.layers.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "transformer.encoder.final_layernorm.*"},
    {"head.weight", "transformer.output_layer.weight"},
};

constexpr std::string_view kIgnored[] = {"transformer.rotary_pos_emb.inv_freq"};

}  // namespace

Family chatglm_family() {
  return {.model_type = "chatglm",
          .architecture = "",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
