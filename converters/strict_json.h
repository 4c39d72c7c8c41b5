#pragma once
// JSON that came from outside, parsed strictly: what the JSON library would forgive (a key named twice, of which the
// last would win) is an error here, and depth is bounded before anything is built.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn::convert {

/// Errors: kCorrupt, starting with `what` ("the header", "config.json"), with the byte counted from `first_byte`.
/// Depth counts nested objects and arrays. Never throws.
Result<nlohmann::json> parse_json_strictly(std::string_view text, std::string_view what, int64_t max_depth,
                                           int64_t first_byte = 0);

}  // namespace cairn::convert
