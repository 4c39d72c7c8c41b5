#include "runtime/json/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/core/lfs_pointer.h"

namespace cairn {
namespace {

/// Walks the text once before a value is built.
class Walker : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Walker(int64_t max_depth) : max_depth_(max_depth) {}
  std::optional<std::string> duplicate, problem;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    duplicate = name;
    return false;
  }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    problem = error.what();
    position_ = position;
    return false;
  }
  std::size_t position() const { return position_; }

 private:
  bool enter() {
    keys_.emplace_back();
    if (static_cast<int64_t>(keys_.size()) <= max_depth_) return true;
    problem = fmt::format("it is nested deeper than {}", max_depth_);
    return false;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  int64_t max_depth_;
  std::size_t position_ = 0;
  std::vector<std::set<std::string>> keys_;
};

constexpr std::string_view kNoNumber = " (no JSON number)";
constexpr std::string_view kHalf = "\\ufffd", kOtherHalf = "\\u0020";  // in place of half a surrogate pair
// U+10FFFF, which no text has, before the four digits of half a pair: as an escape and as UTF-8.
constexpr std::string_view kHalfEscape = "\\udbff\\udfff", kHalfMark = "\xf4\x8f\xbf\xbf";

/// The number at the beginning of `text` that Python writes and JSON lacks; empty: none.
std::string_view python_number(std::string_view text) {
  for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
    if (text.starts_with(word)) return word;
  }
  const std::string_view number = text.substr(0, text.find_first_not_of("+-.0123456789eE"));
  constexpr size_t kMostDigits = 308;  // a number without exponent is below the largest double up to here
  if (number.size() <= kMostDigits && number.find_first_of("eE") == number.npos) return {};
  return std::isinf(std::strtod(std::string(number).c_str(), nullptr)) ? number : std::string_view();
}

/// 0: no escape of half a character is at `at`; else whether it is the first half (1) or the second (2) of a pair.
int surrogate_at(std::string_view text, size_t at) {
  if (text.substr(at, 2) != "\\u" || at + 6 > text.size() || (text[at + 2] | 0x20) != 'd') return 0;
  const char* const digits = "0123456789abcdef";
  const char* const third = std::strchr(digits, text[at + 3] | 0x20);
  if (third == nullptr || text[at + 3] == '\0' || third - digits < 8) return 0;
  return third - digits < 12 ? 1 : 2;
}

/// Text that Python's json module reads, as JSON; nothing: it would be the same. Without `half` its numbers become
/// strings, and kHalfEscape is put before the digits of half a surrogate pair. With it (six characters, in place of
/// half a surrogate pair) they become null.
std::optional<std::string> standard_json(std::string_view text, std::string_view half) {
  std::string out;
  size_t done = 0;
  const auto put = [&](size_t at, size_t count, const std::string& instead) {
    out += text.substr(done, at - done);
    out += instead;
    done = at + count;
  };
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '"') {
      for (++i; i < text.size() && text[i] != '"'; ++i) {
        if (text[i] != '\\') continue;
        const int part = surrogate_at(text, i);
        if (part == 1 && surrogate_at(text, i + 6) == 2) {
          i += 11;
        } else if (part != 0) {
          put(i, 6, half.empty() ? fmt::format("{}{}", kHalfEscape, text.substr(i + 2, 4)) : std::string(half));
          i += 5;
        } else {
          ++i;
        }
      }
      ++i;
      continue;
    }
    const bool begins = text[i] == 'N' || text[i] == 'I' || text[i] == '-' || (text[i] >= '0' && text[i] <= '9');
    if (!begins) {
      ++i;
      continue;
    }
    const std::string_view number = python_number(text.substr(i));
    if (!number.empty()) put(i, number.size(), half.empty() ? fmt::format("\"{}{}\"", number, kNoNumber) : "null");
    i = number.empty() ? std::min(text.find_first_not_of("+-.0123456789eE", i + 1), text.size()) : done;
  }
  if (done == 0) return std::nullopt;
  return out.append(text.substr(done));
}

