// Gemma 3, its text model: Gemma 2 with norms of q and k, and a rotary base for the layers with a window. Source:
// transformers models/gemma3.
#include "converters/gemma_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m = gemma_like_base();
  m.block = BlockKind::kSandwich;
  m.qk_norm = QkNorm::kHead;
  return m;
}

constexpr auto kTensors = with_rows(kSandwichRows, kQkNormRows);

}  // namespace

Family gemma3_text_family() {
  static const std::vector<ConfigKey> kKeys = gemma_like_keys(
      {.vocab = 262208, .width = 2304, .ffn = 9216, .layers = 26, .heads = 8, .kv_heads = 4, .context = 131072},
      gemma_gate("hidden_activation"),
      rope({.absent_base = 1e6, .old_type_counts = false}, {.window_base = "rope_local_base_freq", .absent = 10000}),
      {query_scalar(256), windows_by_pattern({.every = 6, .pattern = "sliding_window_pattern"}),
       // The class has the key, and computes no cap.
       only("attn_logit_softcapping", nullptr), bound("final_logit_softcapping", &M::logit_cap, 0)});
  return llama_like({.model_type = "gemma3_text",
                     .architecture = "Gemma3ForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
