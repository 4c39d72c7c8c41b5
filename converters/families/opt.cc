// OPT. Source: transformers models/opt.
#include "converters/family_table.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m;
  m.position_offset = 2;
  m.norm_eps = 1e-5;  // no key for it
  return m;
}

ConfigKey embedding_width() {
  return {{"word_embed_proj_dim"},
          [](ConfigReader& in, M& m) { m.embed_dim = read_size(in, "word_embed_proj_dim", &M::width, m.width); },
          [](const M& m, ordered_json& out) { out["word_embed_proj_dim"] = embed_dim(m); }};
}

/// Norms before attention and MLP with one at the end, or after them with none at the end (OPT-350m);
/// _remove_final_layer_norm is for models tuned without the last one by mistake.
ConfigKey norm_places() {
  return {{"do_layer_norm_before", "_remove_final_layer_norm"},
          [](ConfigReader& in, M& m) {
            const bool before = in.boolean("do_layer_norm_before", true);
            m.block = before ? BlockKind::kPreNorm : BlockKind::kPostNorm;
            m.final_norm = before && !in.boolean("_remove_final_layer_norm", false);
          },
          [](const M& m, ordered_json& out) {
            const bool before = m.block != BlockKind::kPostNorm;
            out["do_layer_norm_before"] = before;
            out["_remove_final_layer_norm"] = before && !m.final_norm;
          }};
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 50272),
      size("hidden_size", &M::width, 768),
      size("num_hidden_layers", &M::layers, 12),
      size("num_attention_heads", &M::heads, 12),
      divided_heads(),
      size("ffn_dim", &M::ffn, 3072),
      size("max_position_embeddings", &M::context, 2048),
      embedding_width(),
      norm_places(),
      activation("activation_function", "relu", plain_activations()),
      biases("enable_bias", kQkv | kOut | kMlp, true),
      only("layer_norm_elementwise_affine", true),
      dropout("dropout", &M::residual_dropout),
      dropout("attention_dropout", &M::attention_dropout),
      constant("layerdrop", 0.0),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("init_std", &M::init_std, 0.02),
  };
  return kKeys;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "model.decoder.embed_tokens.weight"},
    {"embed.project_in.*", "model.decoder.project_in.*"},
    {"embed.positions", "model.decoder.embed_positions.weight"},
    {"layers.*.attn_norm.*", "model.decoder.layers.*.self_attn_layer_norm.*"},
    {"layers.*.attn.q.*", "model.decoder.layers.*.self_attn.q_proj.*"},
    {"layers.*.attn.k.*", "model.decoder.layers.*.self_attn.k_proj.*"},
    {"layers.*.attn.v.*", "model.decoder.layers.*.self_attn.v_proj.*"},
    {"layers.*.attn.o.*", "model.decoder.layers.*.self_attn.out_proj.*"},
    {"layers.*.mlp_norm.*", "model.decoder.layers.*.final_layer_norm.*"},
    {"layers.*.mlp.up.*", "model.decoder.layers.*.fc1.*"},
    {"layers.*.mlp.down.*", "model.decoder.layers.*.fc2.*"},
    {"final_norm.*", "model.decoder.final_layer_norm.*"},
    {"head.project_out.*", "model.decoder.project_out.*"},
    {"head.weight", "lm_head.weight"},
};

}  // namespace

Family opt_family() {
  return {.model_type = "opt",
          .architecture = "OPTForCausalLM",
          .prefix = "model.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors};
}

}  // namespace cairn::convert
