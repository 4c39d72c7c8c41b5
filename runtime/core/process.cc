#include "runtime/core/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <string>
#include <string_view>

#include "runtime/core/unique_handle.h"

namespace cairn {

namespace {

constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel's sched.h

std::optional<ProcessStat> read_stat(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  char text[1024];
  const ssize_t n = ::read(fd.get(), text, sizeof text);
  if (n <= 0) return std::nullopt;  // also of a process that has gone since
  std::string_view rest(text, static_cast<size_t>(n));
  const size_t name_end = rest.rfind(')');  // the name may hold spaces and brackets itself; field 3 follows it
  if (name_end == std::string_view::npos || name_end + 2 >= rest.size()) return std::nullopt;
  rest.remove_prefix(name_end + 2);
  ProcessStat out{.state = rest.front()};
  for (int field = 3; field < 22; ++field) {
    if (field == 9) {
      uint64_t flags = 0;
      std::from_chars(rest.data(), rest.data() + rest.size(), flags);
      out.exiting = (flags & kExiting) != 0;
    }
    const size_t space = rest.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(space + 1);
  }
  if (std::from_chars(rest.data(), rest.data() + rest.size(), out.start).ec != std::errc()) return std::nullopt;
  return out;
}

}  // namespace

std::optional<ProcessStat> process_stat(int64_t pid) { return read_stat("/proc/" + std::to_string(pid) + "/stat"); }

ProcessId this_process() {
  // Where /proc is of another pid namespace it knows this process by another number.
  const std::optional<ProcessStat> stat = read_stat("/proc/self/stat");
  return {::getpid(), stat ? stat->start : 0};
}

bool is_alive(const ProcessId& process) {
  const std::optional<ProcessStat> stat = process_stat(process.pid);
  return stat && !stat->ended() && stat->start == process.start;
}

}  // namespace cairn
