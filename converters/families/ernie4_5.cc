// ERNIE 4.5, dense: Llama with neighbouring rotary channels as pairs. Source: transformers models/ernie4_5.
#include "converters/llama_like.h"

namespace cairn::convert {
namespace {

ModelConfig base() {
  ModelConfig m = llama_like_base();
  m.rope.pairs = RotaryPairs::kInterleaved;
  return m;
}

}  // namespace

Family ernie4_5_family() {
  static const std::vector<ConfigKey> kKeys =
      llama_like_keys({.vocab = 103424,
                       .width = 1024,
                       .ffn = 3072,
                       .layers = 18,
                       .heads = 16,
                       .kv_heads = 2,
                       .head_dim = 128,
                       .context = 131072,
                       .norm_eps = 1e-5,
                       .rope = {.absent_base = 500000.0},
                       .has_dropout = false,
                       .tied = true},
                      {biases("use_bias", kQkv | kOut | kMlp, false), refuse_unless("compression_ratio", 1),
                       unread({"weight_share_add_bias"})});
  Family out =
      llama_like({.model_type = "ernie4_5", .architecture = "Ernie4_5ForCausalLM", .base = base, .keys = kKeys});
  out.last_choice = true;
  return out;
}

}  // namespace cairn::convert
