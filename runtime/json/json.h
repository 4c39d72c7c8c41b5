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

/// Python's json module writes and reads NaN, Infinity, -Infinity and numbers beyond a double. kPython: such a number
/// becomes the string "SPELLING (no JSON number)", which no reader of a number takes. Half of a surrogate pair, which
/// it writes and reads too, becomes a mark that has_half_pair() finds.
enum class JsonNumbers { kStandard, kPython };

/// Errors: kCorrupt, "byte N: not JSON: found ...", also for text nested deeper than max_depth; another kind of file
/// (UTF-16, HTML, a packed or an empty one) is named. Never throws.
Result<nlohmann::json> parse_json(std::string_view text, int64_t max_depth = kMaxJsonDepth,
                                  JsonNumbers numbers = JsonNumbers::kStandard);
Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, int64_t max_depth = kMaxJsonDepth,
                                                  JsonNumbers numbers = JsonNumbers::kStandard);

/// The same where text that is no JSON is as good as none: a discarded value, which is of no type.
nlohmann::json json_or_nothing(std::string_view text, JsonNumbers numbers = JsonNumbers::kStandard);

/// The same for what others wrote: a key named twice, of which the last would win, is an error too. Errors: kCorrupt,
/// starting with `what` ("the header", "config.json"), with the byte counted from `first_byte`.
Result<nlohmann::json> parse_json_strictly(std::string_view text, std::string_view what, int64_t max_depth,
                                           int64_t first_byte = 0, JsonNumbers numbers = JsonNumbers::kStandard);

/// The object of a settings file that others wrote, by kPython. Errors: kInvalidInput, with the byte and the remedy.
Result<nlohmann::json> parse_python_object(std::string_view text);

/// Whether a string of JsonNumbers::kPython has half of a surrogate pair, which is no character.
bool has_half_pair(std::string_view text);

/// `json` as Python's json module reads it: the strings of JsonNumbers::kPython are numbers and halves of pairs again.
std::string python_json_text(const nlohmann::ordered_json& json, int indent);

/// The text of one field of a line of JSON lines, as Python's json module reads the line. Other fields are not built:
/// they may be of any depth, with any number of kPython and with halves of surrogate pairs. The last field of the name
/// counts. Errors: kCorrupt where the line is not JSON; kInvalidInput where it is no object, or the field is missing or
/// no text.
Result<std::string> json_text_field(std::string_view line, std::string_view key);

/// The text of `value`, on one line, or with `indent` spaces a level. Bytes that are no UTF-8 become U+FFFD, so that
/// an error text or a path of any bytes has a text. The only way from a value to text: the library's own throws there.
std::string json_text(const nlohmann::json& value, int indent = -1);
std::string json_text(const nlohmann::ordered_json& value, int indent = -1);

/// Field `key` of what another process, a server or a file holds: null where `from` is no object, or has no such
/// field. The only such reader: the library's value() throws where a type is another one.
const nlohmann::json& json_field(const nlohmann::json& from, std::string_view key);
/// The field as a string, a number or a flag; `otherwise` where it is missing or of another type.
std::string json_string(const nlohmann::json& from, std::string_view key, std::string_view otherwise = {});
double json_number(const nlohmann::json& from, std::string_view key, double otherwise = 0);
int64_t json_count(const nlohmann::json& from, std::string_view key, int64_t otherwise = 0);  // 0 to INT64_MAX
bool json_flag(const nlohmann::json& from, std::string_view key);

/// An integer within [least, most]; nothing where the value is no integer, or another one.
std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t least, int64_t most);

/// That no more than max_depth brackets are open at once. Errors: kCorrupt, with the byte.
Status check_json_depth(std::string_view text, int64_t max_depth = kMaxJsonDepth);

/// Bytes as text that a terminal takes: "\x1b" for what is not printable ASCII.
std::string printable_ascii(std::string_view text);

}  // namespace cairn
