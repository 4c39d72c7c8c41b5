#include "runtime/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>

#include "runtime/text/json_fields.h"
#include "runtime/text/utf8.h"

namespace cairn::text {
namespace {

// What Oniguruma matches with these under UTF-8, written as the inside of a class. \s: the property White_Space;
// PCRE2's own has U+180E too. \w: letters, marks, decimal and letter numbers, connectors, and what else is Alphabetic
// or was in Latin-1's list.
constexpr std::string_view kSpace =
    R"(\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kDigit = R"(\p{Nd})";
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE}\x{24B6}-\x{24E9}\x{1F130}-\x{1F149})"
    R"(\x{1F150}-\x{1F169}\x{1F170}-\x{1F189})";

constexpr std::array<std::string_view, 39> kProperties = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd",  "Nl",
    "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc",  "Sk",
    "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cn", "Co", "Cs", "Any", "Alphabetic"};
// Scripts that patterns in use name. PCRE2 would look at script extensions, Oniguruma at the script.
constexpr std::array<std::string_view, 14> kScripts = {"Han",      "Hiragana", "Katakana", "Hangul",    "Latin",
                                                       "Cyrillic", "Greek",    "Arabic",   "Hebrew",    "Thai",
                                                       "Bengali",  "Tamil",    "Armenian", "Devanagari"};

