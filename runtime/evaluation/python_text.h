#pragma once
// Texts as Python's str has them: what lm-evaluation-harness and its templates count, strip and print.

#include <cstdint>
#include <string>
#include <string_view>

namespace cairn::evaluation {

/// str.strip(), lstrip(), rstrip() without an argument: Unicode's whitespace. Bytes that are no UTF-8 stay.
std::string_view stripped_left(std::string_view text);
std::string_view stripped_right(std::string_view text);
inline std::string_view stripped(std::string_view text) { return stripped_left(stripped_right(text)); }

/// len(): code points.
int64_t count_characters(std::string_view text);

/// str.lower() and upper(), of ICU's root locale.
std::string lower(std::string_view text);
std::string upper(std::string_view text);

/// repr() of a string, as a list that is printed has it.
std::string python_quoted(std::string_view text);

}  // namespace cairn::evaluation
