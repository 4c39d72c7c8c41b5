// GLM-130B as published: a file for each tensor-parallel rank (sharded_files.h), import only. There is no config.json:
// write one with model_type "glm130b"; its keys are the model's arguments, absent ones those of GLM-130B.
// Source: GLM-130B configs/model_glm_130b.sh, tools/convert_tp.py; SwissArmyTransformer sat/model/official.
#include <cmath>

#include "converters/family_table.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.activation = Activation::kGeGlu;
  m.block = BlockKind::kDeepNorm;
  m.positions = Positions::kRotary;
  m.mask = Mask::kPrefix;
  return m;
}

/// The residual is the norm's output times sqrt(2 layers).
ConfigKey deep_norm() {
  return {{}, [](ConfigReader&, M& m) { m.residual_scale = std::sqrt(2.0 * static_cast<double>(m.layers)); }, nullptr};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 150528),
      size("hidden_size", &M::width, 12288),
      size("inner_hidden_size", &M::ffn, 32768),
      size("num_layers", &M::layers, 70),
      size("num_attention_heads", &M::heads, 96),
      divided_heads(),
      size("max_sequence_length", &M::context, 2048),
      number("layernorm_epsilon", &M::norm_eps, 1e-5),
      deep_norm(),
      // Rounding: scores are divided by the layer's number and multiplied again.
      unread({"apply_query_key_layer_scaling"}),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.word_embeddings.weight"},
    {"layers.*.attn_norm.*", "transformer.layers.*.input_layernorm.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.layers.*.attention.query_key_value.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "transformer.layers.*.attention.dense.*"},
    {"layers.*.mlp_norm.*", "transformer.layers.*.post_attention_layernorm.*"},
    {"layers.*.mlp.{up,gate}.*", "transformer.layers.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "transformer.layers.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "transformer.final_layernorm.*"},
    {"head.weight", "mixins.final.lm_head.weight"},  // always tied, never there
};

constexpr std::string_view kIgnored[] = {"transformer.layers.*.attention.rotary_emb.inv_freq",
                                         "transformer.position_embeddings.weight"};

constexpr JoinRow kJoins[] = {
    {"*.word_embeddings.weight", Join::kVocabRows}, {"*.query_key_value.*", Join::kRows},
    {"*.attention.dense.weight", Join::kColumns},   {"*.mlp.dense_h_to_4h.*", Join::kGatedRows},
    {"*.mlp.dense_4h_to_h.weight", Join::kColumns},
};

}  // namespace

Family glm130b_family() {
  return {.model_type = "glm130b",
          .architecture = "",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .ignored = kIgnored,
          .joins = kJoins,
          .renames = {}};
}

}  // namespace cairn::convert
