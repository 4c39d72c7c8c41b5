#pragma once
// What the Cohere families share; included by families/*.cc only.

#include "converters/llama_like.h"

namespace cairn::convert {

/// Attention and MLP side by side behind one LayerNorm without bias, neighbouring rotary channels as pairs.
inline ModelConfig cohere_base() {
  ModelConfig m;
  m.bias = false;
  m.norm_bias = false;
  m.block = BlockKind::kParallelShared;
  m.rope.pairs = RotaryPairs::kInterleaved;
  return m;
}

inline LlamaDefaults cohere_defaults(RopeKeys rope) {
  return {.vocab = 256000,
          .width = 8192,
          .ffn = 22528,
          .layers = 40,
          .heads = 64,
          .has_head_dim = HeadDim::kIfUnusual,
          .context = 8192,
          .norm_eps = 1e-5,
          .rope = rope,
          .tied = true,
          .norm_eps_key = "layer_norm_eps"};
}

}  // namespace cairn::convert
