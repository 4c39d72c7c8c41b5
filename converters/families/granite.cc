// Granite: Llama with factors of the embedding, the branches, the scores and the logits. Source: transformers
// models/granite.
#include <cmath>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

/// An absent one is 1, not one divided by the root of head_dim.
ConfigKey attention_multiplier() {
  ConfigKey out = factor("attention_multiplier", &M::attention_scale, 1.0);
  out.write = [](const M& m, nlohmann::ordered_json& out) {
    const double usual = 1.0 / std::sqrt(static_cast<double>(m.head_dim));
    out["attention_multiplier"] = m.attention_scale > 0 ? m.attention_scale : usual;
  };
  return out;
}

}  // namespace

Family granite_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.has_head_dim = HeadDim::kIfUnusual, .rope = {.old_type_counts = false}},
      {biases("attention_bias", kQkv | kOut, false), biases("mlp_bias", kMlp, false),
       factor("embedding_multiplier", &M::embedding_scale, 1.0), factor("residual_multiplier", &M::branch_scale, 1.0),
       attention_multiplier(), reciprocal("logits_scaling", &M::logit_scale, 1.0)});
  Family out = llama_like({.model_type = "granite", .architecture = "GraniteForCausalLM", .keys = kKeys});
  out.last_choice = true;
  return out;
}

}  // namespace cairn::convert
