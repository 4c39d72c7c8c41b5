#include "tools/launch/quote.h"

#include <fmt/format.h>

#include <algorithm>

namespace cairn::tools {
namespace {

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_@%+=:,./-").find(c) != std::string_view::npos;
}

}  // namespace

Status check_line(std::string_view what, std::string_view text) {
  const auto bad = std::ranges::find_if(text, [](char c) { return (c >= '\0' && c < ' ') || c == '\x7f'; });
  if (bad == text.end()) return {};
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{} has the control character \\x{:02x} at byte {}; names and options that are launched are "
                           "one line each",
                           what, static_cast<unsigned char>(*bad), bad - text.begin())};
}

std::string shell_word(std::string_view text) {
  if (!text.empty() && std::ranges::all_of(text, is_plain)) return std::string(text);
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string shell_words(std::span<const std::string> words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + shell_word(word);
  return out;
}

std::string sbatch_word(std::string_view text) {
  if (!text.empty() && std::ranges::all_of(text, is_plain)) return std::string(text);
  std::string out = "\"";  // a backslash before a space does not do outside of quotes
  for (const char c : text) out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return out + "\"";
}

std::string pod_word(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '$' ? std::string("$$") : std::string(1, c);
  return out;
}

std::pair<std::string, std::string> split_pair(const std::string& text) {
  const size_t equals = text.find('=');
  return {text.substr(0, equals), text.substr(equals + 1)};
}

}  // namespace cairn::tools
