#include "converters/deepseek.h"

#include <fmt/format.h>

#include <cmath>

#include "runtime/json/json.h"
#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kMaxRank = 1 << 20, kMaxChannels = 1 << 16;  // as the recipe's schema has it

/// The channels of heads and of latent vectors. A null q_lora_rank: queries come from the stream. head_dim and
/// qk_head_dim are what the classes make of the others, and write.
ConfigKey latent_sizes() {
  const auto read_one = [](ConfigReader& in, const char* name, int64_t absent, int64_t most) {
    const int64_t value = in.integer(name, absent);
    if (value < 1 || value > most) in.invalid(fmt::format("{} = {} is out of range, 1 to {}", name, value, most));
    return value;
  };
  const auto read = [=](ConfigReader& in, M& m) {
    const bool plain = in.contains("q_lora_rank") && in.find("q_lora_rank") == nullptr;
    m.mla = {.kv_rank = read_one(in, "kv_lora_rank", 512, kMaxRank),
             .q_rank = plain ? 0 : read_one(in, "q_lora_rank", 1536, kMaxRank),
             .nope_dim = read_one(in, "qk_nope_head_dim", 128, kMaxChannels),
             .rope_dim = read_one(in, "qk_rope_head_dim", 64, kMaxChannels),
             .value_dim = read_one(in, "v_head_dim", 128, kMaxChannels)};
    m.head_dim = m.mla.nope_dim + m.mla.rope_dim;
    if (m.mla.rope_dim % 2 != 0) {
      in.invalid(fmt::format("qk_rope_head_dim = {} is odd, and channels turn in pairs", m.mla.rope_dim));
    }
    if (m.mla.value_dim > m.head_dim) {
      in.unsupported(fmt::format("v_head_dim = {} is more than qk_nope_head_dim + qk_rope_head_dim = {}",
                                 m.mla.value_dim, m.head_dim));
    }
    if (m.kv_heads != m.heads) {
      in.unsupported(
          fmt::format("num_key_value_heads = {} of num_attention_heads = {}: each head has keys and values of "
                      "its own with latent attention",
                      m.kv_heads, m.heads));
    }
    for (const auto& [name, derived] : {std::pair("head_dim", m.mla.rope_dim), {"qk_head_dim", m.head_dim}}) {
      if (in.find(name) != nullptr && in.integer(name, derived) != derived) {
        in.invalid(fmt::format("{} = {}: with these heads it is {}", name, in.integer(name, derived), derived));
      }
    }
  };
  const auto write = [](const M& m, ordered_json& out) {
    const MlaConfig& mla = m.mla;
    out["kv_lora_rank"] = mla.kv_rank;
    out["q_lora_rank"] = mla.q_rank > 0 ? ordered_json(mla.q_rank) : ordered_json();
    out["qk_nope_head_dim"] = mla.nope_dim;
    out["qk_rope_head_dim"] = mla.rope_dim;
    out["v_head_dim"] = mla.value_dim;
    out["head_dim"] = mla.rope_dim;
    out["qk_head_dim"] = m.head_dim;
  };
  return {
      {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim", "qk_head_dim"},
      read,
      write};
}

/// Rotary positions of a part of each head, and the scores' factor that follows from their scaling: m * m / sqrt(D)
/// with m = 0.1 mscale_all_dim ln(factor) + 1.
ConfigKey latent_rope(bool scale_in_5_alone) {
  ConfigKey out = rope();
  const auto read_rope = out.read;
  out.read = [=](ConfigReader& in, M& m) {
    // The classes take the part that turns for the head.
    M turning = m;
    turning.head_dim = m.mla.rope_dim;
    read_rope(in, turning);
    m.positions = turning.positions;
    m.rope_theta = turning.rope_theta;
    const RotaryPairs pairs = m.rope.pairs;
    m.rope = turning.rope;
    m.rope.pairs = pairs;
    m.rope.dims = 0;
    for (const char* place : {"rope_scaling", "rope_parameters"}) {
      const json* scaling = in.find(place);
      if (scaling == nullptr || m.rope.scaling == RopeScaling::kNone || m.rope.scaling == RopeScaling::kYarn) continue;
      if (scaling->is_object() && scaling->contains("mscale_all_dim") && (*scaling)["mscale_all_dim"] != 0) {
        in.unsupported(fmt::format("{}.mscale_all_dim = {}: read with yarn alone", place,
                                   json_text((*scaling)["mscale_all_dim"])));
      }
    }
    if (m.rope.scaling != RopeScaling::kYarn || m.rope.mscale_all_dim == 0) return;
    const double scale = m.rope.factor <= 1 ? 1 : 0.1 * m.rope.mscale_all_dim * std::log(m.rope.factor) + 1;
    m.attention_scale = scale * scale / std::sqrt(static_cast<double>(m.head_dim));
    if (scale_in_5_alone && scale != 1) {
      in.note(
          fmt::format("mscale_all_dim = {}: scores are multiplied by {}, as transformers 5 and the published code "
                      "do; transformers 4 does not",
                      m.rope.mscale_all_dim, scale * scale));
    }
  };
  return out;
}

}  // namespace

