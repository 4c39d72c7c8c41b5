// BLOOM. Source: transformers models/bloom.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m;
  m.positions = Positions::kAlibi;
  m.embedding_norm = true;
  return m;
}

/// n_embed, an old key, wins over hidden_size. The MLP is four times as wide, without a key.
ConfigKey width() {
  return {{"hidden_size", "n_embed"},
          [](ConfigReader& in, M& m) {
            m.width = read_size(in, "n_embed", &M::width, read_size(in, "hidden_size", &M::width, 64));
            m.ffn = 4 * m.width;
          },
          [](const M& m, ordered_json& out) { out["hidden_size"] = m.width; }};
}

/// ALiBi needs no table, so the class has no key for a longest sequence; seq_length stands in published files. Cairn's
/// recipes need one: it is written under that name, which transformers keeps and does not read.
ConfigKey context() { return size("seq_length", &M::context, 2048); }

/// The residual is the norm's output instead of its input.
ConfigKey residual_after_norm() {
  constexpr std::string_view kName = "apply_residual_connection_post_layernorm";
  return {
      {kName},
      [=](ConfigReader& in, M& m) { m.block = in.boolean(kName, false) ? BlockKind::kDeepNorm : BlockKind::kPreNorm; },
      [=](const M& m, ordered_json& out) { out[std::string(kName)] = m.block == BlockKind::kDeepNorm; }};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 250880),
      width(),
      size("n_layer", "num_hidden_layers", &M::layers, 2),
      size("n_head", "num_attention_heads", &M::heads, 8),
      divided_heads(),
      context(),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      residual_after_norm(),
      dropout("hidden_dropout", &M::residual_dropout),
      dropout("attention_dropout", &M::attention_dropout),
      // A way to sum that changes rounding only, and nothing that is stored.
      constant("pretraining_tp", 1),
      constant("slow_but_exact", false),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("initializer_range", &M::init_std, 0.02),
      unread({"skip_bias_add", "skip_bias_add_qkv", "masked_softmax_fusion", "unk_token_id"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.word_embeddings.weight"},
    {"embed.norm.*", "transformer.word_embeddings_layernorm.*"},
    {"layers.*.attn_norm.*", "transformer.h.*.input_layernorm.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.h.*.self_attention.query_key_value.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "transformer.h.*.self_attention.dense.*"},
    {"layers.*.mlp_norm.*", "transformer.h.*.post_attention_layernorm.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

constexpr std::string_view kIgnored[] = {"transformer.h.*.self_attention.scale_mask_softmax.causal_mask"};

}  // namespace

Family bloom_family() {
  return {.model_type = "bloom",
          .architecture = "BloomForCausalLM",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored};
}

}  // namespace cairn::convert
