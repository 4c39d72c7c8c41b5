#include "runtime/evaluation/python_text.h"

#include <fmt/format.h>
#include <unicode/locid.h>
#include <unicode/unistr.h>

namespace cairn::evaluation {
namespace {

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

/// The code point whose bytes begin at `at`, and how many they are; a byte that begins none is itself.
char32_t code_point(std::string_view text, size_t at, size_t* bytes) {
  const auto lead = static_cast<unsigned char>(text[at]);
  *bytes = 1;
  const size_t wanted = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
  if (wanted == 1 || at + wanted > text.size()) return lead;
  char32_t out = lead & (0xFF >> (wanted + 1));
  for (size_t k = 1; k < wanted; ++k) {
    if (!continues(text[at + k])) return lead;
    out = out << 6 | (static_cast<unsigned char>(text[at + k]) & 0x3F);
  }
  *bytes = wanted;
  return out;
}

/// str.isspace(): bidirectional type WS, B or S, or category Zs.
bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace

std::string_view stripped_left(std::string_view text) {
  size_t bytes = 0;
  while (!text.empty() && is_space(code_point(text, 0, &bytes))) text.remove_prefix(bytes);
  return text;
}

std::string_view stripped_right(std::string_view text) {
  while (!text.empty()) {
    size_t at = text.size() - 1, bytes = 0;
    while (at > 0 && text.size() - at < 4 && continues(text[at])) --at;
    const char32_t last = code_point(text, at, &bytes);
    if (at + bytes != text.size() || !is_space(last)) break;
    text.remove_suffix(bytes);
  }
  return text;
}

int64_t count_characters(std::string_view text) {
  int64_t out = 0;
  for (const char byte : text) out += continues(byte) ? 0 : 1;
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  icu::UnicodeString::fromUTF8({text.data(), static_cast<int32_t>(text.size())})
      .toLower(icu::Locale::getRoot())
      .toUTF8String(out);
  return out;
}

std::string upper(std::string_view text) {
  std::string out;
  icu::UnicodeString::fromUTF8({text.data(), static_cast<int32_t>(text.size())})
      .toUpper(icu::Locale::getRoot())
      .toUTF8String(out);
  return out;
}

std::string python_quoted(std::string_view text) {
  const char mark = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, mark);
  for (const char c : text) {
    if (c == mark || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + mark;
}

}  // namespace cairn::evaluation
