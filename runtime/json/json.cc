#include "runtime/json/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

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

template <typename Json>
Result<Json> parse(std::string_view text, int64_t max_depth) {
  RT_TRY(check_json_depth(text, max_depth));
  try {
    return Json::parse(text);
  } catch (const typename Json::parse_error& e) {
    const size_t at = std::min(e.byte > 0 ? e.byte - 1 : 0, text.size());
    // What the library says quotes what it has read.
    return Error{ErrorCode::kCorrupt, fmt::format("byte {}: not JSON: found \"{}\" ({})", at,
                                                  printable_ascii(text.substr(at, 24)), printable_ascii(e.what()))};
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

Result<nlohmann::json> parse_json(std::string_view text, int64_t max_depth) {
  return parse<nlohmann::json>(text, max_depth);
}

Result<nlohmann::ordered_json> parse_ordered_json(std::string_view text, int64_t max_depth) {
  return parse<nlohmann::ordered_json>(text, max_depth);
}

std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t least, int64_t most) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  if (!value.is_number_integer()) return std::nullopt;
  const auto integer = value.get<int64_t>();
  return integer >= least && integer <= most ? std::optional(integer) : std::nullopt;
}

nlohmann::json json_or_nothing(std::string_view text) {
  const nlohmann::json nothing(nlohmann::json::value_t::discarded);
  return check_json_depth(text).ok() ? nlohmann::json::parse(text, nullptr, false) : nothing;
}

Result<nlohmann::json> parse_json_strictly(std::string_view text, std::string_view what, int64_t max_depth,
                                           int64_t first_byte) {
  Walker walker(max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &walker);
  if (walker.duplicate)
    return Error{ErrorCode::kCorrupt, fmt::format("{} names \"{}\" twice", what, *walker.duplicate)};
  if (walker.problem) {
    return Error{ErrorCode::kCorrupt,
                 fmt::format("byte {}: {} is not JSON: {}", first_byte + static_cast<int64_t>(walker.position()), what,
                             *walker.problem)};
  }
  nlohmann::json out = nlohmann::json::parse(text, nullptr, false);
  if (out.is_discarded()) return Error{ErrorCode::kCorrupt, fmt::format("{} is not JSON", what)};
  return out;
}

}  // namespace cairn
