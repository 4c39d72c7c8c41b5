#pragma once
// What the OLMo families share; included by families/*.cc only.

#include <string>

#include "converters/llama_like.h"

namespace cairn::convert {

/// Norms behind the branches alone, and of whole q and k.
ModelConfig olmo2_base();
/// Family::beyond_4 of OLMo and OLMo 2.
std::string olmo_beyond_4(const ModelConfig& model);

/// The keys of config.json of OLMo and OLMo 2, with `own` after the rotary ones. transformers 4 takes no scaling but
/// linear and dynamic there, and only as {type, factor}.
std::vector<ConfigKey> olmo_keys(const std::vector<ConfigKey>& own);

}  // namespace cairn::convert
