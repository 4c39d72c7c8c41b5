#include "runtime/plan/model_check.h"

#include <fmt/format.h>

#include "runtime/plan/model_tensors.h"

namespace cairn {
namespace {

/// Collects mistakes.
class Check {
 public:
  explicit Check(const ModelConfig& m) : m_(m) {}

  std::vector<Mistake> run() {
    if (m_.positions == Positions::kRotary) rotary();
    if (m_.position_offset > 0 && m_.positions != Positions::kLearned) {
      found("model.position_offset", "is for learned positions only");
    }
    if (m_.residual_scale != 1.0 && m_.block != BlockKind::kDeepNorm) {
      found("model.residual_scale", "is for model.block = deep_norm only");
    }
    if (m_.branch_scale != 1.0 && is_parallel(m_.block)) {
      found("model.branch_scale", "does not go with parallel blocks: no known model has both", "1");
    }
    if (m_.norm_plus_one && !m_.norm_weight) {
      found("model.norm_plus_one", "is for weights, and model.norm_weight = false: the norms have none");
    }
    if (m_.clip_qkv > 0 && m_.qk_norm != QkNorm::kNone) {
      found("model.clip_qkv", "does not go with model.qk_norm: models differ in which comes first", "0");
    }
    if (m_.alibi != AlibiForm::kDistance && m_.positions != Positions::kAlibi) {
      found("model.alibi", "= rounded is for model.positions = alibi only", "distance");
    }
    if (m_.score_cap > 0 && m_.positions == Positions::kAlibi) {
      found("model.score_cap", "does not go with model.positions = alibi: no known model says which comes first", "0");
    }
    turning();
    attention();
    mla();
    if (m_.activation != Activation::kSwiGluClamp) {
      const ModelConfig unset;
      for (const auto& [field, set] : {std::pair("swiglu_alpha", m_.swiglu_alpha != unset.swiglu_alpha),
                                       {"swiglu_limit", m_.swiglu_limit != unset.swiglu_limit}}) {
        if (set) found(fmt::format("model.{}", field), "is for model.activation = swiglu_clamp only");
      }
    }
    if (m_.logit_scale != 1.0 && m_.head_bias) {
      found("model.logit_scale", "does not go with model.head_bias: no known model says which comes first");
    }
    if (m_.top_query) top_query();
    if (m_.mtp.depth > 0) mtp();
    windows();
    if (m_.moe.experts > 0) {
      moe();
    } else {
      no_experts();
    }
    return std::move(found_);
  }

 private:
  void found(const std::string& field, const std::string& what, std::string accepted = "") {
    found_.push_back({.field = field, .message = field + " " + what, .accepted = std::move(accepted)});
  }

  void rotary() {
    const RopeConfig& rope = m_.rope;
    const int64_t dims = rotary_dims(m_);
    const std::string name = has_mla(m_) ? "rope_dim" : rope.dims > 0 ? "dims" : "head_dim";
    const std::string field = (has_mla(m_) ? "model.mla." : rope.dims > 0 ? "model.rope." : "model.") + name;
    if (dims > m_.head_dim) {
      found(field, fmt::format("= {} is more than model.head_dim = {}: no such channels", dims, m_.head_dim));
    } else if (dims % 2 != 0) {
      found(field, fmt::format("= {} is odd, and rotary positions turn pairs of channels", dims),
            dims == 1 ? name + " 2" : fmt::format("{} {} or {}", name, dims - 1, dims + 1));
    } else if (rope.scaling == RopeScaling::kDynamic && dims < 4) {
      found("model.rope.scaling", fmt::format("= dynamic needs 4 or more channels that turn, got {}", dims));
    }
    if (rope.scaling == RopeScaling::kLlama3 && rope.low_freq_factor >= rope.high_freq_factor) {
      found("model.rope.low_freq_factor",
            fmt::format("= {} must be less than high_freq_factor = {}", rope.low_freq_factor, rope.high_freq_factor));
    }
    if (rope.scaling == RopeScaling::kYarn && rope.beta_slow >= rope.beta_fast) {
      found("model.rope.beta_slow",
            fmt::format("= {} must be less than beta_fast = {}", rope.beta_slow, rope.beta_fast));
    }
    if (rope.scaling == RopeScaling::kLongRope) longrope(dims / 2);
  }

