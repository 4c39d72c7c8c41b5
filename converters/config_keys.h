#pragma once
// Keys of config.json that no table of a family reads: those that change no logits, by one reviewed list; those of
// models that look like a family and compute something else; and the others, which are named.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "converters/family.h"
#include "runtime/core/result.h"

namespace cairn::convert {

struct UnreadKeys {
  std::vector<std::string> refused;   // "granite's embedding_multiplier = 12", "foo = true": another model, or a switch
  std::vector<std::string> not_read;  // names, sorted: might matter, and nobody knows
};
UnreadKeys unread_keys(const Family& family, const ModelConfig& model, const nlohmann::json& config);

/// Errors: kUnsupported naming all that unread_keys() refuses.
Status refuse_unread_keys(const Family& family, const ModelConfig& model, const nlohmann::json& config);

}  // namespace cairn::convert
