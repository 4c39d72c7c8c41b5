// MiniCPM 1 and 2, as published with code of their own: Llama with factors of the embedding, the branches and the
// logits. Import only, a model goes out as `granite`, which has them too.
#include <fmt/format.h>

#include <cmath>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

/// scale_depth by the root of the layers; dim_model_base by the width. The published code has 1 for an absent one.
ConfigKey depth_and_width() {
  return {
      {"scale_depth", "dim_model_base"},
      [](ConfigReader& in, M& m) {
        const double depth = in.number("scale_depth", 1), width = in.number("dim_model_base", 1);
        if (!(depth > 0) || !(width > 0)) {
          return in.unsupported(fmt::format("scale_depth = {} and dim_model_base = {} must be above 0", depth, width));
        }
        m.branch_scale = depth / std::sqrt(static_cast<double>(m.layers));
        m.logit_scale = 1.0 / (static_cast<double>(m.width) / width);  // the reciprocal of what granite can say
      },
      nullptr};
}

}  // namespace

Family minicpm_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.has_head_dim = HeadDim::kDivided, .tied = true},
      {biases("attention_bias", kQkv | kOut, false), factor("scale_emb", &M::embedding_scale, 1.0), depth_and_width()});
  return llama_like({.model_type = "minicpm", .keys = kKeys});
}

}  // namespace cairn::convert
