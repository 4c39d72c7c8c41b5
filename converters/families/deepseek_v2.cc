// DeepSeek-V2, V2-Lite, Coder-V2: latent attention, experts behind a softmax. Source: transformers models/deepseek_v2.
#include <fmt/format.h>

#include "converters/deepseek.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

ModelConfig base() {
  M m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  m.moe.renormalise = false;
  return m;
}

/// Experts from all, or from the groups whose best experts are best.
ConfigKey choice() {
  constexpr const char *kMethod = "topk_method", *kGroups = "n_group", *kChosen = "topk_group",
                       *kScale = "routed_scaling_factor";
  const auto read = [=](ConfigReader& in, M& m) {
    const std::string method = in.text(kMethod, "greedy");
    m.moe.scale = in.number(kScale, 1.0);
    if (!(m.moe.scale > 0)) in.unsupported(fmt::format("{} = {} must be above 0", kScale, m.moe.scale));
    if (method == "greedy") return;
    if (method != "group_limited_greedy") {
      return in.unsupported(
          fmt::format("{} = \"{}\": known are \"greedy\", \"group_limited_greedy\"", kMethod, method));
    }
    m.moe.groups = in.integer(kGroups, 0);
    m.moe.groups_per_token = in.integer(kChosen, 0);
    if (m.moe.groups < 1 || m.moe.groups > 64 || m.moe.groups_per_token < 1 || m.moe.experts % m.moe.groups != 0 ||
        m.moe.groups_per_token > m.moe.groups || m.moe.top_k > m.moe.experts / m.moe.groups * m.moe.groups_per_token) {
      in.invalid(
          fmt::format("{} experts in {} = {} groups (1 to 64), {} = {} of them a token: no place for {} experts a "
                      "token",
                      m.moe.experts, kGroups, m.moe.groups, kChosen, m.moe.groups_per_token, m.moe.top_k));
      m.moe.groups = m.moe.groups_per_token = 1;
    }
  };
  const auto write = [=](const M& m, nlohmann::ordered_json& out) {
    out[kMethod] = m.moe.groups > 1 ? "group_limited_greedy" : "greedy";
    out[kGroups] = m.moe.groups;
    out[kChosen] = m.moe.groups_per_token;
    out[kScale] = m.moe.scale;
  };
  return {
      {kMethod, kGroups, kChosen, kScale}, read, write, [](std::string_view, const nlohmann::json&) { return true; }};
}

/// The class's own number is none, and it fails on it.
ConfigKey stated_top_k() {
  return {{"num_experts_per_tok"},
          [](ConfigReader& in, M&) {
            if (in.find("num_experts_per_tok") != nullptr) return;
            in.invalid("num_experts_per_tok is missing: the class has no number for it");
          },
          nullptr};
}

/// 4.x and 5.x have other numbers for an absent one.
ConfigKey stated_vocabulary() {
  return {{"vocab_size"},
          [](ConfigReader& in, M& m) {
            if (in.find("vocab_size") != nullptr) return;
            if (in.line() == 0) {
              in.unsupported("vocab_size is absent: transformers 5 takes 102400, 4.x takes 32000: add it");
            }
            if (in.line() == 4) m.vocab = 32000;
          },
          nullptr};
}

std::string beyond_4(const M& m) {
  if (m.attention_scale == 0) return "";
  return "4.x does not multiply scores by the factor of mscale_all_dim";
}

}  // namespace

Family deepseek_v2_family() {
  constexpr int64_t kDenseFfn = 11008;
  static const std::vector<ConfigKey> kKeys = deepseek_keys(
      {.vocab = 102400,
       .width = 4096,
       .ffn = kDenseFfn,
       .layers = 32,
       .heads = 32,
       .kv_heads = 0,
       .context = 2048,
       .scale_in_5_alone = true},
      {stated_vocabulary(), expert_width("moe_intermediate_size", 1407, kDenseFfn),
       experts({.count = "n_routed_experts", .alias = "num_local_experts", .absent = 64, .absent_top_k = 1}),
       stated_top_k(), shared_experts("n_shared_experts", 2), first_dense("first_k_dense_replace", 0), choice(),
       refuse_unless("scoring_func", "softmax"),
       // Not read by the classes; the published code would divide the weights by their sum.
       only("norm_topk_prob", false)});
  return deepseek({.model_type = "deepseek_v2",
                   .architecture = "DeepseekV2ForCausalLM",
                   .base = base,
                   .keys = kKeys,
                   .beyond_4 = beyond_4});
}

}  // namespace cairn::convert
