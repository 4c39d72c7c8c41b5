// InternLM2 and 2.5, as published with code of their own: Llama with q, k and v fused by key/value head. Import only, a
// model goes out as `llama`. Source: vLLM model_executor/models/internlm2.py.
#include "converters/family_table.h"
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m = llama_like_base();
  m.mlp_bias = false;
  return m;
}

constexpr TensorRow kTensors[] = {
    {"embed.tokens", "model.tok_embeddings.weight"},
    {"layers.*.attn_norm.*", "model.layers.*.attention_norm.*"},
    {"layers.*.attn.{q,k,v}.*", "model.layers.*.attention.wqkv.*", Fuse::kPerKvHead},
    {"layers.*.attn.o.*", "model.layers.*.attention.wo.*"},
    {"layers.*.mlp_norm.*", "model.layers.*.ffn_norm.*"},
    {"layers.*.mlp.gate.*", "model.layers.*.feed_forward.w1.*"},
    {"layers.*.mlp.up.*", "model.layers.*.feed_forward.w3.*"},
    {"layers.*.mlp.down.*", "model.layers.*.feed_forward.w2.*"},
    {"final_norm.*", "model.norm.*"},
    {"head.weight", "output.weight"},
};

}  // namespace

Family internlm2_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 103168, .has_head_dim = HeadDim::kDivided}, {biases("bias", kQkv | kOut, true)});
  return llama_like({.model_type = "internlm2", .base = base, .keys = kKeys, .tensors = kTensors});
}

}  // namespace cairn::convert
