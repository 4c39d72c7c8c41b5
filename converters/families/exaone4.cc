// EXAONE 4: norms behind the branches alone, of each head of q and k, windows in three of four layers, of which alone
// the heads turn. Source: transformers models/exaone4.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.block = BlockKind::kOutNorm;
  m.qk_norm = QkNorm::kHead;
  return m;
}

constexpr auto kTensors = with_llama_rows(kOutNormRows);

}  // namespace

Family exaone4_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 102400,
       .ffn = 16384,
       .kv_heads = 32,
       .has_head_dim = HeadDim::kIfUnusual,
       .norm_eps = 1e-5,
       .rope = {.old_type_counts = false}},
      {windows_by_pattern({.pattern = "sliding_window_pattern", .may_be_null = true, .full_is_nope = true})});
  return llama_like({.model_type = "exaone4",
                     .architecture = "Exaone4ForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
