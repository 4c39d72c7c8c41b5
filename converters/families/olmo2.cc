// OLMo 2: norms behind the branches alone, and of whole q and k. Source: transformers models/olmo2.
#include "converters/olmo_like.h"

namespace cairn::convert {
namespace {

constexpr auto kTensors = with_llama_rows(kOutNormRows);

}  // namespace

Family olmo2_family() {
  static const std::vector<ConfigKey> kKeys = olmo_keys({biases("attention_bias", kQkv | kOut, false)});
  return llama_like({.model_type = "olmo2",
                     .architecture = "Olmo2ForCausalLM",
                     .base = olmo2_base,
                     .keys = kKeys,
                     .tensors = kTensors,
                     .beyond_4 = olmo_beyond_4});
}

}  // namespace cairn::convert
