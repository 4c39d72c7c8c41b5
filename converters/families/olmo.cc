// OLMo: Llama with norms that have no weights, and clipped q, k and v. Source: transformers models/olmo.
#include "converters/llama_like.h"
#include "converters/olmo_like.h"

namespace cairn::convert {
namespace {

using M = ModelConfig;

M base() {
  M m;
  m.bias = false;
  m.norm_weight = false;
  m.norm_eps = 1e-5;  // no key says it
  return m;
}

}  // namespace

Family olmo_family() {
  static const std::vector<ConfigKey> kKeys = [] {
    std::vector<ConfigKey> out =
        olmo_keys({biases("attention_bias", kQkv | kOut, false), bound("clip_qkv", &M::clip_qkv, 0)});
    std::erase_if(out, [](const ConfigKey& key) { return key.names == std::vector<std::string_view>{"rms_norm_eps"}; });
    return out;
  }();
  return llama_like({.model_type = "olmo",
                     .architecture = "OlmoForCausalLM",
                     .base = base,
                     .keys = kKeys,
                     .beyond_4 = olmo_beyond_4});
}

}  // namespace cairn::convert
