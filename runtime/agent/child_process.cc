#include "runtime/agent/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>
#include <system_error>
#include <thread>

#include "runtime/agent/event_pipe.h"
#include "runtime/core/file_calls.h"
#include "runtime/core/new_file.h"
#include "runtime/core/no_signals.h"
#include "runtime/core/process.h"

// From linux/close_range.h, which clashes with glibc's unistd.h in some versions.
#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

extern char** environ;

namespace cairn::agent {
namespace {

constexpr int kEventPipeBytes = 256 << 10;  // a burst of events must not stall a rank while the supervisor is busy

// glibc 2.36 declares both in sys/pidfd.h without extern "C".
int pidfd_open(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
bool pidfd_kill(int pidfd) { return syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0) == 0; }

/// The read end of a pipe whose other end closes when the child, which stays to be reaped, has ended.
Result<Fd> watch_by_thread(pid_t pid) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return os_error(errno, "pipe2");
  Fd read_end(ends[0]), write_end(ends[1]);
  struct sigaction action {};
  if (sigaction(SIGCHLD, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) {
    action.sa_handler = SIG_DFL;  // else the kernel reaps children itself, and their numbers are free again
    sigaction(SIGCHLD, &action, nullptr);
  }
  const NoSignals none;  // for the thread
  try {
    std::thread([pid, end = std::move(write_end)]() {
      siginfo_t info;
      while (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
      }
    }).detach();
  } catch (const std::system_error& failed) {
    return Error{ErrorCode::kUnavailable, fmt::format("a thread that waits for a child: {}", failed.what())};
  }
  return read_end;
}

/// All that the child needs between vfork and exec, made beforehand: it may not allocate.
struct Launch {
  pid_t parent = 0;
  const char* path = nullptr;
  char* const* argv = nullptr;
  char* const* envp = nullptr;
  const int* keep_fds = nullptr;
  size_t keep_count = 0;
  int input_fd = -1;
  int log_fd = -1;  // -1: keep stdout and stderr
  bool foreign = false;
  int nice = 0;  // the child's own value
};

/// Written by the child, which shares the supervisor's memory until exec.
struct LaunchFailure {
  volatile int os_errno = 0;
  const char* volatile step = nullptr;
};

/// Runs in the child, in the supervisor's memory: system calls only.
[[noreturn]] __attribute__((noinline)) void become_child(const Launch& launch, LaunchFailure& failure) {
  const auto fail = [&](const char* step) {
    failure.os_errno = errno;
    failure.step = step;
    _exit(127);
  };
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail("prctl(PR_SET_PDEATHSIG)");
  if (getppid() != launch.parent) _exit(127);  // the supervisor died before the line above
  if (dup2(launch.input_fd, STDIN_FILENO) < 0) fail("dup2 of its input");
  if (launch.log_fd >= 0) {
    if (dup2(launch.log_fd, STDOUT_FILENO) < 0) fail("dup2 of the log");
    if (dup2(launch.log_fd, STDERR_FILENO) < 0) fail("dup2 of the log");
  }
  // Before Linux 5.11 this fails, and what others opened without O_CLOEXEC stays open in the child.
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (size_t i = 0; i < launch.keep_count; ++i) {
    if (fcntl(launch.keep_fds[i], F_SETFD, 0) != 0) fail("descriptor to inherit");
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGPIPE, &action, nullptr);
  sigaction(SIGCHLD, &action, nullptr);
  if (!launch.foreign) action.sa_handler = SIG_IGN;
  for (const int signal : kAnsweredByAgent) sigaction(signal, &action, nullptr);
  if (launch.foreign) {
    sigaction(SIGXFSZ, &action, nullptr);
    if (setpgid(0, 0) != 0) fail("setpgid");
  }
  if (launch.nice != 0) setpriority(PRIO_PROCESS, 0, launch.nice);  // a refusal costs only politeness
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execve(launch.path, launch.argv, launch.envp);
  fail("exec");
  _exit(127);
}

/// vfork, not fork: the supervisor has gigabytes of snapshot memory mapped, whose page tables a fork would copy.
__attribute__((noinline)) pid_t launch_child(const Launch& launch, LaunchFailure& failure) {
  const pid_t pid = vfork();
  if (pid == 0) become_child(launch, failure);
  return pid;
}

std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& added) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (std::none_of(added.begin(), added.end(), [&](const auto& pair) { return pair.first == name; })) {
      out.emplace_back(text);
    }
  }
  for (const auto& [name, value] : added) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& text : strings) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

/// A descriptor from which a child reads `text` to its end.
Result<Fd> input_of(const std::string& text) {
  if (text.empty()) {
    Fd none(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!none) return os_error(errno, "/dev/null");
    return none;
  }
  Fd out(memfd_create("cairn-input", MFD_CLOEXEC));
  if (!out) return os_error(errno, "memfd_create");
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = write(out.get(), text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, "a child's input");
    at += static_cast<size_t>(n);
  }
  if (lseek(out.get(), 0, SEEK_SET) != 0) return os_error(errno, "a child's input");
  return out;
}

}  // namespace

