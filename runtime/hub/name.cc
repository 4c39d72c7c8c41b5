#include "runtime/hub/name.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

namespace cairn::hub {
namespace {

constexpr std::string_view kScheme = "hf://";
constexpr size_t kMaxIdChars = 96;  // huggingface_hub, validate_repo_id
constexpr size_t kMaxRevisionChars = 255;

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

bool is_id_part(std::string_view part) {
  if (part.empty() || !std::ranges::all_of(part, is_word)) return false;
  const auto at_edge = [](char c) { return c == '-' || c == '.'; };
  return !at_edge(part.front()) && !at_edge(part.back()) && part.find("--") == part.npos &&
         part.find("..") == part.npos;
}

/// Branches may hold slashes. The revision becomes a file below refs/: no part of it may leave that folder.
bool is_revision(std::string_view text) {
  if (text.empty() || text.size() > kMaxRevisionChars) return false;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const bool plain = std::ranges::all_of(part, [](char c) { return is_word(c) || c == '+'; });
    if (part.empty() || !plain || part.front() == '.') return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace

bool is_commit(std::string_view text) {
  return text.size() == 40 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

Result<std::optional<Name>> parse_name(std::string_view text) {
  Name out;
  std::string_view rest = text;
  if (rest.starts_with(kScheme)) {
    out.explicit_scheme = true;
    rest.remove_prefix(kScheme.size());
  }
  const size_t at = rest.find('@');
  const std::string_view id = rest.substr(0, at), revision = at == rest.npos ? "main" : rest.substr(at + 1);
  const size_t slash = id.find('/');
  if (slash != id.npos && id.size() <= kMaxIdChars && is_id_part(id.substr(0, slash)) &&
      is_id_part(id.substr(slash + 1)) && is_revision(revision)) {
    out.id = id;
    out.revision = revision;
    return std::optional<Name>(std::move(out));
  }
  if (!out.explicit_scheme) return std::optional<Name>();
  return Error{ErrorCode::kInvalidInput,
               fmt::format("{}: is no model of the Hub\n  expected hf://ORG/NAME or hf://ORG/NAME@REVISION", text)};
}

Result<std::optional<Name>> find_name(const std::string& text, Bare bare) {
  RT_TRY_SET(std::optional<Name> name, parse_name(text));
  if (!name || name->explicit_scheme) return name;
  if (bare == Bare::kNever) return std::optional<Name>();
  std::error_code error;
  const std::filesystem::path path(text);
  if (std::filesystem::exists(std::filesystem::symlink_status(path, error)) ||
      std::filesystem::is_directory(path.parent_path(), error)) {
    return std::optional<Name>();
  }
  return name;
}

}  // namespace cairn::hub
