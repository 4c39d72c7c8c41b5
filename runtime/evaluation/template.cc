#include "runtime/evaluation/template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/evaluation/python_text.h"

namespace cairn::evaluation {

using Json = nlohmann::ordered_json;

/// A node of an expression. `name`: of a field, a method or a filter.
struct Expression {
  enum class Kind { kValue, kName, kList, kJoin, kAdd, kField, kIndex, kSlice, kCall };
  Kind kind = Kind::kValue;
  std::string name;
  Json value;
  std::vector<Expression> parts;  // operands; of what follows one, that first
};

namespace {

using Kind = Expression::Kind;

constexpr int kMaxDepth = 32;
constexpr int64_t kMostText = int64_t{64} << 20;  // bytes of a rendered value

Error invalid(std::string message) { return Error{ErrorCode::kInvalidInput, std::move(message)}; }
Error unsupported(std::string message) { return Error{ErrorCode::kUnsupported, std::move(message)}; }

constexpr std::array<std::string_view, 18> kCalls = {"strip",      "lstrip",   "rstrip",  "trim",  "lower", "upper",
                                                     "capitalize", "title",    "replace", "split", "join",  "index",
                                                     "startswith", "endswith", "length",  "first", "last",  "string"};

bool is_call(std::string_view name) { return name == "int" || std::ranges::find(kCalls, name) != kCalls.end(); }

bool begins_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  /// `first`: the place of `text` within the template, for messages.
  Parser(std::string_view text, size_t first) : text_(text), first_(first) {}

  Result<Expression> all() {
    RT_TRY_SET(Expression out, expression());
    skip();
    if (at_ < text_.size()) return unexpected();
    return out;
  }

 private:
  Result<Expression> expression() {
    if (++depth_ > kMaxDepth) return invalid(fmt::format("byte {}: nested too deeply", first_ + at_));
    RT_TRY_SET(Expression out, sum());
    while (take('~')) {
      RT_TRY_SET(Expression other, sum());
      out = {.kind = Kind::kJoin, .parts = {std::move(out), std::move(other)}};
    }
    --depth_;
    return out;
  }

  Result<Expression> sum() {
    RT_TRY_SET(Expression out, part());
    while (take('+')) {
      RT_TRY_SET(Expression other, part());
      out = {.kind = Kind::kAdd, .parts = {std::move(out), std::move(other)}};
    }
    return out;
  }

  Result<Expression> part() {
    RT_TRY_SET(Expression out, primary());
    for (;;) {
      if (take('.')) {
        RT_TRY_SET(std::string name, this->name());
        if (peek() == '(') {
          RT_TRY_SET(out, call(std::move(out), std::move(name), "method"));
        } else {
          out = {.kind = Kind::kField, .name = std::move(name), .parts = {std::move(out)}};
        }
      } else if (take('[')) {
        RT_TRY_SET(out, index(std::move(out)));
      } else if (take('|')) {
        RT_TRY_SET(std::string name, this->name());
        RT_TRY_SET(out, call(std::move(out), std::move(name), "filter"));
      } else {
        return out;
      }
    }
  }

  Result<Expression> call(Expression of, std::string name, const char* what) {
    if (!is_call(name)) return unsupported(fmt::format("byte {}: the {} {} is not read", first_ + at_, what, name));
    Expression out{.kind = Kind::kCall, .name = std::move(name)};
    out.parts.push_back(std::move(of));
    if (take('(')) {
      while (!take(')')) {
        if (out.parts.size() > 1 && !take(',')) return unexpected();
        RT_TRY_SET(Expression argument, expression());
        out.parts.push_back(std::move(argument));
      }
    }
    return out;
  }

  Result<Expression> index(Expression of) {
    std::vector<Expression> parts;
    parts.push_back(std::move(of));
    const Expression none{.value = nullptr};
    if (peek() == ':') {
      parts.push_back(none);
    } else {
      RT_TRY_SET(Expression first, expression());
      parts.push_back(std::move(first));
    }
    Kind kind = Kind::kIndex;
    if (take(':')) {
      kind = Kind::kSlice;
      if (peek() == ']') {
        parts.push_back(none);
      } else {
        RT_TRY_SET(Expression end, expression());
        parts.push_back(std::move(end));
      }
    }
    if (!take(']')) return unexpected();
    return Expression{.kind = kind, .parts = std::move(parts)};
  }

