#include "converters/olmo_like.h"

#include <fmt/format.h>

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

std::string olmo_beyond_4(const ModelConfig& m) {
  if (m.rope.scaling == RopeScaling::kNone || m.rope.factor > 1) return "";
  return fmt::format("4.x takes a rope_scaling.factor above 1 in this family, not {}", m.rope.factor);
}

ModelConfig olmo2_base() {
  M m = llama_like_base();
  m.block = BlockKind::kOutNorm;
  m.qk_norm = QkNorm::kWhole;
  return m;
}

std::vector<ConfigKey> olmo_keys(const std::vector<ConfigKey>& own) {
  std::vector<ConfigKey> keys = {narrow_scaling()};
  keys.insert(keys.end(), own.begin(), own.end());
  return llama_like_keys({.vocab = 50304,
                          .has_head_dim = HeadDim::kIfUnusual,
                          .norm_eps = 1e-5,
                          .rope = {.old_type_counts = false, .own_spelling = true}},
                         keys);
}

}  // namespace cairn::convert