class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  Result<std::string> run() {
    while (at_ < in_.size()) RT_TRY(one());
    return std::move(out_);
  }

 private:
  bool next_is(std::string_view text) const { return in_.substr(at_).starts_with(text); }

  Error unsupported(std::string_view what) const {
    return Error{ErrorCode::kUnsupported,
                 fmt::format("the pattern {} has {} at byte {}, which is not read here", in_, what, at_)};
  }
  Error ends_early() const {
    return Error{ErrorCode::kInvalidInput, fmt::format("the pattern {} ends inside a construct", in_)};
  }

  Status one() {
    const char c = in_[at_];
    if (c == '[') return char_class();
    if (c == '\\') {
      std::string inside;
      bool negated = false;
      RT_TRY_SET(const bool set, escape(/*in_class=*/false, &inside, &negated));
      out_ += set ? fmt::format("[{}{}]", negated ? "^" : "", inside) : inside;
      return {};
    }
    if (c == '(' && at_ + 1 < in_.size() && in_[at_ + 1] == '?') {
      for (const std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)", "(?-i:"}) {
        if (!next_is(known)) continue;
        out_ += known;
        at_ += known.size();
        return {};
      }
      return unsupported(in_.substr(at_, 4));
    }
    // "}+" is greedy there and possessive here, "{,n}" is an interval there and text here.
    if (next_is("}+") || next_is("{,")) return unsupported(in_.substr(at_, 2));
    if (c == '$') {
      out_ += R"((?=\n|\z))";  // Oniguruma's: before any line end
    } else if (c == '^') {
      out_ += R"((?:\A|(?<=\n)(?!\z)))";
    } else {
      out_ += c;
    }
    ++at_;
    return {};
  }

  /// At a backslash. True: what it stands for is a set, given as the inside of a class.
  Result<bool> escape(bool in_class, std::string* inside, bool* negated) {
    if (at_ + 1 >= in_.size()) return ends_early();
    const char c = in_[at_ + 1];
    const auto set = [&](std::string_view members, bool not_in) {
      *inside += members;
      *negated = not_in;
      at_ += 2;
      return true;
    };
    switch (c) {
      case 's':
      case 'S':
        return set(kSpace, c == 'S');
      case 'd':
      case 'D':
        return set(kDigit, c == 'D');
      case 'w':
      case 'W':
        return set(kWord, c == 'W');
      case 'p':
      case 'P':
        return property(inside);
      case 'x':
      case 'u':
        RT_TRY(code_point(inside));
        return false;
      case 'b':
      case 'B':
      case 'A':
      case 'z':
        if (in_class || c == 'b' || c == 'B') return unsupported(in_.substr(at_, 2));
        break;
      case 'n':
      case 'r':
      case 't':
      case 'f':
        break;
      case 'v':
        *inside += R"(\x0B)";
        at_ += 2;
        return false;
      default:
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
            static_cast<unsigned char>(c) >= 0x80) {
          return unsupported(in_.substr(at_, 2));
        }
    }
    *inside += in_.substr(at_, 2);
    at_ += 2;
    return false;
  }

  /// \p{L}, \P{L}, \p{^L}: one item, in a class or out of it.
  Result<bool> property(std::string* inside) {
    const bool upper = in_[at_ + 1] == 'P';
    const size_t end = in_.find('}', at_);
    if (at_ + 2 >= in_.size() || in_[at_ + 2] != '{' || end == std::string_view::npos) {
      return unsupported(in_.substr(at_, 3));
    }
    std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
    const bool caret = name.starts_with('^');
    if (caret) name.remove_prefix(1);
    std::string found(name);
    if (std::find(kScripts.begin(), kScripts.end(), name) != kScripts.end()) {
      found = "sc:" + found;
    } else if (std::find(kProperties.begin(), kProperties.end(), name) == kProperties.end()) {
      return unsupported(in_.substr(at_, end + 1 - at_));
    }
    *inside += fmt::format("\\{}{{{}}}", upper != caret ? 'P' : 'p', found);
    at_ = end + 1;
    return false;
  }

  /// \xHH, \x{H...}, \uHHHH.
  Status code_point(std::string* inside) {
    const bool braces = in_[at_ + 1] == 'x' && at_ + 2 < in_.size() && in_[at_ + 2] == '{';
    const size_t begin = at_ + (braces ? 3 : 2);
    size_t end = begin;
    const size_t longest = braces ? 6 : in_[at_ + 1] == 'u' ? 4 : 2;
    while (end < in_.size() && end - begin < longest && std::isxdigit(static_cast<unsigned char>(in_[end])) != 0) ++end;
    if (end == begin || (braces && (end >= in_.size() || in_[end] != '}'))) return unsupported(in_.substr(at_, 3));
    *inside += fmt::format("\\x{{{}}}", in_.substr(begin, end - begin));
    at_ = end + (braces ? 1 : 0);
    return {};
  }

  Status char_class() {
    RT_TRY_SET(const std::string inside, class_inside());
    out_ += inside;
    return {};
  }

  /// At '['. A nested class that is not negated adds its members to the one around it.
  Result<std::string> class_inside() {
    ++at_;
    bool negated = false;
    if (next_is("^")) {
      negated = true;
      ++at_;
    }
    std::string members;
    RT_TRY(class_members(&members));
    return fmt::format("[{}{}]", negated ? "^" : "", members);
  }

  Status class_members(std::string* members) {
    bool first = true;
    for (;; first = false) {
      if (at_ >= in_.size()) return ends_early();
      const char c = in_[at_];
      if (c == ']' && !first) {
        ++at_;
        return {};
      }
      if (next_is("&&")) return unsupported("an intersection of classes (&&)");
      if (next_is("[:")) return unsupported("a POSIX bracket");
      if (c == '[') {
        ++at_;
        if (next_is("^")) return unsupported("a negated class inside a class");
        RT_TRY(class_members(members));
      } else if (c == '\\') {
        std::string inside;
        bool not_in = false;
        RT_TRY_SET(const bool set, escape(/*in_class=*/true, &inside, &not_in));
        if (set && not_in) {
          // The complement of a list of characters: by its gaps.
          if (inside == kSpace) {
            inside = R"(\x00-\x08\x0E-\x1F\x21-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF}\x{200B}-\x{2027})"
                     R"(\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";
          } else if (inside == kDigit) {
            inside = R"(\P{Nd})";
          } else {
            return unsupported("\\W in a class");
          }
        }
        *members += inside;
      } else if (c == ']' || (c == '^' && first)) {
        *members += fmt::format("\\{}", c);
        ++at_;
      } else {
        const size_t length = utf8_length(c);
        *members += in_.substr(at_, length);
        at_ += length;
      }
    }
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
};

struct Newer {
  char32_t first, last, stand_in;
};
constexpr Newer kNewer[] = {
#include "runtime/text/newer_unicode.inc"
};

/// `text`, with characters that PCRE2's tables lack replaced by older ones of the same category and length; empty when
/// there are none, which is nearly always.
std::string with_stand_ins(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text[at]);
    if (length >= 3) {
      const char32_t c = utf8_at(text, at);
      const auto* found = std::upper_bound(std::begin(kNewer), std::end(kNewer), c,
                                           [](char32_t x, const Newer& range) { return x < range.first; });
      if (found != std::begin(kNewer) && c <= std::prev(found)->last) {
        if (out.empty()) out = text;
        std::string replaced;
        append_utf8(std::prev(found)->stand_in, &replaced);
        out.replace(at, length, replaced);
      }
    }
    at += length;
  }
  return out;
}