Result<ChildProcess> start_child(const ChildSpec& spec) {
  RT_CHECK(!spec.argv.empty(), "a child needs a program");
  ChildProcess child;
  child.log_path = spec.log_path;

  RT_TRY_SET(const Fd input_fd, input_of(spec.input));
  Fd log_fd;
  if (!spec.log_path.empty()) {
    RT_TRY_SET(log_fd, open_own(spec.log_path, O_WRONLY | O_APPEND));
    struct stat info {};
    if (fstat(log_fd.get(), &info) == 0) child.log_start_bytes = info.st_size;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return os_error(errno, "event pipe");
  child.events.reset(ends[0]);
  const Fd write_end(ends[1]);
  fcntl(write_end.get(), F_SETPIPE_SZ, kEventPipeBytes);  // refused over the user's quota: the default will do
  if (fcntl(child.events.get(), F_SETFL, O_NONBLOCK) != 0) return os_error(errno, "event pipe");

  std::vector<std::string> argv_text = spec.argv;
  std::vector<std::pair<std::string, std::string>> added = spec.env;
  if (!spec.foreign) added.emplace_back(kEventFdEnv, std::to_string(write_end.get()));
  std::vector<std::string> env_text = environment_with(added);
  const std::vector<char*> argv = pointers_to(argv_text);
  const std::vector<char*> envp = pointers_to(env_text);
  std::vector<int> keep = spec.inherit_fds;
  if (!spec.foreign) keep.push_back(write_end.get());

  const Launch launch{.parent = getpid(),
                      .path = argv[0],
                      .argv = argv.data(),
                      .envp = envp.data(),
                      .keep_fds = keep.data(),
                      .keep_count = keep.size(),
                      .input_fd = input_fd.get(),
                      .log_fd = log_fd.get(),
                      .foreign = spec.foreign,
                      .nice = spec.nice == 0 ? 0 : std::min(19, getpriority(PRIO_PROCESS, 0) + spec.nice)};
  LaunchFailure failure;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of ours may run in the child
  child.pid = launch_child(launch, failure);
  const int fork_errno = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child.pid < 0) return os_error(fork_errno, fmt::format("cannot start {}", spec.argv[0]));
  if (failure.step != nullptr) {
    waitpid(child.pid, nullptr, 0);
    return os_error(failure.os_errno, fmt::format("cannot start {}: {}", spec.argv[0], failure.step));
  }
  // The number cannot have been recycled: nobody but us reaps this child.
  child.pidfd.reset(pidfd_open(child.pid));
  if (child.pidfd) return child;
  const auto give_up = [&](Error error) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
    return error;
  };
  if (!is_missing_call(errno)) return give_up(os_error(errno, "pidfd_open"));
  Result<Fd> watched = watch_by_thread(child.pid);
  if (!watched.ok()) return give_up(std::move(watched).error());
  child.pidfd = std::move(watched).value();
  child.by_number = true;
  return child;
}

void kill_child(const ChildProcess& child) {
  if (!child.pidfd) return;
  if (child.by_number || (!pidfd_kill(child.pidfd.get()) && is_missing_call(errno))) kill(child.pid, SIGKILL);
}

void signal_group(const ChildProcess& child, int signal) {
  if (child.pid > 0) kill(-child.pid, signal);
}

void end_child(const ChildProcess& child) {
  kill_child(child);
  pollfd waiting{child.pidfd.get(), POLLIN, 0};
  while (poll(&waiting, 1, -1) < 0 && errno == EINTR) {
  }
  ignore(
      [&]() -> Status {
        RT_TRY(reap_child(child));
        return {};
      }(),
      "it has been killed");
}

Result<std::optional<ExitStatus>> reap_child(const ChildProcess& child) {
  siginfo_t info{};
  bool by_number = child.by_number;
  while (waitid(static_cast<idtype_t>(by_number ? P_PID : P_PIDFD),
                static_cast<id_t>(by_number ? child.pid : child.pidfd.get()), &info, WEXITED | WNOHANG) != 0) {
    if (errno == EINVAL && !by_number) {  // Linux 5.3 opens a pidfd and does not wait by it
      by_number = true;
    } else if (errno != EINTR)
      return os_error(errno, fmt::format("waitid of process {}", child.pid));
  }
  if (info.si_pid == 0) return std::optional<ExitStatus>{};
  ExitStatus status;
  (info.si_code == CLD_EXITED ? status.exit_code : status.signal) = info.si_status;
  return std::optional<ExitStatus>{status};
}

std::vector<std::string> log_tail(const ChildProcess& child, int64_t max_lines) {
  constexpr int64_t kTailBytes = 4096;
  std::vector<std::string> lines;
  if (child.log_path.empty()) return lines;
  const Fd fd(open(child.log_path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!fd || fstat(fd.get(), &info) != 0) return lines;
  const int64_t begin = std::max<int64_t>(child.log_start_bytes, info.st_size - kTailBytes);
  if (begin >= info.st_size) return lines;
  std::string text(static_cast<size_t>(info.st_size - begin), '\0');
  const ssize_t n = pread(fd.get(), text.data(), text.size(), begin);
  if (n <= 0) return lines;
  text.resize(static_cast<size_t>(n));
  std::string_view rest = text;
  if (begin > child.log_start_bytes) rest.remove_prefix(std::min(rest.size(), rest.find('\n') + 1));  // a cut line
  while (!rest.empty()) {
    const size_t newline = rest.find('\n');
    if (newline != 0) lines.emplace_back(rest.substr(0, newline));
    if (newline == std::string_view::npos) break;
    rest.remove_prefix(newline + 1);
  }
  if (static_cast<int64_t>(lines.size()) > max_lines) lines.erase(lines.begin(), lines.end() - max_lines);
  return lines;
}

char process_state(pid_t pid) {
  const std::optional<ProcessStat> stat = process_stat(pid);
  return stat ? stat->state : '?';
}

std::string describe(const ExitStatus& status) {
  if (status.signal != 0) return fmt::format("was killed by signal {} ({})", status.signal, strsignal(status.signal));
  return fmt::format("exited with code {}", status.exit_code);
}

}  // namespace cairn::agent
