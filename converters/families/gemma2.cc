// Gemma 2: norms on both sides of each branch, caps of scores and logits, windows in every other layer. Source:
// transformers models/gemma2.
#include "converters/gemma_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m = gemma_like_base();
  m.block = BlockKind::kSandwich;
  return m;
}

}  // namespace

Family gemma2_family() {
  static const std::vector<ConfigKey> kKeys = gemma_like_keys(
      {.vocab = 256000, .width = 2304, .ffn = 9216, .layers = 26, .heads = 8, .kv_heads = 4, .context = 8192},
      gemma_gate("hidden_activation"), rope({.old_type_counts = false}),
      {query_scalar(256), windows_by_pattern({.every = 2}), bound("attn_logit_softcapping", &M::score_cap, 50),
       bound("final_logit_softcapping", &M::logit_cap, 30)});
  return llama_like({.model_type = "gemma2",
                     .architecture = "Gemma2ForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kSandwichRows});
}

}  // namespace cairn::convert