/// Walks a line and keeps one text of the outermost object.
class FieldReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FieldReader(std::string_view key) : key_(key) {}
  std::optional<std::string> text;
  std::string others;  // names of fields with text
  bool object = false, found = false;
  std::string problem;
  size_t problem_at = 0;

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t& value_text) override {
    if (depth_ != 1 || !object) return true;
    if (wanted_) text = std::move(value_text);
    constexpr size_t kMostNames = 200;
    if (!wanted_ && others.size() < kMostNames) others += fmt::format("{}\"{}\"", others.empty() ? "" : ", ", name_);
    return true;
  }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    if (depth_ == 0) object = true;
    value();
    ++depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ != 1) return true;
    wanted_ = name == key_;
    found = found || wanted_;
    name_ = name;
    return true;
  }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override {
    value();
    ++depth_;
    return true;
  }
  bool end_array() override { return leave(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    problem = error.what();
    problem_at = position > 0 ? position - 1 : 0;
    return false;
  }

 private:
  bool value() {  // one that is no text
    if (depth_ == 1 && object && wanted_) text.reset();
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  std::string_view key_;
  std::string name_;
  bool wanted_ = false;
  int64_t depth_ = 0;
};

/// Names text that is another kind of file; empty: none is known.
std::string other_kind(std::string_view text) {
  using namespace std::string_view_literals;
  if (is_lfs_pointer(text)) return std::string(kLfsPointer);
  const std::string_view shown = text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  if (shown.empty()) return "is empty";
  for (const auto& [mark, name] :
       {std::pair("\xff\xfe\0\0"sv, "UTF-32"), std::pair("\0\0\xfe\xff"sv, "UTF-32"), std::pair("\xff\xfe"sv, "UTF-16"),
        std::pair("\xfe\xff"sv, "UTF-16"), std::pair("{\0"sv, "UTF-16LE"), std::pair("\0{"sv, "UTF-16BE")}) {
    if (text.starts_with(mark)) return fmt::format("is {}: convert it (iconv -f {} -t UTF-8)", name, name);
  }
  if (shown.starts_with('<')) return "is a page of HTML or XML, as a download that failed leaves";
  if (text.starts_with("\x1f\x8b")) return "is packed by gzip: unpack it first (gunzip -c)";
  if (text.starts_with("PK\x03\x04")) return "is a zip archive: unpack it first (unzip -p)";
  if (text.front() == '\0') return "begins with NULs, as a crash leaves";
  return {};
}

Error not_json(std::string_view text, size_t at, std::string_view what) {
  // The library quotes the text it read.
  return {ErrorCode::kCorrupt, fmt::format("byte {}: not JSON: found \"{}\" ({})", at,
                                           printable_ascii(text.substr(at, 24)), printable_ascii(what))};
}

template <typename Json>
Result<Json> parse(std::string_view text, int64_t max_depth, JsonNumbers numbers = JsonNumbers::kStandard) {
  RT_TRY(check_json_depth(text, max_depth));
  if (numbers == JsonNumbers::kPython) {
    if (const std::optional<std::string> standard = standard_json(text, {})) {
      return parse<Json>(*standard, max_depth);
    }
  }
  try {
    return Json::parse(text);
  } catch (const typename Json::parse_error& e) {
    if (const std::string kind = other_kind(text); !kind.empty())
      return Error{ErrorCode::kCorrupt, fmt::format("byte 0: not JSON: it {}", kind)};
    return not_json(text, std::min(e.byte > 0 ? e.byte - 1 : 0, text.size()), e.what());
  } catch (const typename Json::exception& e) {  // a number out of range
    return Error{ErrorCode::kCorrupt, fmt::format("not JSON: {}", printable_ascii(e.what()))};
  }
}

}  // namespace

Status check_json_depth(std::string_view text, int64_t max_depth) {
  int64_t depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > max_depth)
        return Error{ErrorCode::kCorrupt, fmt::format("byte {}: JSON nested deeper than {}", i, max_depth)};
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return {};
}

std::string printable_ascii(std::string_view text) {
  std::string out;
  for (const char c : text)
    out += (c >= ' ' && c <= '~') ? std::string(1, c) : fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

Result<nlohmann::json> parse_json(std::string_view text, int64_t max_depth, JsonNumbers numbers) {
  return parse<nlohmann::json>(text, max_depth, numbers);
}

Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, int64_t max_depth, JsonNumbers numbers) {
  return parse<nlohmann::ordered_json>(text, max_depth, numbers);
}

namespace {

template <typename Json>
std::string text_of(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string json_text(const nlohmann::json& value, int indent) { return text_of(value, indent); }
std::string json_text(const nlohmann::ordered_json& value, int indent) { return text_of(value, indent); }

const nlohmann::json& json_field(const nlohmann::json& from, std::string_view key) {
  static const nlohmann::json kNone;
  if (!from.is_object()) return kNone;
  const auto at = from.find(key);
  return at == from.end() ? kNone : *at;
}

std::string json_string(const nlohmann::json& from, std::string_view key, std::string_view otherwise) {
  const nlohmann::json& field = json_field(from, key);
  return field.is_string() ? field.get<std::string>() : std::string(otherwise);
}

double json_number(const nlohmann::json& from, std::string_view key, double otherwise) {
  const nlohmann::json& field = json_field(from, key);
  return field.is_number() ? field.get<double>() : otherwise;
}

int64_t json_count(const nlohmann::json& from, std::string_view key, int64_t otherwise) {
  return json_integer(json_field(from, key), 0, INT64_MAX).value_or(otherwise);
}

bool json_flag(const nlohmann::json& from, std::string_view key) {
  const nlohmann::json& field = json_field(from, key);
  return field.is_boolean() && field.get<bool>();
}

std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t least, int64_t most) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  if (!value.is_number_integer()) return std::nullopt;
  const auto integer = value.get<int64_t>();
  return integer >= least && integer <= most ? std::optional(integer) : std::nullopt;
}