  void turning() {
    const bool rotary = m_.positions == Positions::kRotary;
    if (m_.window_rope_theta > 0 && (!rotary || m_.sliding_window == 0)) {
      found("model.window_rope_theta",
            rotary ? "is for layers with a window, and model.sliding_window is 0" : "is for rotary positions only");
    }
    if (!m_.nope_layers.empty() && !rotary) found("model.nope_layers", "is for rotary positions only");
    layers_exist("model.nope_layers", m_.nope_layers);
    const bool in_all = m_.temperature_form == TemperatureForm::kMinistral3;
    if (m_.temperature_scale > 0 && in_all && !rotary) {
      found("model.temperature_form", "= ministral3 is for rotary positions only");
    } else if (m_.temperature_scale > 0 && !in_all && m_.nope_layers.empty()) {
      found("model.temperature_scale", "is for model.nope_layers, and there are none", "0");
    } else if (m_.temperature_scale > 0 && m_.head_dim % 2 != 0) {
      found("model.head_dim", fmt::format("= {} must be even with model.temperature_scale", m_.head_dim),
            fmt::format("head_dim {}", m_.head_dim + 1));
    }
    if (m_.qk_norm == QkNorm::kL2 && !rotary) {
      found("model.qk_norm", "= l2 is for layers whose q and k turn: model.positions must be rotary");
    } else if (m_.qk_norm == QkNorm::kL2 &&
               (m_.rope.scaling == RopeScaling::kYarn || m_.rope.scaling == RopeScaling::kLongRope)) {
      // The norm is taken before the rotation, which is the same where that changes no length.
      found("model.rope.scaling", "has a factor of cosines and sines, which does not go with model.qk_norm = l2");
    }
  }

  /// What is of the softmax and its mask.
  void attention() {
    if (!m_.chunk_layers.empty() && m_.attention_chunk == 0) {
      found("model.chunk_layers", "names layers, but model.attention_chunk is 0: set the chunk too");
    }
    layers_exist("model.chunk_layers", m_.chunk_layers);
    if (m_.attention_chunk > 0 && m_.mask != Mask::kCausal) {
      found("model.attention_chunk", "looks back only: it needs model.mask = causal");
    }
    if (m_.attention_chunk > 0 && m_.sliding_window > 0) {
      found("model.attention_chunk", "does not go with model.sliding_window: no known model has both", "0");
    }
    const std::string foreign = "does not go with model.top_query: no known model has both";
    if (m_.top_query && m_.attention_chunk > 0) found("model.attention_chunk", foreign, "0");
    if (m_.top_query && m_.attention_sinks) found("model.attention_sinks", foreign, "false");
    if (m_.top_query && has_temperature(m_, m_.layers)) found("model.temperature_form", foreign, "llama4");
  }

