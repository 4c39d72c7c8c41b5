// Phi-3, 3.5, 4 and 4-mini: Llama with q, k and v in one projection, gate and up in another, and longrope. Source:
// transformers models/phi3.
#include <fmt/format.h>

#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

constexpr auto kTensors = with_llama_rows({
    {"layers.*.attn.{q,k,v}.*", "model.layers.*.self_attn.qkv_proj.*"},
    {"layers.*.mlp.{gate,up}.*", "model.layers.*.mlp.gate_up_proj.*"},
});

std::string beyond_4(const ModelConfig& m) {
  if (m.rope.scaling != RopeScaling::kLongRope || m.head_dim == m.width / m.heads) return "";
  return fmt::format("4.x counts longrope's factors for heads of {} channels, the width by the heads, not of {}",
                     m.width / m.heads, m.head_dim);
}

}  // namespace

Family phi3_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 32064,
       .width = 3072,
       .ffn = 8192,
       .has_head_dim = HeadDim::kIfUnusual,
       .context = 4096,
       .norm_eps = 1e-5,
       .rope = {.partial = "partial_rotary_factor",
                .longrope_context = 4096,
                .old_type_counts = false,
                .own_spelling = true}},
      {sliding_window(0), dropout("resid_pdrop", &M::residual_dropout), dropout("embd_pdrop", &M::embedding_dropout),
       // Of published files; the class looks at none of them.
       refuse_unless("full_attn_mod", 1), refuse_unless("interpolate_factor", 1)});
  return llama_like({.model_type = "phi3",
                     .architecture = "Phi3ForCausalLM",
                     .keys = kKeys,
                     .tensors = kTensors,
                     .beyond_4 = beyond_4});
}

}  // namespace cairn::convert
