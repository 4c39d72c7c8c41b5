// GPT models of Megatron-LM in its legacy checkpoint format, a file for each rank (sharded_files.h), or in torch_dist
// (dist_files.h); import only. There
// is no config.json: it is made from the arguments that torch_dist saves (megatron_args.h), or write one with
// model_type "megatron_gpt" and Megatron's own arguments as keys (docs/training-states.md). Checkpoint version 3 alone:
// older ones order q, k and v otherwise. Source: Megatron-LM megatron/training/arguments.py,
// megatron/legacy/model/language_model.py and transformer.py.
#include <fmt/format.h>

#include <algorithm>

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

ConfigKey head_norms() {
  return {{"qk_layernorm"},
          [](ConfigReader& in, M& m) {
            if (in.boolean("qk_layernorm", false) && !in.boolean("multi_latent_attention", false)) {
              m.qk_norm = QkNorm::kHead;
            }
          },
          nullptr};
}

/// Megatron turns the channels of latent attention in neighbouring pairs, whatever rotary_interleaved says.
ConfigKey latent_attention() {
  return {{"multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
           "rope_type"},
          [](ConfigReader& in, M& m) {
            if (!in.boolean("multi_latent_attention", false)) return;
            constexpr int64_t kMost = 1 << 16;
            const auto size = [&](const char* name, int64_t absent) {
              const int64_t value = in.integer(name, absent);
              if (value < 1 || value > kMost) {
                in.invalid(fmt::format("{} = {} is out of range, 1 to {}", name, value, kMost));
              }
              return value;
            };
            m.mla = {.kv_rank = size("kv_lora_rank", 512),
                     .q_rank = in.find("q_lora_rank") == nullptr ? 0 : size("q_lora_rank", 0),
                     .nope_dim = size("qk_head_dim", 128),
                     .rope_dim = size("qk_pos_emb_head_dim", 64),
                     .value_dim = size("v_head_dim", 128)};
            m.kv_heads = m.heads;
            m.head_dim = m.mla.nope_dim + m.mla.rope_dim;
            m.rope.dims = 0;
            m.rope.pairs = RotaryPairs::kInterleaved;
            if (m.mla.rope_dim % 2 != 0 || m.mla.value_dim > m.head_dim) {
              in.unsupported("qk_pos_emb_head_dim must be even, and v_head_dim at most a head's channels");
            }
            if (in.text("rope_type", "yarn") != "rope") {
              in.unsupported("latent attention with rope_type = \"yarn\" is not read; expected \"rope\"");
            }
            if (!in.boolean("qk_layernorm", false)) {
              in.unsupported("latent attention without qk_layernorm has no norms behind its latent vectors");
            }
          },
          nullptr};
}

/// moe_layer_freq: every so-manieth layer has experts, or a list of 1 and 0.
void read_dense_layers(ConfigReader& in, M& m) {
  const nlohmann::json* const frequency = in.find("moe_layer_freq");
  if (frequency == nullptr) return;
  const bool list = frequency->is_array();
  const int64_t every = list ? 1 : in.integer("moe_layer_freq", 1);
  if (every < 1 || (list && std::ssize(*frequency) != m.layers)) {
    return in.invalid("moe_layer_freq must be a number above 0, or a list with 1 or 0 for each layer");
  }
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    const bool dense = list ? (*frequency)[static_cast<size_t>(layer)] == 0 : layer % every != 0;
    if (dense) m.moe.dense_layers.push_back(layer);
  }
}