  void mla() {
    const MlaConfig& mla = m_.mla;
    if (mla.kv_rank == 0) {
      for (const auto& [field, value] : {std::pair("q_rank", mla.q_rank),
                                         {"nope_dim", mla.nope_dim},
                                         {"rope_dim", mla.rope_dim},
                                         {"value_dim", mla.value_dim}}) {
        if (value > 0) {
          found(fmt::format("model.mla.{}", field), "is set, and model.mla.kv_rank = 0: there are no latent vectors");
        }
      }
      return;
    }
    if (m_.positions != Positions::kRotary) {
      found("model.positions", "must be rotary with model.mla: a part of a head turns", "rotary");
    }
    bool complete = true;
    for (const auto& [field, value] :
         {std::pair("nope_dim", mla.nope_dim), {"rope_dim", mla.rope_dim}, {"value_dim", mla.value_dim}}) {
      if (value > 0) continue;
      found(fmt::format("model.mla.{}", field), "= 0: heads need such channels", "1 or more");
      complete = false;
    }
    if (!complete) return;
    if (m_.head_dim != mla.nope_dim + mla.rope_dim) {
      found("model.head_dim",
            fmt::format("= {}, and model.mla.nope_dim = {} + model.mla.rope_dim = {} are the channels of a head",
                        m_.head_dim, mla.nope_dim, mla.rope_dim),
            fmt::format("head_dim {}", mla.nope_dim + mla.rope_dim));
    } else if (mla.value_dim > m_.head_dim) {
      found("model.mla.value_dim",
            fmt::format("= {} is more than the {} channels of a key, to which values are widened", mla.value_dim,
                        m_.head_dim),
            fmt::format("value_dim from 1 to {}", m_.head_dim));
    }
    if (m_.kv_heads != m_.heads) {
      found("model.kv_heads",
            fmt::format("= {} with model.mla, whose {} heads all have keys and values of their own", m_.kv_heads,
                        m_.heads),
            fmt::format("kv_heads {}", m_.heads));
    }
    if (m_.rope.dims > 0) found("model.rope.dims", "is model.mla.rope_dim with model.mla", "0");
    const std::string foreign = "does not go with model.mla: no known model has both";
    if (m_.qk_norm != QkNorm::kNone) found("model.qk_norm", foreign, "none");
    if (m_.clip_qkv > 0) found("model.clip_qkv", foreign, "0");
    if (m_.top_query) found("model.top_query", foreign, "false");
    if (m_.attention_sinks) found("model.attention_sinks", foreign, "false");
    if (m_.temperature_scale > 0) found("model.temperature_scale", foreign, "0");
  }

  void layers_exist(const std::string& field, const std::vector<int64_t>& named) {
    for (const int64_t layer : named) {
      if (layer < m_.layers) continue;
      return found(field, fmt::format("names layer {}; there are 0 to {}", layer, m_.layers - 1));
    }
  }

  void longrope(int64_t pairs) {
    for (const auto& [name, list] :
         {std::pair("short_factor", &m_.rope.short_factor), {"long_factor", &m_.rope.long_factor}}) {
      if (std::ssize(*list) != pairs) {
        found(fmt::format("model.rope.{}", name),
              fmt::format("has {} numbers, and {} pairs of channels turn: longrope needs one for each", list->size(),
                          pairs));
      }
    }
    if ((m_.rope.original_context > 0 ? m_.rope.original_context : m_.context) < 2) {
      found("model.rope.original_context", "must be at least 2 with longrope, whose factor divides by its logarithm");
    }
  }

  void windows() {
    if (!m_.window_layers.empty() && m_.sliding_window == 0) {
      found("model.window_layers", "names layers, but model.sliding_window is 0: set the window too");
    }
    layers_exist("model.window_layers", m_.window_layers);
    if (m_.sliding_window > 0 && m_.mask != Mask::kCausal) {
      found("model.sliding_window", "looks back only: it needs model.mask = causal");
    }
  }

