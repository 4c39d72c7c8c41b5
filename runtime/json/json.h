#pragma once
// JSON text as a value. Whatever comes from a file, a pipe or another program is read here and nowhere else: the
// library would build values of any depth, and code that walks, copies or prints them then runs out of stack.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/result.h"

namespace cairn {

inline constexpr int64_t kMaxJsonDepth = 64;  // of objects and arrays in each other

/// Errors: kCorrupt, "byte N: not JSON: found ...", also for text nested deeper than max_depth. Never throws.
Result<nlohmann::json> parse_json(std::string_view text, int64_t max_depth = kMaxJsonDepth);
Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, int64_t max_depth = kMaxJsonDepth);

/// The same where text that is no JSON is as good as none: a discarded value, which is of no type.
nlohmann::json json_or_nothing(std::string_view text);

/// The same for what others wrote: a key named twice, of which the last would win, is an error too. Errors: kCorrupt,
/// starting with `what` ("the header", "config.json"), with the byte counted from `first_byte`.
Result<nlohmann::json> parse_json_strictly(std::string_view text, std::string_view what, int64_t max_depth,
                                           int64_t first_byte = 0);

/// An integer within [least, most]; nothing where the value is no integer, or another one.
std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t least, int64_t most);

/// That no more than max_depth brackets are open at once. Errors: kCorrupt, with the byte.
Status check_json_depth(std::string_view text, int64_t max_depth = kMaxJsonDepth);

/// Bytes as text that a terminal takes: "\x1b" for what is not printable ASCII.
std::string printable_ascii(std::string_view text);

}  // namespace cairn