std::vector<ConfigKey> deepseek_keys(const DeepseekDefaults& absent, const std::vector<ConfigKey>& own) {
  std::vector<ConfigKey> out = {
      size("vocab_size", &M::vocab, absent.vocab),
      size("hidden_size", &M::width, absent.width),
      size("intermediate_size", &M::ffn, absent.ffn),
      size("num_hidden_layers", &M::layers, absent.layers),
      size("num_attention_heads", &M::heads, absent.heads),
      kv_heads(absent.kv_heads),
      latent_sizes(),
      activation("hidden_act", "silu", gated_activations()),
      size("max_position_embeddings", &M::context, absent.context),
      number("rms_norm_eps", &M::norm_eps, 1e-6),
      latent_rope(absent.scale_in_5_alone),
      biases("attention_bias", kQkv | kOut, false),
      refuse_unless("moe_layer_freq", 1),
      refuse_unless("mlp_bias", false),
      // Of the published files, about training and its layout.
      unread({"ep_size", "aux_loss_alpha", "seq_aux", "num_mtp_layers", "output_router_logits"}),
      further_tokens("num_nextn_predict_layers"),
      dropout("attention_dropout", &M::attention_dropout),
      flag("tie_word_embeddings", &M::tied_embeddings, false),
      number("initializer_range", &M::init_std, 0.02),
  };
  out.insert(out.end(), own.begin(), own.end());
  return out;
}

std::vector<ConfigKey> deepseek_v3_keys() {
  constexpr int64_t kDenseFfn = 18432;
  std::vector<ConfigKey> own = {
      expert_width("moe_intermediate_size", 2048, kDenseFfn),
      experts({.count = "n_routed_experts", .alias = "num_local_experts", .absent = 256, .absent_top_k = 8}),
      shared_experts("n_shared_experts", 1),
      first_dense("first_k_dense_replace", 3),
      renormalised_experts(true),
      refuse_unless("scoring_func", "sigmoid"),
      refuse_unless("topk_method", "noaux_tc"),
      {{"rope_interleave"},
       [](ConfigReader& in, M& m) {
         m.rope.pairs = in.boolean("rope_interleave", true) ? RotaryPairs::kInterleaved : RotaryPairs::kHalf;
       },
       [](const M& m, ordered_json& out) { out["rope_interleave"] = m.rope.pairs == RotaryPairs::kInterleaved; }},
  };
  for (ConfigKey& key : grouped_router({.groups = 8, .groups_per_token = 4, .scale = 2.5})) {
    own.push_back(std::move(key));
  }
  return deepseek_keys({.ffn = kDenseFfn}, own);
}

Family deepseek(Family own) {
  static constexpr auto kTensors = with_rows(with_llama_rows(kDeepseekRows, kExpertRows), kMtpRows);
  own.tensors = kTensors;
  own.also = kQwenMoeStacks;
  own.later_layers = "model.layers.";
  return llama_like(own);
}

}  // namespace cairn::convert
