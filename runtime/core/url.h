#pragma once
// Looks at parts of a URL.

#include <string_view>

namespace cairn {

/// Whether a user, perhaps with a password, stands in front of the host.
inline bool has_user_information(std::string_view url) {
  if (const size_t scheme = url.find("://"); scheme != std::string_view::npos) url.remove_prefix(scheme + 3);
  return url.substr(0, url.find_first_of("/?#")).find('@') != std::string_view::npos;
}

}  // namespace cairn
