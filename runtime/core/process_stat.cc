#include "runtime/core/process_stat.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "runtime/core/unique_handle.h"

namespace cairn {
namespace {

std::optional<ProcessStat> read_stat(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  std::string text;
  char piece[1024];
  for (;;) {
    const ssize_t n = ::read(fd.get(), piece, sizeof piece);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) break;
    text.append(piece, static_cast<size_t>(n));
  }
  // Field 2 is the program's name in parentheses, which may hold anything; field 3 is the state.
  size_t at = text.rfind(')');
  if (at == std::string::npos || at + 2 >= text.size()) return std::nullopt;
  ProcessStat out{.state = text[at + 2]};
  for (int field = 2; field < 22; ++field) {
    at = text.find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
  }
  out.start = std::strtoll(text.c_str() + at, nullptr, 10);
  return out;
}

}  // namespace

std::optional<ProcessStat> stat_of_process(int64_t pid) { return read_stat(fmt::format("/proc/{}/stat", pid)); }

std::optional<ProcessStat> stat_of_this_process() { return read_stat("/proc/self/stat"); }

}  // namespace cairn