  Result<Expression> primary() {
    skip();
    if (at_ >= text_.size()) return unexpected();
    const char c = text_[at_];
    if (c == '\'' || c == '"') {
      RT_TRY_SET(std::string text, string(c));
      return Expression{.value = std::move(text)};
    }
    if (is_digit(c) || (c == '-' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]))) return number();
    if (take('(')) {
      RT_TRY_SET(Expression out, expression());
      if (!take(')')) return unexpected();
      return out;
    }
    if (take('[')) {
      Expression out{.kind = Kind::kList};
      while (!take(']')) {
        if (!out.parts.empty() && !take(',')) return unexpected();
        if (take(']')) break;  // a comma at the end
        RT_TRY_SET(Expression element, expression());
        out.parts.push_back(std::move(element));
      }
      return out;
    }
    if (!begins_name(c)) return unexpected();
    RT_TRY_SET(std::string name, this->name());
    if (name == "True" || name == "true") return Expression{.value = true};
    if (name == "False" || name == "false") return Expression{.value = false};
    if (name == "None" || name == "none") return Expression{.value = nullptr};
    return Expression{.kind = Kind::kName, .name = std::move(name)};
  }

  Result<Expression> number() {
    const size_t begin = at_;
    ++at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ - begin > 18 ||
        (at_ < text_.size() && text_[at_] == '.' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1]))) {
      return unsupported(fmt::format("byte {}: a number that is no whole one is not read", first_ + begin));
    }
    return Expression{.value = static_cast<int64_t>(std::stoll(std::string(text_.substr(begin, at_ - begin))))};
  }

  Result<std::string> string(char mark) {
    const size_t begin = at_++;
    std::string out;
    for (; at_ < text_.size(); ++at_) {
      char c = text_[at_];
      if (c == mark) {
        ++at_;
        return out;
      }
      if (c == '\\' && at_ + 1 < text_.size()) {
        c = text_[++at_];
        constexpr std::string_view kNames = "ntr", kBytes = "\n\t\r";
        if (const size_t known = kNames.find(c); known != kNames.npos) {
          out += kBytes[known];
        } else if (c == '\\' || c == '\'' || c == '"') {
          out += c;
        } else {
          return unsupported(fmt::format("byte {}: the escape \\{} is not read", first_ + at_ - 1, c));
        }
        continue;
      }
      out += c;
    }
    return invalid(fmt::format("byte {}: the text that begins with {} has no end", first_ + begin, mark));
  }

  Result<std::string> name() {
    skip();
    const size_t begin = at_;
    if (at_ >= text_.size() || !begins_name(text_[at_])) return unexpected();
    while (at_ < text_.size() && (begins_name(text_[at_]) || is_digit(text_[at_]))) ++at_;
    std::string out(text_.substr(begin, at_ - begin));
    constexpr std::array<std::string_view, 8> kWords = {"if", "else", "for", "in", "is", "not", "and", "or"};
    if (std::ranges::find(kWords, out) != kWords.end()) {
      return unsupported(fmt::format("byte {}: \"{}\" within an expression is not read", first_ + begin, out));
    }
    return out;
  }

  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  Error unexpected() {
    skip();
    if (at_ >= text_.size()) return invalid(fmt::format("byte {}: the expression ends early", first_ + at_));
    const std::string_view rest = text_.substr(at_);
    for (const std::string_view word : {"if", "else", "for", "in", "is", "not", "and", "or"}) {
      if (rest.starts_with(word) && (rest.size() == word.size() || !begins_name(rest[word.size()]))) {
        return unsupported(fmt::format("byte {}: \"{}\" within an expression is not read", first_ + at_, word));
      }
    }
    return invalid(
        fmt::format("byte {}: found '{}', expected an operator or the expression's end", first_ + at_, text_[at_]));
  }

  std::string_view text_;
  size_t first_ = 0, at_ = 0;
  int depth_ = 0;
};

const char* type_of(const Json& value) {
  if (value.is_string()) return "a text";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  if (value.is_boolean()) return "a flag";
  if (value.is_number()) return "a number";
  return "nothing";
}

/// A text or number of Python within a list.
std::string printed(const Json& value) {
  return value.is_string() ? python_quoted(value.get_ref<const std::string&>()) : python_text(value);
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to) {
  if (from.empty()) return text;
  std::string out;
  for (size_t at = 0;;) {
    const size_t found = text.find(from, at);
    out += text.substr(at, found - at);
    if (found == text.npos) return out;
    out += to;
    at = found + from.size();
  }
}

