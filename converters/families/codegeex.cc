// CodeGeeX-13B as published: one file codegeex_13b.pt, or a file for each tensor-parallel rank, which the repository's
// own script cuts from it (sharded_files.h); import only. There is no config.json: write one with model_type
// "codegeex"; its keys are the model's arguments, absent ones those of CodeGeeX-13B. Source: THUDM/CodeGeeX
// configs/codegeex_13b.sh, codegeex/torch/codegeex_model.py,
// codegeex/megatron/{mindspore_to_megatron,convert_ckpt_parallel}.py.
#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.activation = Activation::kGeluQuick;  // FastGELU, which the code writes in another form
  m.top_query = true;
  return m;
}

/// The class has no argument for it.
ConfigKey four_widths() {
  return {{}, [](ConfigReader&, M& m) { m.ffn = 4 * m.width; }, nullptr};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 52224),
      size("hidden_size", &M::width, 5120),
      four_widths(),
      size("num_layers", &M::layers, 39),
      size("num_attention_heads", &M::heads, 40),
      divided_heads(),
      size("max_position_embeddings", &M::context, 2048),
      number("layernorm_epsilon", &M::norm_eps, 1e-5),
      unread({"attention_softmax_in_fp32", "seq_length"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "language_model.embedding.word_embeddings.weight"},
    {"embed.positions", "language_model.embedding.position_embeddings.weight"},
    {"layers.*.attn_norm.*", "language_model.transformer.layers.*.input_layernorm.*"},
    {"layers.*.attn.q.*", "language_model.transformer.layers.*.attention.query.*"},
    {"layers.*.attn.k.*", "language_model.transformer.layers.*.attention.key.*"},
    {"layers.*.attn.v.*", "language_model.transformer.layers.*.attention.value.*"},
    {"layers.*.attn.o.*", "language_model.transformer.layers.*.attention.dense.*"},
    {"layers.*.mlp_norm.*", "language_model.transformer.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.up.*", "language_model.transformer.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "language_model.transformer.layers.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "language_model.transformer.final_layernorm.*"},
    {"top_query.positions", "language_model.topQueryEmbedding.top_query_embeddings.weight"},
    {"top_query.attn_norm.*", "language_model.transformer.topQueryLayer.input_layernorm.*"},
    {"top_query.attn.q.*", "language_model.transformer.topQueryLayer.attention.query.*"},
    {"top_query.attn.k.*", "language_model.transformer.topQueryLayer.attention.key.*"},
    {"top_query.attn.v.*", "language_model.transformer.topQueryLayer.attention.value.*"},
    {"top_query.attn.o.*", "language_model.transformer.topQueryLayer.attention.dense.*"},
    {"top_query.mlp_norm.*", "language_model.transformer.topQueryLayer.post_attention_layernorm.*"},
    {"top_query.mlp.up.*", "language_model.transformer.topQueryLayer.mlp.dense_h_to_4h.*"},
    {"top_query.mlp.down.*", "language_model.transformer.topQueryLayer.mlp.dense_4h_to_h.*"},
    {"head.weight", "language_model.lm_head.weight"},  // always tied, never there
};

constexpr JoinRow kJoins[] = {
    {"*.word_embeddings.weight", Join::kVocabRows},
    {"*.top_query_embeddings.weight", Join::kRows},  // cut like a vocabulary; the other table of positions is not
    {"*.attention.query.*", Join::kRows},
    {"*.attention.key.*", Join::kRows},
    {"*.attention.value.*", Join::kRows},
    {"*.attention.dense.weight", Join::kColumns},
    {"*.mlp.dense_h_to_4h.*", Join::kRows},
    {"*.mlp.dense_4h_to_h.weight", Join::kColumns},
};

}  // namespace

Family codegeex_family() {
  return {.model_type = "codegeex",
          .architecture = "",
          .prefix = "language_model.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = {},
          .joins = kJoins,
          .renames = {}};
}

}  // namespace cairn::convert
