#include "tools/run/agent/listen.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tools/run/folder/folder.h"

namespace cairn::tools {

Result<std::pair<std::string, int64_t>> parse_listen(const std::string& flag, const std::string& where) {
  const size_t colon = where.rfind(':');
  std::string address = where.substr(0, std::min(colon, where.size()));
  if (address.starts_with('[') && address.ends_with(']')) address = address.substr(1, address.size() - 2);
  int64_t port = -1;
  if (colon != where.npos) {
    const char* const end = where.data() + where.size();
    const auto read = std::from_chars(where.data() + colon + 1, end, port);
    if (read.ec != std::errc() || read.ptr != end) port = -1;
  }
  if (address.empty() || port < 0 || port > 65535)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} {}: expected ADDRESS:PORT, such as 127.0.0.1:9400", flag, where)};
  return std::pair(std::move(address), port);
}

Result<std::string> read_listen_token(const std::string& flag, const std::string& file) {
  if (file.empty()) return std::string();
  RT_TRY_SET(std::string token, read_text_file(file).with(flag));
  token = token.substr(0, token.find_first_of("\r\n"));
  const bool plain = std::ranges::all_of(token, [](char one) { return one > ' ' && one < 127; });
  if (token.empty() || !plain)
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{} {}: its first line is to be a token without spaces", flag, file)};
  return token;
}

}  // namespace cairn::tools