std::string capitalized(const std::string& text) {
  size_t first = text.empty() ? 0 : 1;
  while (first < text.size() && (static_cast<unsigned char>(text[first]) & 0xC0) == 0x80) ++first;
  return upper(text.substr(0, first)) + lower(text.substr(first));
}

std::string titled(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t space = std::min(text.find_first_of(" \t\n-", at), text.size());
    out += capitalized(text.substr(at, space - at));
    if (space < text.size()) out += text[space];
    at = space + 1;
  }
  return out;
}

Json parts_of(const std::string& text, const std::string* separator) {
  Json out = Json::array();
  if (separator == nullptr) {
    std::string_view rest = stripped(text);
    while (!rest.empty()) {
      const size_t end = std::min(rest.find_first_of(" \t\n\r\f\v"), rest.size());
      out.push_back(std::string(rest.substr(0, end)));
      rest = stripped_left(rest.substr(end));
    }
    return out;
  }
  for (size_t at = 0;;) {
    const size_t found = text.find(*separator, at);
    out.push_back(text.substr(at, found - at));
    if (found == text.npos) return out;
    at = found + separator->size();
  }
}

/// strip() and its kin with the characters to take off.
std::string stripped_of(std::string_view text, std::string_view characters, bool left, bool right) {
  while (left && !text.empty() && characters.find(text.front()) != characters.npos) text.remove_prefix(1);
  while (right && !text.empty() && characters.find(text.back()) != characters.npos) text.remove_suffix(1);
  return std::string(text);
}

class Evaluation {
 public:
  explicit Evaluation(const Json& item) : item_(item) {}

  Result<Json> of(const Expression& e) const {
    switch (e.kind) {
      case Kind::kValue:
        return e.value;
      case Kind::kName:
        if (!item_.is_object() || !item_.contains(e.name)) {
          return invalid(fmt::format("the item has no field \"{}\"", e.name));
        }
        return item_[e.name];
      case Kind::kList: {
        Json out = Json::array();
        for (const Expression& part : e.parts) {
          RT_TRY_SET(Json value, of(part));
          out.push_back(std::move(value));
        }
        return out;
      }
      case Kind::kJoin:
      case Kind::kAdd:
        return joined(e);
      case Kind::kField: {
        RT_TRY_SET(const Json from, of(e.parts[0]));
        if (!from.is_object() || !from.contains(e.name)) {
          return invalid(fmt::format("no field \"{}\" in {}", e.name, type_of(from)));
        }
        return from[e.name];
      }
      case Kind::kIndex:
        return indexed(e);
      case Kind::kSlice:
        return sliced(e);
      case Kind::kCall:
        return called(e);
    }
    return Json();
  }

 private:
  Result<Json> joined(const Expression& e) const {
    RT_TRY_SET(const Json a, of(e.parts[0]));
    RT_TRY_SET(const Json b, of(e.parts[1]));
    if (e.kind == Kind::kAdd && !(a.is_string() && b.is_string())) {
      if (a.is_number_integer() && b.is_number_integer()) {
        int64_t sum = 0;
        if (__builtin_add_overflow(a.get<int64_t>(), b.get<int64_t>(), &sum)) return invalid("a sum beyond 64 bits");
        return Json(sum);
      }
      if (a.is_array() && b.is_array()) {
        Json out = a;
        for (const Json& one : b) out.push_back(one);
        return out;
      }
      return invalid(fmt::format("{} + {} has no value", type_of(a), type_of(b)));
    }
    std::string out = python_text(a) + python_text(b);
    if (std::ssize(out) > kMostText) return invalid("the text is too long");
    return Json(std::move(out));
  }

  Result<Json> indexed(const Expression& e) const {
    RT_TRY_SET(const Json from, of(e.parts[0]));
    RT_TRY_SET(const Json at, of(e.parts[1]));
    if (from.is_object() && at.is_string()) {
      if (!from.contains(at.get_ref<const std::string&>())) {
        return invalid(fmt::format("no field \"{}\" in an object", at.get<std::string>()));
      }
      return from[at.get_ref<const std::string&>()];
    }
    if (!from.is_array() || !at.is_number_integer()) {
      return invalid(fmt::format("{} has no element numbered by {}", type_of(from), type_of(at)));
    }
    const auto size = std::ssize(from);
    const int64_t k = at.get<int64_t>(), place = k < 0 ? k + size : k;
    if (place < 0 || place >= size) return invalid(fmt::format("a list of {} has no element {}", size, k));
    return from[static_cast<size_t>(place)];
  }

