// GPT models of Megatron-LM in its legacy checkpoint format, a file for each rank (sharded_files.h), or in torch_dist
// (dist_files.h); import only. There
// is no config.json: write one with model_type "megatron_gpt" and Megatron's own arguments as keys
// (docs/training-states.md). Checkpoint version 3 alone: older ones order q, k and v otherwise. Source: Megatron-LM
// megatron/training/arguments.py, megatron/legacy/model/language_model.py and transformer.py.
#include <fmt/format.h>

#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.bias = true;
  return m;
}

/// Megatron's arguments have no defaults for these.
ConfigKey needed(std::string_view name, int64_t M::*field) {
  return {{name},
          [=](ConfigReader& in, M& m) {
            if (!in.contains(name))
              in.invalid(std::string(name) + " is missing; it is an argument of the training run");
            m.*field = read_size(in, name, field, 1);
          },
          nullptr};
}

ConfigKey needed_version() {
  return {
      {"checkpoint_version"},
      [](ConfigReader& in, M&) {
        const double version = in.number("checkpoint_version", 0);
        if (version < 2) {
          in.unsupported(
              "checkpoint_version must be said, and 2 or 3: it stands in each rank's file, and older ones order q, k "
              "and v otherwise");
        }
      },
      nullptr};
}

ConfigKey heads() {
  return {{"group_query_attention", "num_query_groups", "kv_channels"},
          [](ConfigReader& in, M& m) {
            m.kv_heads = in.boolean("group_query_attention", false) ? read_size(in, "num_query_groups", &M::kv_heads, 1)
                                                                    : m.heads;
            m.head_dim = read_size(in, "kv_channels", &M::head_dim, m.heads > 0 ? m.width / m.heads : 0);
          },
          nullptr};
}

ConfigKey positions() {
  return {{"position_embedding_type", "rotary_percent", "rotary_base", "rotary_interleaved"},
          [](ConfigReader& in, M& m) {
            const std::string type = in.text("position_embedding_type", "learned_absolute");
            m.positions = type == "rope" ? Positions::kRotary : type == "none" ? Positions::kNone : Positions::kLearned;
            if (type != "rope" && type != "none" && type != "learned_absolute") {
              in.unsupported("position_embedding_type = \"" + type + "\"; known: learned_absolute, rope, none");
            }
            if (m.positions != Positions::kRotary) return;
            m.rope_theta = in.number("rotary_base", 10000.0);
            const double part = in.number("rotary_percent", 1.0);
            if (!(part > 0 && part <= 1))
              return in.invalid(fmt::format("rotary_percent = {} must be above 0 and at most 1", part));
            const auto turning = static_cast<int64_t>(static_cast<double>(m.head_dim) * part);
            if (turning != m.head_dim) m.rope.dims = turning;
            if (in.boolean("rotary_interleaved", false)) m.rope.pairs = RotaryPairs::kInterleaved;
          },
          nullptr};
}

ConfigKey norm() {
  return {{"normalization"},
          [](ConfigReader& in, M& m) {
            const std::string name = in.text("normalization", "LayerNorm");
            m.norm = name == "RMSNorm" ? NormKind::kRmsNorm : NormKind::kLayerNorm;
            if (name != "RMSNorm" && name != "LayerNorm") {
              in.unsupported("normalization = \"" + name + "\"; known: LayerNorm, RMSNorm");
            }
          },
          nullptr};
}

/// bias_gelu_fusion computes the tanh form, without it the exact one is.
ConfigKey mlp() {
  return {{"swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion", "ffn_hidden_size"},
          [](ConfigReader& in, M& m) {
            const bool swiglu = in.boolean("swiglu", false);
            const bool tanh = in.boolean("bias_gelu_fusion", true) || in.boolean("openai_gelu", false);
            m.activation = swiglu                              ? Activation::kSwiGlu
                           : in.boolean("squared_relu", false) ? Activation::kRelu2
                           : tanh                              ? Activation::kGeluTanh
                                                               : Activation::kGeluErf;
            m.ffn =
                read_size(in, "ffn_hidden_size", &M::ffn, swiglu ? (4 * m.width * 2 / 3 + 63) / 64 * 64 : 4 * m.width);
          },
          nullptr};
}