  void moe() {
    if (m_.moe.top_k > m_.moe.experts) {
      found("model.moe.top_k", fmt::format("= {} is more than model.moe.experts = {}", m_.moe.top_k, m_.moe.experts));
    }
    const MoeConfig& moe = m_.moe;
    if (moe.experts % moe.groups != 0) {
      found("model.moe.groups", fmt::format("= {} does not divide model.moe.experts = {}", moe.groups, moe.experts));
    } else if (moe.groups_per_token > moe.groups) {
      found("model.moe.groups_per_token",
            fmt::format("= {} is more than model.moe.groups = {}", moe.groups_per_token, moe.groups));
    } else if (const int64_t open = moe.groups_per_token * (moe.experts / moe.groups);
               moe.top_k > open && moe.top_k <= moe.experts) {
      found("model.moe.top_k", fmt::format("= {} is more than the {} experts of model.moe.groups_per_token = {} groups",
                                           moe.top_k, open, moe.groups_per_token));
    }
    if (moe.z_loss > 0 && moe.router == RouterKind::kSigmoid) {
      found("model.moe.z_loss", "keeps a softmax's denominator near 1, and model.moe.router = sigmoid has none", "0");
    }
    if (!is_gated(m_.activation)) {
      found("model.activation", "must have a gate with experts",
            "swiglu, geglu, geglu_tanh, reglu, quick_geglu, reglu2 or swiglu_clamp");
    }
    if (has_bias(m_, BiasOf::kMlp) && moe.shared_gate) {
      found("model.mlp_bias", "does not go with model.moe.shared_gate: no known model has both", "false");
    }
    if (has_bias(m_, BiasOf::kMlp) && moe.scale_input) {
      found("model.mlp_bias", "does not go with model.moe.scale_input: no known model has both", "false");
    }
    if (moe.shared_experts > 0 && moe.shared_ffn > 0) {
      found("model.moe.shared_ffn",
            fmt::format("= {} and model.moe.shared_experts = {} say the same: one is enough", moe.shared_ffn,
                        moe.shared_experts),
            "0");
    }
    if (moe.shared_gate && shared_ffn(m_) == 0) {
      found("model.moe.shared_gate", "is of an MLP beside the experts, and there is none: set model.moe.shared_ffn");
    }
    layers_exist("model.moe.dense_layers", moe.dense_layers);
    if (expert_layers(m_) == 0 && m_.layers > 0) {
      found("model.moe.dense_layers", "names all layers, so that none has experts", "model.moe.experts 0");
    }
  }

  void no_experts() {
    const MoeConfig& moe = m_.moe;
    for (const auto& [field, set] : {std::pair("ffn", moe.ffn > 0),
                                     {"dense_layers", !moe.dense_layers.empty()},
                                     {"shared_ffn", moe.shared_ffn > 0},
                                     {"shared_gate", moe.shared_gate},
                                     {"router_bias", moe.router_bias},
                                     {"scale_input", moe.scale_input},
                                     {"choice_bias", moe.choice_bias}}) {
      if (set) found(fmt::format("model.moe.{}", field), "is set, and model.moe.experts = 0: there are none");
    }
  }

  void top_query() {
    if (!m_.final_norm) found("model.top_query", "comes after the final norm, which is off");
    if (m_.block != BlockKind::kPreNorm) found("model.top_query", "needs model.block = pre_norm");
    if (m_.moe.experts > 0) found("model.top_query", "does not go with model.moe: no known model has both");
  }

  void mtp() {
    const std::string of = "with model.mtp, whose modules ";
    const auto must = [&](bool held, const char* field, const char* value, const char* why) {
      if (!held) found(field, fmt::format("must be {} {}{}", value, of, why), value);
    };
    must(m_.block == BlockKind::kPreNorm, "model.block", "pre_norm", "are layers of that kind alone");
    must(m_.mask == Mask::kCausal, "model.mask", "causal", "see what is before a row alone");
    must(m_.final_norm, "model.final_norm", "true", "read the final norm's output");
    must(m_.positions != Positions::kLearned, "model.positions", "rotary",
         "look tokens up in the table of embeddings, and no known model adds positions there");
    must(embed_dim(m_) == m_.width, "model.embed_dim", "0", "join embeddings of the stream's width");
    must(!m_.embedding_norm, "model.embedding_norm", "false", "have norms of their own");
    must(m_.embedding_scale == 1.0, "model.embedding_scale", "1", "have norms of their own");
    must(!m_.top_query, "model.top_query", "false", "stand in its place");
    must(!balances_over_layers(m_), "model.moe.aux_scope", "layer", "come behind the layers that it counts");
    if (m_.context > 0 && m_.context <= m_.mtp.depth + 1) {
      found("model.mtp.depth",
            fmt::format("= {} looks further than a sample of model.context = {} tokens", m_.mtp.depth, m_.context));
    }
  }

  const ModelConfig& m_;
  std::vector<Mistake> found_;
};

}  // namespace

std::vector<Mistake> find_mistakes(const ModelConfig& model) { return Check(model).run(); }

}  // namespace cairn