nlohmann::json json_or_nothing(std::string_view text, JsonNumbers numbers) {
  const nlohmann::json nothing(nlohmann::json::value_t::discarded);
  if (numbers == JsonNumbers::kPython) {
    if (const std::optional<std::string> standard = standard_json(text, {})) return json_or_nothing(*standard);
  }
  return check_json_depth(text).ok() ? nlohmann::json::parse(text, nullptr, false) : nothing;
}

Result<nlohmann::json> parse_json_strictly(std::string_view text, std::string_view what, int64_t max_depth,
                                           int64_t first_byte, JsonNumbers numbers) {
  if (numbers == JsonNumbers::kPython) {
    if (const std::optional<std::string> standard = standard_json(text, {})) {
      return parse_json_strictly(*standard, what, max_depth, first_byte);
    }
  }
  Walker walker(max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &walker);
  if (walker.duplicate) {
    constexpr size_t kShown = 60;
    return Error{ErrorCode::kCorrupt,
                 fmt::format("{} names \"{}\" twice", what,
                             printable_ascii(std::string_view(*walker.duplicate).substr(0, kShown)))};
  }
  if (walker.problem) {
    const std::string kind = other_kind(text);
    if (!kind.empty()) return Error{ErrorCode::kCorrupt, fmt::format("{} is not JSON: it {}", what, kind)};
    return Error{ErrorCode::kCorrupt,
                 fmt::format("byte {}: {} is not JSON: {}", first_byte + static_cast<int64_t>(walker.position()), what,
                             printable_ascii(*walker.problem))};
  }
  nlohmann::json out = nlohmann::json::parse(text, nullptr, false);
  if (out.is_discarded()) return Error{ErrorCode::kCorrupt, fmt::format("{} is not JSON", what)};
  return out;
}

std::string python_json_text(const nlohmann::ordered_json& json, int indent) {
  std::string out = json_text(json, indent);
  const std::string end = fmt::format("{}\"", kNoNumber);
  for (size_t at = out.find(end); at != out.npos; at = out.find(end, at)) {
    const size_t quote = out.rfind('"', at - 1);
    out.erase(at, end.size());
    out.erase(quote, 1);
  }
  for (size_t at = out.find(kHalfMark); at != out.npos; at = out.find(kHalfMark, at)) {
    out.replace(at, kHalfMark.size(), "\\u");
  }
  return out;
}

bool has_half_pair(std::string_view text) { return text.find(kHalfMark) != text.npos; }

Result<nlohmann::json> parse_python_object(std::string_view text) {
  constexpr std::string_view kRemedy = "put the file back as it was published";
  Result<nlohmann::json> out = parse_json(text, kMaxJsonDepth, JsonNumbers::kPython);
  if (!out.ok()) return Error{ErrorCode::kInvalidInput, fmt::format("{}; {}", out.error().message, kRemedy)};
  if (out.value().is_object()) return out;
  constexpr size_t kShown = 24;
  return Error{ErrorCode::kInvalidInput, fmt::format("byte 0: expected a JSON object, found \"{}\"; {}",
                                                     printable_ascii(text.substr(0, kShown)), kRemedy)};
}

Result<std::string> json_text_field(std::string_view line, std::string_view key) {
  const auto read = [key](std::string_view text) {
    FieldReader reader(key);
    nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
    return reader;
  };
  FieldReader reader = read(line);
  if (!reader.problem.empty()) {
    if (const std::optional<std::string> standard = standard_json(line, kHalf)) {
      FieldReader again = read(*standard);
      // The field is not the same for another filler: half a character stands in it.
      if (again.problem.empty() && again.text && again.text != read(*standard_json(line, kOtherHalf)).text) {
        return Error{ErrorCode::kInvalidInput,
                     fmt::format("\"{}\" has half of a surrogate pair (\\ud800 to \\udfff), which is no character; "
                                 "write it as UTF-8 or leave it out",
                                 key)};
      }
      if (again.problem.empty()) reader = std::move(again);
    }
  }
  if (!reader.problem.empty()) return not_json(line, std::min(reader.problem_at, line.size()), reader.problem);
  if (!reader.object) return Error{ErrorCode::kInvalidInput, "expected a JSON object a line"};
  if (reader.text) return *std::move(reader.text);
  return Error{ErrorCode::kInvalidInput,
               fmt::format("\"{}\" is {}; fields with text: {}", key, reader.found ? "no text" : "missing",
                           reader.others.empty() ? "none" : reader.others)};
}

}  // namespace cairn
