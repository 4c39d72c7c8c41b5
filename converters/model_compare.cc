#include "converters/model_compare.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "runtime/plan/model_tensors.h"

namespace cairn::convert {
namespace {

template <class T>
std::string text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return fmt::format("{}", static_cast<int>(value));
  } else {
    return fmt::format("{}", value);
  }
}

std::string text(const std::optional<bool>& value) { return value ? (*value ? "true" : "false") : "unset"; }

std::string text(Positions value) {
  constexpr std::string_view kNames[] = {"none", "learned", "rotary", "alibi"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(NormKind value) { return value == NormKind::kLayerNorm ? "layernorm" : "rmsnorm"; }

std::string text(Activation value) {
  constexpr std::string_view kNames[] = {"gelu_tanh",   "gelu",   "relu",        "gelu_quick", "relu2",
                                         "silu",        "swiglu", "geglu",       "geglu_tanh", "reglu",
                                         "quick_geglu", "reglu2", "swiglu_clamp"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(BlockKind value) {
  constexpr std::string_view kNames[] = {"pre_norm",        "post_norm", "deep_norm", "parallel",
                                         "parallel_shared", "sandwich",  "out_norm"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(WeightInit value) {
  constexpr std::string_view kNames[] = {"scaled", "plain", "small_wang", "deep_norm"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(QkNorm value) {
  constexpr std::string_view kNames[] = {"none", "head", "whole", "head_layernorm", "l2", "shared_layernorm"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(TemperatureForm value) { return value == TemperatureForm::kLlama4 ? "llama4" : "ministral3"; }

std::string text(Mask value) {
  constexpr std::string_view kNames[] = {"causal", "bidirectional", "prefix"};
  return std::string(kNames[static_cast<int>(value)]);
}

std::string text(const RopeConfig& rope) {
  constexpr std::string_view kScalings[] = {"none", "linear", "dynamic", "yarn", "llama3", "longrope"};
  return fmt::format("{{{} channels, {} pairs, scaling {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}}", rope.dims,
                     rope.pairs == RotaryPairs::kHalf ? "half" : "interleaved",
                     kScalings[static_cast<int>(rope.scaling)], rope.factor, rope.original_context,
                     rope.low_freq_factor, rope.high_freq_factor, rope.beta_fast, rope.beta_slow, rope.attention_factor,
                     rope.mscale, rope.mscale_all_dim, rope.truncate, rope.short_factor, rope.long_factor);
}

/// Without what says how experts are trained: what balances them.
std::string text(const MoeConfig& moe) {
  const auto& [experts, top_k, renormalise, aux_loss, router, z_loss, shared, ffn, dense_layers, shared_ffn,
               shared_gate, router_bias, scale_input, groups, groups_per_token, scale, choice_bias, bias_rate,
               aux_scope] = moe;
  std::string out = fmt::format("{} experts, {} of them, renormalise {}", experts, top_k, renormalise);
  if (router != RouterKind::kSoftmax) out += ", router sigmoid";
  if (shared != 0) out += fmt::format(", {} shared", shared);
  if (ffn != 0) out += fmt::format(", ffn {}", ffn);
  if (!dense_layers.empty()) out += fmt::format(", dense layers {}", text(dense_layers));
  if (shared_ffn != 0) out += fmt::format(", shared_ffn {}", shared_ffn);
  if (shared_gate) out += ", shared_gate";
  if (router_bias) out += ", router_bias";
  if (scale_input) out += ", scale_input";
  if (groups != 1 || groups_per_token != 1) out += fmt::format(", {} of {} groups", groups_per_token, groups);
  if (scale != 1) out += fmt::format(", scale {}", scale);
  if (choice_bias) out += ", choice_bias";
  return "{" + out + "}";
}

std::string text(const MlaConfig& mla) {
  const auto& [kv_rank, q_rank, nope_dim, rope_dim, value_dim] = mla;
  return fmt::format("{{kv_rank {}, q_rank {}, nope_dim {}, rope_dim {}, value_dim {}}}", kv_rank, q_rank, nope_dim,
                     rope_dim, value_dim);
}

/// Every field by name. The binding names all of them on purpose: an option that is added to ModelConfig and not here
/// would be lost by an export that nobody notices, so it does not compile.
std::vector<std::pair<std::string_view, std::string>> fields(const ModelConfig& m) {
  const auto& [layers, width, heads, kv_heads, head_dim, ffn, context, vocab, positions, alibi, position_offset,
               rope_theta, rope, embed, embedding_norm, embedding_scale, block, residual_scale, branch_scale, norm,
               norm_weight, norm_bias, norm_plus_one, norm_eps, final_norm, activation, swiglu_alpha, swiglu_limit,
               bias, qkv_bias, out_bias, mlp_bias, head_bias, clip_qkv, qk_norm, mask, sliding_window, window_layers,
               window_rope_theta, nope_layers, attention_chunk, chunk_layers, temperature_scale, temperature_floor,
               temperature_form, sinks, attention_scale, attention_scale_by_layer, score_cap, logit_scale, logit_cap,
               top_query, mla, moe, mtp, tied_embeddings, embedding_dropout, attention_dropout, residual_dropout,
               init_std, init] = m;
  return {{"layers", text(layers)},
          {"width", text(width)},
          {"heads", text(heads)},
          {"kv_heads", text(kv_heads)},
          {"head_dim", text(head_dim)},
          {"ffn", text(ffn)},
          {"context", text(context)},
          {"vocab", text(vocab)},
          {"positions", text(positions)},
          {"alibi", alibi == AlibiForm::kRounded ? "rounded" : "distance"},
          {"position_offset", text(position_offset)},
          {"rope_theta", text(rope_theta)},
          {"rope", text(rope)},
          {"embed_dim", text(embed)},
          {"embedding_norm", text(embedding_norm)},
          {"embedding_scale", text(embedding_scale)},
          {"block", text(block)},
          {"residual_scale", text(residual_scale)},
          {"branch_scale", text(branch_scale)},
          {"norm", text(norm)},
          {"norm_weight", text(norm_weight)},
          {"norm_bias", text(norm_bias)},
          {"norm_plus_one", text(norm_plus_one)},
          {"norm_eps", text(norm_eps)},
          {"final_norm", text(final_norm)},
          {"activation", text(activation)},
          {"swiglu_alpha", text(swiglu_alpha)},
          {"swiglu_limit", text(swiglu_limit)},
          {"bias", text(bias)},
          {"qkv_bias", text(qkv_bias)},
          {"out_bias", text(out_bias)},
          {"mlp_bias", text(mlp_bias)},
          {"head_bias", text(head_bias)},
          {"clip_qkv", text(clip_qkv)},
          {"qk_norm", text(qk_norm)},
          {"mask", text(mask)},
          {"sliding_window", text(sliding_window)},
          {"window_layers", text(window_layers)},
          {"window_rope_theta", text(window_rope_theta)},
          {"nope_layers", text(nope_layers)},
          {"attention_chunk", text(attention_chunk)},
          {"chunk_layers", text(chunk_layers)},
          {"temperature_scale", text(temperature_scale)},
          {"temperature_floor", text(temperature_floor)},
          {"temperature_form", text(temperature_form)},
          {"attention_sinks", text(sinks)},
          {"attention_scale", text(attention_scale)},
          {"attention_scale_by_layer", text(attention_scale_by_layer)},
          {"score_cap", text(score_cap)},
          {"logit_scale", text(logit_scale)},
          {"logit_cap", text(logit_cap)},
          {"top_query", text(top_query)},
          {"mla", text(mla)},
          {"moe", text(moe)},
          {"mtp", mtp.depth == 0 ? "none" : fmt::format("{{depth {}, loss {}}}", mtp.depth, mtp.loss)},
          {"tied_embeddings", text(tied_embeddings)},
          {"embedding_dropout", text(embedding_dropout)},
          {"attention_dropout", text(attention_dropout)},
          {"residual_dropout", text(residual_dropout)},
          {"init_std", text(init_std)},
          {"init", text(init)}};
}

/// Only what the scaling reads, the rest as if unset.
RopeConfig canonical_rope(const ModelConfig& m) {
  const RopeConfig& rope = m.rope;
  RopeConfig out{.dims = rope.dims == m.head_dim ? 0 : rope.dims, .pairs = rope.pairs, .scaling = rope.scaling};
  if (rope.scaling == RopeScaling::kNone) return out;
  out.factor = rope.factor;
  if (rope.scaling == RopeScaling::kLinear) return out;
  out.original_context = rope.original_context == m.context ? 0 : rope.original_context;
  if (rope.scaling == RopeScaling::kLlama3) {
    out.low_freq_factor = rope.low_freq_factor;
    out.high_freq_factor = rope.high_freq_factor;
  } else if (rope.scaling == RopeScaling::kLongRope) {
    out.attention_factor = rope.attention_factor;
    out.short_factor = rope.short_factor;
    out.long_factor = rope.long_factor;
  } else if (rope.scaling == RopeScaling::kYarn) {
    out.beta_fast = rope.beta_fast;
    out.beta_slow = rope.beta_slow;
    out.attention_factor = rope.attention_factor;
    out.truncate = rope.truncate;
    if (rope.attention_factor == 0 && rope.mscale != 0 && rope.mscale_all_dim != 0) {
      out.mscale = rope.mscale;
      out.mscale_all_dim = rope.mscale_all_dim;
    }
  }
  return out;
}

MoeConfig canonical_experts(const ModelConfig& m) {
  MoeConfig out = m.moe;
  if (out.experts == 0) return {};
  std::ranges::sort(out.dense_layers);
  out.dense_layers.erase(std::unique(out.dense_layers.begin(), out.dense_layers.end()), out.dense_layers.end());
  if (out.ffn == m.ffn) out.ffn = 0;
  const int64_t shared = shared_ffn(m), each = expert_ffn(m);
  const bool whole = each > 0 && shared % each == 0;
  out.shared_experts = whole ? shared / each : 0;
  out.shared_ffn = whole ? 0 : shared;
  out.choice_bias = has_choice_bias(m);
  out.bias_rate = out.z_loss = 0;  // how to train, as dropout
  return out;
}

}  // namespace

ModelConfig canonical(ModelConfig m) {
  const bool qkv = has_bias(m, BiasOf::kQkv), out = has_bias(m, BiasOf::kOut), mlp = has_bias(m, BiasOf::kMlp);
  m.bias = qkv && out && mlp;
  m.qkv_bias = m.out_bias = m.mlp_bias = std::nullopt;
  if (!m.bias && qkv) m.qkv_bias = true;
  if (!m.bias && out) m.out_bias = true;
  if (!m.bias && mlp) m.mlp_bias = true;
  if (!m.norm_weight || m.norm != NormKind::kLayerNorm) m.norm_bias = true;  // not read
  if (m.positions == Positions::kRotary) {
    m.rope = canonical_rope(m);
  } else {
    m.rope = {};
    m.rope_theta = ModelConfig{}.rope_theta;
    m.nope_layers.clear();
    m.temperature_scale = 0;
  }
  if (m.positions != Positions::kLearned) m.position_offset = 0;
  if (m.positions != Positions::kAlibi) m.alibi = AlibiForm::kDistance;
  if (m.embed_dim == m.width) m.embed_dim = 0;
  if (m.block != BlockKind::kDeepNorm) m.residual_scale = 1.0;
  std::vector<int64_t> all(m.layers);
  std::iota(all.begin(), all.end(), 0);
  if (m.sliding_window == 0 || m.window_layers == all) m.window_layers.clear();
  std::ranges::sort(m.nope_layers);
  std::ranges::sort(m.chunk_layers);
  if (m.attention_chunk == 0 || m.chunk_layers == all) m.chunk_layers.clear();
  if (m.temperature_form == TemperatureForm::kLlama4 && m.nope_layers.empty()) m.temperature_scale = 0;
  if (m.temperature_scale == 0) {
    m.temperature_floor = ModelConfig{}.temperature_floor;
    m.temperature_form = ModelConfig{}.temperature_form;
  }
  if (m.activation != Activation::kSwiGluClamp) {
    m.swiglu_alpha = ModelConfig{}.swiglu_alpha;
    m.swiglu_limit = ModelConfig{}.swiglu_limit;
  }
  const bool plain = m.rope.scaling == RopeScaling::kNone && m.window_rope_theta == m.rope_theta;
  if (m.positions != Positions::kRotary || m.sliding_window == 0 || plain) m.window_rope_theta = 0;
  if (m.attention_scale == 1.0 / std::sqrt(static_cast<double>(m.head_dim))) m.attention_scale = 0;
  m.moe = canonical_experts(m);
  if (m.moe.experts > 0 && !has_dense_layers(m)) m.ffn = expert_ffn(m), m.moe.ffn = 0;
  m.init = WeightInit::kScaled;
  m.mtp.loss = MtpConfig{}.loss;
  m.embedding_dropout = m.attention_dropout = m.residual_dropout = 0;  // how to train, not what the weights mean
  return m;
}

std::vector<std::string> differing_fields(const ModelConfig& found, const ModelConfig& wanted) {
  const auto a = fields(found), b = fields(wanted);
  std::vector<std::string> out;
  for (size_t k = 0; k < a.size(); ++k) {
    if (a[k].second != b[k].second) out.push_back(fmt::format("{} = {}", b[k].first, b[k].second));
  }
  return out;
}

}  // namespace cairn::convert
