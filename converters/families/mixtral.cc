// Mixtral. Source: transformers models/mixtral.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.moe.experts = 8;
  return m;
}

constexpr auto kTensors = with_llama_rows({
    {"layers.*.moe.router.*", "model.layers.*.block_sparse_moe.gate.*"},
    {"layers.*.moe.experts.*.gate.*", "model.layers.*.block_sparse_moe.experts.*.w1.*"},
    {"layers.*.moe.experts.*.up.*", "model.layers.*.block_sparse_moe.experts.*.w3.*"},
    {"layers.*.moe.experts.*.down.*", "model.layers.*.block_sparse_moe.experts.*.w2.*"},
});

/// In transformers 5's memory the experts of a layer are stacked, gate above up. Source: transformers 5.24
/// conversion_mapping.py, "mixtral".
constexpr TensorRow kAlso[] = {
    {"layers.*.moe.router.*", "model.layers.*.mlp.gate.*"},
    {"layers.*.moe.experts.#.{gate,up}.weight", "model.layers.*.mlp.experts.gate_up_proj"},
    {"layers.*.moe.experts.#.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

}  // namespace

Family mixtral_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.ffn = 14336,
                       .kv_heads = 8,
                       .context = 131072,
                       .norm_eps = 1e-5,
                       .rope = {.absent_base = 1e6, .old_type_counts = false}},
                      {sliding_window(0), experts("num_local_experts", 8, 2)}, {constant("router_jitter_noise", 0.0)});
  return llama_like({.model_type = "mixtral",
                     .architecture = "MixtralForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .also = kAlso});
}

}  // namespace cairn::convert
