// DeepSeek-V3 and R1: latent attention, experts behind sigmoids with a bias. Source: transformers models/deepseek_v3.
#include "converters/deepseek.h"

namespace cairn::convert {

Family deepseek_v3_family() {
  static const std::vector<ConfigKey> kKeys = deepseek_v3_keys();
  return deepseek(
      {.model_type = "deepseek_v3", .architecture = "DeepseekV3ForCausalLM", .keys = kKeys, .block_fp8 = true});
}

}  // namespace cairn::convert