ConfigKey projection_biases() {
  return {{"add_bias_linear", "add_qkv_bias"},
          [](ConfigReader& in, M& m) {
            m.bias = in.boolean("add_bias_linear", true);
            m.qkv_bias = m.bias || in.boolean("add_qkv_bias", false);
          },
          nullptr};
}

ConfigKey tying() {
  return {{"untie_embeddings_and_output_weights"},
          [](ConfigReader& in, M& m) { m.tied_embeddings = !in.boolean("untie_embeddings_and_output_weights", false); },
          nullptr};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      needed_version(),
      needed("vocab_size", &M::vocab),
      needed("hidden_size", &M::width),
      needed("num_layers", &M::layers),
      needed("num_attention_heads", &M::heads),
      needed("max_position_embeddings", &M::context),
      heads(),
      positions(),
      norm(),
      number("norm_epsilon", &M::norm_eps, 1e-5),
      mlp(),
      projection_biases(),
      tying(),
      only("apply_layernorm_1p", false),
      only("apply_residual_connection_post_layernorm", false),
      unread({"apply_query_key_layer_scaling", "attention_softmax_in_fp32"}),  // rounding
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "language_model.embedding.word_embeddings.weight"},
    {"embed.positions", "language_model.embedding.position_embeddings.weight"},
    {"layers.*.attn_norm.*", "language_model.encoder.layers.*.input_norm.*"},
    {"layers.*.attn.{q,k,v}.*", "language_model.encoder.layers.*.self_attention.query_key_value.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "language_model.encoder.layers.*.self_attention.dense.*"},
    {"layers.*.mlp_norm.*", "language_model.encoder.layers.*.post_attention_norm.*"},
    {"layers.*.mlp.{gate,up}.*", "language_model.encoder.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.up.*", "language_model.encoder.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "language_model.encoder.layers.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "language_model.encoder.final_norm.*"},
    {"head.weight", "language_model.output_layer.weight"},
};

// With pipeline stages the last one has a copy of a tied embedding.
constexpr std::string_view kIgnored[] = {"word_embeddings_for_head.weight",
                                         "language_model.encoder.layers.*.self_attention.rotary_emb.inv_freq"};

constexpr JoinRow kJoins[] = {
    {"*.word_embeddings.weight", Join::kVocabRows}, {"*.output_layer.weight", Join::kVocabRows},
    {"*.query_key_value.*", Join::kRows},           {"*.self_attention.dense.weight", Join::kColumns},
    {"*.mlp.dense_h_to_4h.*", Join::kGatedRows},    {"*.mlp.dense_4h_to_h.weight", Join::kColumns},
};
constexpr Rename kRenames[] = {
    {"language_model.transformer.", "language_model.encoder."},
    {".attention.", ".self_attention."},
    {".input_layernorm.", ".input_norm."},
    {".post_attention_layernorm.", ".post_attention_norm."},
    {".final_layernorm.", ".final_norm."},
};
// Megatron Core's names, which torch_dist checkpoints have: norms lie in the projections that follow them.
constexpr Rename kDistRenames[] = {
    {"decoder.layers.", "language_model.encoder.layers."},
    {"decoder.final_layernorm.", "language_model.encoder.final_norm."},
    {"embedding.word_embeddings.", "language_model.embedding.word_embeddings."},
    {"embedding.position_embeddings.", "language_model.embedding.position_embeddings."},
    {"output_layer.", "language_model.output_layer."},
    {".self_attention.linear_qkv.layer_norm_", ".input_norm."},
    {".mlp.linear_fc1.layer_norm_", ".post_attention_norm."},
    {".self_attention.linear_qkv.", ".self_attention.query_key_value."},
    {".self_attention.linear_proj.", ".self_attention.dense."},
    {".mlp.linear_fc1.", ".mlp.dense_h_to_4h."},
    {".mlp.linear_fc2.", ".mlp.dense_4h_to_h."},
    {".input_layernorm.", ".input_norm."},
    {".pre_mlp_layernorm.", ".post_attention_norm."},
};

}  // namespace

Family megatron_gpt_family() {
  return {.model_type = "megatron_gpt",
          .architecture = "",
          .prefix = "language_model.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored,
          .joins = kJoins,
          .renames = kRenames,
          .dist_renames = kDistRenames,
          .stacked = "decoder.layers."};
}

}  // namespace cairn::convert
