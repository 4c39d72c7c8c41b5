#pragma once
// Frames of agents' messages, as bytes: for what no agent of this program sends.

#include <sys/socket.h>

#include <string>
#include <string_view>

namespace cairn::testing {

/// A length and that text.
inline std::string frame(std::string_view text) {
  std::string out;
  for (size_t k = 0; k < 4; ++k) out += static_cast<char>(text.size() >> (8 * k) & 0xff);
  return out.append(text);
}

/// False: the socket does not take all of it.
inline bool send_bytes(int fd, std::string_view bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

}  // namespace cairn::testing
