#include "converters/olmo_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

ConfigKey narrow_scaling() {
  return {{},
          [](ConfigReader& in, M& m) {
            if (m.rope.scaling == RopeScaling::kNone || m.rope.scaling == RopeScaling::kLinear ||
                m.rope.scaling == RopeScaling::kDynamic)
              return;
            in.unsupported("rope_scaling: transformers 4 takes none but linear and dynamic in this family");
          },
          [](const M&, nlohmann::ordered_json& out) {
            nlohmann::ordered_json& scaling = out["rope_scaling"];
            if (scaling.is_object()) scaling = {{"type", scaling["rope_type"]}, {"factor", scaling["factor"]}};
          }};
}

}  // namespace

ModelConfig olmo2_base() {
  M m = llama_like_base();
  m.block = BlockKind::kOutNorm;
  m.qk_norm = QkNorm::kWhole;
  return m;
}

std::vector<ConfigKey> olmo_keys(const std::vector<ConfigKey>& own) {
  std::vector<ConfigKey> keys = {narrow_scaling()};
  keys.insert(keys.end(), own.begin(), own.end());
  return llama_like_keys({.vocab = 50304, .has_head_dim = HeadDim::kIfUnusual, .norm_eps = 1e-5}, keys);
}

}  // namespace cairn::convert
