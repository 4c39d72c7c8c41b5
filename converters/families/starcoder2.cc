// StarCoder2: LayerNorm and an MLP without a gate, biases by one switch. Source: transformers models/starcoder2.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

constexpr auto kTensors = with_llama_rows({
    {"layers.*.mlp.up.*", "model.layers.*.mlp.c_fc.*"},
    {"layers.*.mlp.down.*", "model.layers.*.mlp.c_proj.*"},
});

}  // namespace

Family starcoder2_family() {
  static const std::vector<ConfigKey> kKeys = llama_like_keys(
      {.vocab = 49152,
       .width = 3072,
       .ffn = 12288,
       .layers = 30,
       .heads = 24,
       .kv_heads = 2,
       .has_head_dim = HeadDim::kIfUnusual,
       .activation = "gelu_pytorch_tanh",
       .gated = false,
       .context = 4096,
       .norm_eps = 1e-5,
       .tied = true,
       .init_std = 0.018042,
       .norm_eps_key = "norm_epsilon"},
      {biases("use_bias", kQkv | kOut | kMlp, true), sliding_window(0),
       dropout("residual_dropout", &M::residual_dropout), dropout("embedding_dropout", &M::embedding_dropout),
       // Of published files; the class looks at none of them.
       refuse_unless("mlp_type", "default"), refuse_unless("norm_type", "layer_norm"),
       refuse_unless("scale_attn_weights", true),
       unread({"rms_norm_eps", "layer_norm_epsilon", "activation_function"})});
  return llama_like({.model_type = "starcoder2",
                     .architecture = "Starcoder2ForCausalLM",
                     .base = [] { return M{}; },
                     .keys = kKeys,
                     .tensors = kTensors});
}

}  // namespace cairn::convert