  Result<Json> sliced(const Expression& e) const {
    RT_TRY_SET(const Json from, of(e.parts[0]));
    RT_TRY_SET(const Json first, of(e.parts[1]));
    RT_TRY_SET(const Json end, of(e.parts[2]));
    if (!from.is_array()) return unsupported(fmt::format("a part [first:end] of {} is not read", type_of(from)));
    const auto size = std::ssize(from);
    const auto bound = [&](const Json& at, int64_t otherwise) {
      if (!at.is_number_integer()) return otherwise;
      const int64_t k = at.get<int64_t>();
      return std::clamp<int64_t>(k < 0 ? k + size : k, 0, size);
    };
    Json out = Json::array();
    for (int64_t k = bound(first, 0); k < bound(end, size); ++k) out.push_back(from[static_cast<size_t>(k)]);
    return out;
  }

  Result<Json> called(const Expression& e) const {
    std::vector<Json> values;
    for (const Expression& part : e.parts) {
      RT_TRY_SET(Json value, of(part));
      values.push_back(std::move(value));
    }
    const auto wrong = [&]() {
      return invalid(fmt::format("{} of {} with {} argument{} has no value", e.name, type_of(values[0]),
                                 values.size() - 1, values.size() == 2 ? "" : "s"));
    };
    const auto argument = [&](size_t k) { return values.size() > k && values[k].is_string(); };
    const std::string& name = e.name;
    if (name == "string") return Json(python_text(values[0]));
    if (values[0].is_array()) return of_list(e, values, wrong);
    if (name == "join" && values.size() == 2 && values[1].is_array() && values[0].is_string()) {  // ", ".join(list)
      return join(values[1], values[0].get<std::string>());
    }
    if (name == "int" && values[0].is_number_integer()) return values[0];
    if (!values[0].is_string()) return wrong();
    const std::string& text = values[0].get_ref<const std::string&>();
    if (name == "length") return Json(count_characters(text));
    if (name == "strip" || name == "trim" || name == "lstrip" || name == "rstrip") {
      const bool left = name != "rstrip", right = name != "lstrip";
      if (argument(1)) return Json(stripped_of(text, values[1].get<std::string>(), left, right));
      return Json(std::string(left && right ? stripped(text) : left ? stripped_left(text) : stripped_right(text)));
    }
    if (name == "lower") return Json(lower(text));
    if (name == "upper") return Json(upper(text));
    if (name == "capitalize") return Json(capitalized(text));
    if (name == "title") return Json(titled(text));
    if (name == "replace" && values.size() == 3 && argument(1) && argument(2)) {
      return Json(replaced(text, values[1].get<std::string>(), values[2].get<std::string>()));
    }
    if (name == "split" && values.size() == 1) return parts_of(text, nullptr);
    if (name == "split" && values.size() == 2 && argument(1) && !values[1].get_ref<const std::string&>().empty()) {
      return parts_of(text, &values[1].get_ref<const std::string&>());
    }
    if (name == "startswith" && argument(1)) return Json(text.starts_with(values[1].get_ref<const std::string&>()));
    if (name == "endswith" && argument(1)) return Json(text.ends_with(values[1].get_ref<const std::string&>()));
    if (name == "int") {
      const bool whole = !text.empty() && text.size() < 18 && std::ranges::all_of(text, is_digit);
      return whole ? Json(static_cast<int64_t>(std::stoll(text))) : Json(0);  // Jinja's default
    }
    return wrong();
  }

  template <typename Wrong>
  static Result<Json> of_list(const Expression& e, const std::vector<Json>& values, const Wrong& wrong) {
    const Json& list = values[0];
    if (e.name == "length") return Json(std::ssize(list));
    if ((e.name == "first" || e.name == "last") && !list.empty()) return e.name == "first" ? list.front() : list.back();
    if (e.name == "join" && (values.size() == 1 || values[1].is_string())) {
      return join(list, values.size() == 1 ? "" : values[1].get<std::string>());
    }
    if (e.name == "index" && values.size() == 2) {
      const auto found = std::ranges::find(list, values[1]);
      if (found == list.end())
        return invalid(fmt::format("{} is not in the list {}", printed(values[1]), python_text(list)));
      return Json(static_cast<int64_t>(found - list.begin()));
    }
    return wrong();
  }

