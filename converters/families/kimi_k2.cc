// Kimi K2: DeepSeek-V3 with other numbers. transformers has no class of its own for it, so it goes out as deepseek_v3.
// Source: the published config.json, which names DeepSeek-V3's class.
#include "converters/deepseek.h"

namespace cairn::convert {

Family kimi_k2_family() {
  static const std::vector<ConfigKey> kKeys = deepseek_v3_keys();
  return deepseek({.model_type = "kimi_k2", .keys = kKeys, .block_fp8 = true});
}

}  // namespace cairn::convert
