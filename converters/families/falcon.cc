// Falcon: 7B (one key/value head, one norm for attention and MLP side by side), 40B and 180B (groups of heads, a norm
// for each), Falcon2-11B (groups, one norm), and one branch after the other (RW, with ALiBi). Source: transformers
// models/falcon.
#include <fmt/format.h>

#include "converters/family_table.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::ordered_json;

M base() {
  M m;
  m.bias = false;
  return m;
}

/// n_embed, an old key, wins over hidden_size.
ConfigKey width() {
  return {{"hidden_size", "n_embed"},
          [](ConfigReader& in, M& m) {
            m.width = read_size(in, "n_embed", &M::width, read_size(in, "hidden_size", &M::width, 4544));
          },
          [](const M& m, ordered_json& out) { out["hidden_size"] = m.width; }};
}

/// The block, and how many heads share a key/value head. num_kv_heads counts with new_decoder_architecture alone: the
/// class writes it as the number of heads otherwise.
void read_decoder(ConfigReader& in, M& m) {
  const bool renewed = in.boolean("new_decoder_architecture", false), parallel = in.boolean("parallel_attn", true);
  const bool one = in.boolean("multi_query", true);
  const int64_t norms = in.integer("num_ln_in_parallel_attn", renewed ? 2 : 1);
  const int64_t stated = read_size(in, "num_kv_heads", &M::kv_heads, m.heads);
  m.kv_heads = renewed ? stated : one ? 1 : m.heads;
  if (norms < 1 || norms > 2) {
    in.invalid(fmt::format("num_ln_in_parallel_attn = {}: a layer has 1 or 2 norms", norms));
  } else if (renewed && !parallel) {
    in.unsupported("new_decoder_architecture without parallel_attn: no norm of the class is left for the MLP");
  } else if (!renewed && parallel && norms == 2) {
    in.unsupported("num_ln_in_parallel_attn = 2 without new_decoder_architecture: the class has no norm for attention");
  } else if (!renewed && !one && stated != m.heads) {
    in.unsupported(
        fmt::format("num_kv_heads = {} of {} heads without new_decoder_architecture and multi_query: the class reads "
                    "the projection with as many as heads",
                    stated, m.heads));
  }
  m.block = !parallel ? BlockKind::kPreNorm : norms == 2 ? BlockKind::kParallel : BlockKind::kParallelShared;
}

void write_decoder(const M& m, ordered_json& out) {
  const bool grouped = m.kv_heads > 1 && m.kv_heads < m.heads;
  const bool renewed = m.block == BlockKind::kParallel || (m.block == BlockKind::kParallelShared && grouped);
  out["new_decoder_architecture"] = renewed;
  out["multi_query"] = renewed || m.kv_heads == 1;
  out["parallel_attn"] = is_parallel(m.block);
  out["num_ln_in_parallel_attn"] = renewed ? ordered_json(m.block == BlockKind::kParallel ? 2 : 1) : ordered_json();
  out["num_kv_heads"] = renewed ? m.kv_heads : m.heads;
}

/// Rotary, or of Falcon RW slopes: what is added to a score is rounded, and nothing turns, whatever the rotary keys
/// say.
ConfigKey positions() {
  ConfigKey out = rope({.old_type_counts = false});
  out.names.push_back("alibi");
  out.read = [turning = out.read](ConfigReader& in, M& m) {
    if (!in.boolean("alibi", false)) return turning(in, m);
    m.positions = Positions::kAlibi;
    m.alibi = AlibiForm::kRounded;
  };
  out.write = [turning = out.write](const M& m, ordered_json& config) {
    turning(m, config);
    config["alibi"] = m.positions == Positions::kAlibi;
  };
  return out;
}

const std::vector<ConfigKey>& keys() {
  static const std::vector<ConfigKey> kKeys = {
      size("vocab_size", &M::vocab, 65024),
      width(),
      size("num_hidden_layers", &M::layers, 32),
      size("num_attention_heads", &M::heads, 71),
      divided_head_dim(),
      {{"new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "num_kv_heads"},
       read_decoder,
       write_decoder},
      size("ffn_hidden_size", &M::ffn, [](const M& m) { return 4 * m.width; }),
      activation("activation", "gelu", plain_activations()),
      size("max_position_embeddings", &M::context, 2048),
      number("layer_norm_epsilon", &M::norm_eps, 1e-5),
      positions(),
      biases("bias", kQkv | kOut | kMlp, false),
      dropout("attention_dropout", &M::attention_dropout),
      dropout("hidden_dropout", &M::residual_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, true),
      number("initializer_range", &M::init_std, 0.02),
      refuse_unless("ff_factor", 4),
      unread({"apply_residual_connection_post_layernorm"}),  // of the published files; no class looks at it
  };
  return kKeys;
}

bool has_two_norms(const M& m) { return m.block == BlockKind::kParallel; }

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "transformer.word_embeddings.weight"},
    {.logical = "layers.*.attn_norm.*", .stored = "transformer.h.*.ln_attn.*", .when = has_two_norms},
    {"layers.*.attn_norm.*", "transformer.h.*.input_layernorm.*"},
    {"layers.*.attn.{q,k,v}.*", "transformer.h.*.self_attention.query_key_value.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "transformer.h.*.self_attention.dense.*"},
    {.logical = "layers.*.mlp_norm.*", .stored = "transformer.h.*.ln_mlp.*", .when = has_two_norms},
    {"layers.*.mlp_norm.*", "transformer.h.*.post_attention_layernorm.*"},
    {"layers.*.mlp.up.*", "transformer.h.*.mlp.dense_h_to_4h.*"},
    {"layers.*.mlp.down.*", "transformer.h.*.mlp.dense_4h_to_h.*"},
    {"final_norm.*", "transformer.ln_f.*"},
    {"head.weight", "lm_head.weight"},
};

}  // namespace

Family falcon_family() {
  return {.model_type = "falcon",
          .architecture = "FalconForCausalLM",
          .prefix = "transformer.",
          .base = base,
          .keys = keys(),
          .tensors = kTensors,
          .last_choice = true};
}

}  // namespace cairn::convert