  static Result<Json> join(const Json& list, const std::string& between) {
    std::string out;
    for (size_t k = 0; k < list.size(); ++k) {
      if (k > 0) out += between;
      out += python_text(list[k]);
      if (std::ssize(out) > kMostText) return invalid("the text is too long");
    }
    return Json(std::move(out));
  }

  const Json& item_;
};

/// The place of the next {{, {% or {#.
size_t find_tag(std::string_view text, size_t at) {
  for (; at + 1 < text.size(); ++at) {
    if (text[at] == '{' && std::string_view("{%#").find(text[at + 1]) != std::string_view::npos) return at;
  }
  return std::string_view::npos;
}

}  // namespace

std::string python_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number_unsigned()) return fmt::format("{}", value.get<uint64_t>());
  if (value.is_number_integer()) return fmt::format("{}", value.get<int64_t>());
  if (value.is_number()) {
    const std::string out = fmt::format("{}", value.get<double>());
    return out.find_first_of(".e") == out.npos ? out + ".0" : out;
  }
  std::string out(1, value.is_array() ? '[' : '{');
  bool first = true;
  for (const auto& [key, one] : value.items()) {
    if (!first) out += ", ";
    first = false;
    if (value.is_object()) out += python_quoted(key) + ": ";
    out += printed(one);
  }
  return out + (value.is_array() ? ']' : '}');
}

Result<Json> python_literal(std::string_view text) {
  RT_TRY_SET(const Expression parsed, Parser(text, 0).all());
  const Json nothing = Json::object();
  return Evaluation(nothing).of(parsed);
}

Result<Template> Template::parse(std::string_view text) {
  Template out;
  std::string plain;
  bool strip_next = false;
  const auto add_plain = [&](std::string_view part, bool strip_end) {
    if (strip_next) part = stripped_left(part);
    if (strip_end) part = stripped_right(part);
    strip_next = false;
    plain += part;
  };
  for (size_t at = 0;;) {
    const size_t open = find_tag(text, at);
    if (open == text.npos) {
      add_plain(text.substr(at), false);
      break;
    }
    const char kind = text[open + 1];
    const bool strips = open + 2 < text.size() && text[open + 2] == '-';
    add_plain(text.substr(at, open - at), strips);
    const size_t begin = open + 2 + (strips ? 1 : 0);
    // A text within the expression may hold the marks.
    char mark = 0;
    size_t end = begin;
    const std::string_view closes = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
    for (; end + 1 < text.size(); ++end) {
      if (kind == '{' && (text[end] == '\'' || text[end] == '"')) {
        mark = mark == 0 ? text[end] : mark == text[end] ? 0 : mark;
      } else if (kind == '{' && mark != 0 && text[end] == '\\') {
        ++end;
      } else if (mark == 0 && text.substr(end, 2) == closes) {
        break;
      }
    }
    if (end + 1 >= text.size()) return invalid(fmt::format("byte {}: {{{} has no {}", open, kind, closes));
    std::string_view inner = text.substr(begin, end - begin);
    if (inner.ends_with('-')) {
      inner.remove_suffix(1);
      strip_next = true;
    }
    if (kind == '%') {
      return unsupported(fmt::format("byte {}: the tag {{% {} %}} is not read: only {{{{ expressions }}}} are", open,
                                     stripped(inner)));
    }
    if (kind == '{') {
      if (!plain.empty()) out.pieces_.push_back({std::exchange(plain, {}), nullptr});
      RT_TRY_SET(Expression parsed, Parser(inner, begin).all());
      out.pieces_.push_back({{}, std::make_shared<const Expression>(std::move(parsed))});
    }
    at = end + 2;
  }
  if (!plain.empty()) out.pieces_.push_back({std::move(plain), nullptr});
  return out;
}

Result<std::string> Template::text(const Json& item) const {
  std::string out;
  for (const Piece& piece : pieces_) {
    if (piece.expression == nullptr) {
      out += piece.text;
      continue;
    }
    RT_TRY_SET(const Json value, Evaluation(item).of(*piece.expression));
    out += python_text(value);
    if (std::ssize(out) > kMostText) return invalid("the text is too long");
  }
  return out;
}

Result<Json> Template::value(const Json& item) const {
  if (pieces_.size() == 1 && pieces_[0].expression != nullptr) return Evaluation(item).of(*pieces_[0].expression);
  RT_TRY_SET(std::string out, text(item));
  return Json(std::move(out));
}

}  // namespace cairn::evaluation