/// A thread's space for matching.
struct MatchSpace {
  pcre2_match_data* data = pcre2_match_data_create(64, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr);
  MatchSpace() { pcre2_jit_stack_assign(context, nullptr, stack); }
  MatchSpace(const MatchSpace&) = delete;
  MatchSpace& operator=(const MatchSpace&) = delete;
  ~MatchSpace() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;  // null: `pattern` is a literal
  std::string pattern;
  ~Code() { pcre2_code_free(code); }
};

Result<std::string> translate_pattern(std::string_view oniguruma) { return Translator(oniguruma).run(); }

Result<Regex> Regex::compile(std::string_view pattern) {
  if (find_invalid_utf8(pattern) >= 0) return Error{ErrorCode::kInvalidInput, "a pattern is not UTF-8"};
  RT_TRY_SET(const std::string translated, translate_pattern(pattern));
  int error = 0;
  PCRE2_SIZE at = 0;
  auto held = std::make_shared<Code>();
  held->pattern = pattern;
  held->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, &error, &at, nullptr);
  if (held->code == nullptr) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(error, text.data(), text.size());
    return Error{ErrorCode::kInvalidInput, fmt::format("the pattern {} is no regular expression: {}", pattern,
                                                       reinterpret_cast<const char*>(text.data()))};
  }
  pcre2_jit_compile(held->code, PCRE2_JIT_COMPLETE);  // where it fails matching is slower, not different
  Regex out;
  out.code_ = std::move(held);
  return out;
}

Result<Regex> Regex::literal(std::string_view text) {
  if (text.empty()) return Error{ErrorCode::kInvalidInput, "a literal pattern is empty"};
  if (find_invalid_utf8(text) >= 0) return Error{ErrorCode::kInvalidInput, "a literal pattern is not UTF-8"};
  auto held = std::make_shared<Code>();
  held->pattern = text;
  Regex out;
  out.code_ = std::move(held);
  return out;
}

Result<Regex> Regex::from_json(const nlohmann::json& spec) {
  const auto pattern = spec.find("pattern");
  if (pattern != spec.end() && pattern->is_object() && pattern->size() == 1) {
    if (pattern->contains("Regex")) {
      RT_TRY_SET(const std::string text, string_field(*pattern, "Regex"));
      return compile(text);
    }
    if (pattern->contains("String")) {
      RT_TRY_SET(const std::string text, string_field(*pattern, "String"));
      return literal(text);
    }
  }
  return bad_field("pattern", "{\"Regex\": ...} or {\"String\": ...}", pattern == spec.end() ? spec : *pattern);
}

Result<std::string> Regex::replaced(std::string_view text, std::string_view content) const {
  std::vector<std::pair<size_t, size_t>> found;
  RT_TRY(matches(text, &found));
  std::string out;
  size_t done = 0;
  for (const auto& [begin, end] : found) {
    out += text.substr(done, begin - done);
    out += content;
    done = end;
  }
  out += text.substr(done);
  return out;
}

Status Regex::matches(std::string_view text, std::vector<std::pair<size_t, size_t>>* out) const {
  if (code_->code == nullptr) {
    const std::string& literal = code_->pattern;
    for (size_t at = text.find(literal); at != text.npos; at = text.find(literal, at + literal.size())) {
      out->emplace_back(at, at + literal.size());
    }
    return {};
  }
  thread_local MatchSpace space;
  const std::string replaced = with_stand_ins(text);
  const std::string_view subject = replaced.empty() ? text : std::string_view(replaced);
  const PCRE2_SIZE* const found = pcre2_get_ovector_pointer(space.data);
  for (size_t at = 0; at < subject.size();) {
    const int status = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), at,
                                   PCRE2_NO_UTF_CHECK, space.data, space.context);
    if (status == PCRE2_ERROR_NOMATCH) break;
    if (status < 0) {
      return Error{ErrorCode::kUnsupported, fmt::format("the pattern {} gives up at byte {} of a text of {} (PCRE2 {})",
                                                        code_->pattern, at, subject.size(), status)};
    }
    if (found[1] > found[0]) {
      out->emplace_back(found[0], found[1]);
      at = found[1];
    } else {
      at = found[0] < subject.size() ? found[0] + utf8_length(subject[found[0]]) : subject.size();
    }
  }
  return {};
}

}  // namespace cairn::text
