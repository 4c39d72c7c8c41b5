#include "runtime/comm/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "runtime/core/unique_handle.h"

namespace cairn::comm {

Result<Rendezvous> Rendezvous::open(std::string directory) {
  std::error_code code;
  std::filesystem::create_directories(directory, code);
  if (code) return os_error(code.value(), fmt::format("rendezvous directory {}", directory));
  return Rendezvous(std::move(directory));
}

// Keys hold slashes and brackets: anything but plain characters is written as %XX.
std::string Rendezvous::path(const std::string& key) const {
  std::string name;
  for (const char c : key) {
    const bool plain =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-';
    if (plain) {
      name += c;
    } else {
      name += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return directory_ + "/" + name;
}

Result<bool> Rendezvous::publish(const std::string& key, const std::string& value) const {
  const std::string target = path(key);
  std::string temporary = directory_ + "/.new-XXXXXX";
  Fd fd(::mkstemp(temporary.data()));
  if (!fd) return os_error(errno, fmt::format("rendezvous file {}", temporary));
  size_t at = 0;
  int failed = 0;
  while (at < value.size()) {
    const ssize_t n = ::write(fd.get(), value.data() + at, value.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      failed = n < 0 ? errno : EIO;
      break;
    }
    at += static_cast<size_t>(n);
  }
  fd.reset();
  bool made = false;
  if (failed == 0) {
    made = ::link(temporary.c_str(), target.c_str()) == 0;  // unlike rename, it does not replace
    if (!made && errno != EEXIST) failed = errno;
  }
  ::unlink(temporary.c_str());
  if (failed != 0) return os_error(failed, fmt::format("rendezvous file {}", target));
  return made;
}

std::optional<std::string> Rendezvous::look(const std::string& key) const {
  const Fd fd(::open(path(key).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  std::string value;
  char buffer[4096];
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) return value;
    value.append(buffer, static_cast<size_t>(n));
  }
}

}  // namespace cairn::comm
