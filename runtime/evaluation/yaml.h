#pragma once
// YAML text as a JSON value, read by libyaml: the part of it that files of settings use.

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::evaluation {

/// One document. Plain scalars become what YAML 1.1 makes of them, as PyYAML: null, flags (yes and on too), whole
/// numbers, decimals; all else is text. Anchors and aliases are followed. Errors: kInvalidInput with the line for text
/// that is no YAML, a second document, a key named twice or one that is no text, more than 32 levels or 100,000 values;
/// kUnsupported with the line for a tag (!function and its kin name code, which is not run) and for merge keys (<<).
Result<nlohmann::ordered_json> parse_yaml(std::string_view text);

}  // namespace cairn::evaluation
