#include "converters/strict_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cairn::convert {
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

}  // namespace

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
  nlohmann::json out = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (out.is_discarded()) return Error{ErrorCode::kCorrupt, fmt::format("{} is not JSON", what)};
  return out;
}

}  // namespace cairn::convert