ConfigKey expert_layers() {
  return {{"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_score_function",
           "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
           "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
           "moe_shared_expert_gate"},
          [](ConfigReader& in, M& m) {
            if (in.find("num_experts") == nullptr) return;
            constexpr int64_t kMostExperts = 1 << 16, kMostUnits = 1 << 22;
            const auto within = [&](const char* name, int64_t absent, int64_t least, int64_t most) {
              const int64_t value = in.integer(name, absent);
              if (value < least || value > most) {
                in.invalid(fmt::format("{} = {} is out of range, {} to {}", name, value, least, most));
              }
              return value;
            };
            m.moe.experts = within("num_experts", 0, 1, kMostExperts);
            m.moe.top_k = within("moe_router_topk", 2, 1, std::max<int64_t>(1, m.moe.experts));
            m.moe.ffn = within("moe_ffn_hidden_size", m.ffn, 1, kMostUnits);
            m.moe.aux_scope = AuxScope::kLayer;
            read_dense_layers(in, m);
            const std::string score = in.text("moe_router_score_function", "softmax");
            if (score != "softmax" && score != "sigmoid") {
              in.unsupported("moe_router_score_function = \"" + score + "\"; known: softmax, sigmoid");
            }
            const bool sigmoid = score == "sigmoid";
            m.moe.router = sigmoid ? RouterKind::kSigmoid : RouterKind::kSoftmax;
            m.moe.renormalise = sigmoid ? m.moe.top_k > 1 : !in.boolean("moe_router_pre_softmax", false);
            m.moe.choice_bias = in.boolean("moe_router_enable_expert_bias", false);
            if (m.moe.choice_bias != sigmoid) {
              in.unsupported("known: a sigmoid router with expert biases, a softmax router without them");
            }
            if (in.find("moe_router_topk_scaling_factor") != nullptr) {
              m.moe.scale = in.number("moe_router_topk_scaling_factor", 1);
              if (!(m.moe.scale > 0)) in.invalid("moe_router_topk_scaling_factor must be above 0");
            }
            if (in.integer("moe_router_num_groups", 1) != 1) in.unsupported("moe_router_num_groups is not read");
            if (in.find("moe_shared_expert_intermediate_size") != nullptr) {
              m.moe.shared_ffn = within("moe_shared_expert_intermediate_size", 0, 1, kMostUnits);
            }
            m.moe.shared_gate = in.boolean("moe_shared_expert_gate", false);
          },
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
      head_norms(),
      latent_attention(),
      expert_layers(),
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
    {"layers.*.attn.q_norm.*", "language_model.encoder.layers.*.self_attention.q_layernorm.*"},
    {"layers.*.attn.k_norm.*", "language_model.encoder.layers.*.self_attention.k_layernorm.*"},
    // Latent attention.
    {"layers.*.attn.q.*", "language_model.encoder.layers.*.self_attention.linear_q_proj.*"},
    {"layers.*.attn.q_a.*", "language_model.encoder.layers.*.self_attention.linear_q_down_proj.*"},
    {"layers.*.attn.q_b.*", "language_model.encoder.layers.*.self_attention.linear_q_up_proj.*"},
    {"layers.*.attn.q_a_norm.*", "language_model.encoder.layers.*.self_attention.q_layernorm.*"},
    {"layers.*.attn.kv_a.*", "language_model.encoder.layers.*.self_attention.linear_kv_down_proj.*"},
    {"layers.*.attn.kv_b.*", "language_model.encoder.layers.*.self_attention.linear_kv_up_proj.*"},
    {"layers.*.attn.kv_a_norm.*", "language_model.encoder.layers.*.self_attention.kv_layernorm.*"},
    // Experts.
    {"layers.*.moe.router.weight", "language_model.encoder.layers.*.mlp.router.weight"},
    {"layers.*.moe.router.bias", "language_model.encoder.layers.*.mlp.router.expert_bias"},
    {"layers.*.moe.experts.#.{gate,up}.weight",
     "language_model.encoder.layers.*.mlp.experts.experts.linear_fc1.weight"},
    {"layers.*.moe.experts.#.up.weight", "language_model.encoder.layers.*.mlp.experts.experts.linear_fc1.weight"},
    {"layers.*.moe.experts.#.down.weight", "language_model.encoder.layers.*.mlp.experts.experts.linear_fc2.weight"},
    {"layers.*.moe.shared.{gate,up}.weight", "language_model.encoder.layers.*.mlp.shared_experts.linear_fc1.weight"},
    {"layers.*.moe.shared.up.weight", "language_model.encoder.layers.*.mlp.shared_experts.linear_fc1.weight"},
    {"layers.*.moe.shared.down.weight", "language_model.encoder.layers.*.mlp.shared_experts.linear_fc2.weight"},
    {"layers.*.moe.shared_gate.weight", "language_model.encoder.layers.*.mlp.shared_experts.gate_weight"},
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
    {".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."},
    {".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."},
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
