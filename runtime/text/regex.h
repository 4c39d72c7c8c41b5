#pragma once
// Regular expressions as tokenizer.json writes them, that is for Oniguruma, matched by PCRE2. The pattern is translated
// first: nested classes are flattened, \s, \d and \w become what Oniguruma means by them, and what the two would read
// differently (&&, \h, \R, POSIX brackets ...) is refused by name. Characters younger than PCRE2's Unicode tables are
// matched through older ones of the same general category (newer_unicode.inc).
// Sources: Oniguruma doc/RE, PCRE2 pcre2pattern(3).

#include <cstddef>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/core/result.h"

namespace cairn::text {

class Regex {
 public:
  /// Errors: kUnsupported naming the construct and its place, kInvalidInput for a pattern that is none.
  static Result<Regex> compile(std::string_view pattern);
  /// A pattern that matches `text` itself.
  static Result<Regex> literal(std::string_view text);

  /// The field "pattern" of a step: {"Regex": "..."} or {"String": "..."}.
  static Result<Regex> from_json(const nlohmann::json& spec);

  /// Appends [begin, end) of the matches in well-formed UTF-8, left to right; empty matches are passed over. Threads:
  /// any. Errors: kUnsupported when the pattern needs more backtracking than PCRE2 allows.
  Status matches(std::string_view text, std::vector<std::pair<size_t, size_t>>* out) const;

  /// `text` with `content` in the place of each match.
  Result<std::string> replaced(std::string_view text, std::string_view content) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

/// The pattern in PCRE2's words.
Result<std::string> translate_pattern(std::string_view oniguruma);

}  // namespace cairn::text
