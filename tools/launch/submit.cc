#include "tools/launch/submit.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "runtime/core/check.h"
#include "runtime/core/unique_handle.h"

extern char** environ;  // NOLINT: POSIX's

namespace cairn::tools {
namespace {

constexpr int kLost = 255;                   // ssh's own code
constexpr size_t kMostLineBytes = 64 << 10;  // a longer one is broken

struct Pipe {
  Fd read, write;
};

Result<Pipe> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return os_error(errno, "a pipe");
  return Pipe{.read = Fd(ends[0]), .write = Fd(ends[1])};
}

/// Blocks the signals that an agent takes, as long as it lives; children start without.
class HeldSignals {
 public:
  HeldSignals() {
    sigemptyset(&taken_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGXCPU, SIGUSR1, SIGUSR2, SIGQUIT}) sigaddset(&taken_, signal);
    struct sigaction now {};
    if (::sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) sigdelset(&taken_, SIGHUP);  // nohup
    ::pthread_sigmask(SIG_BLOCK, &taken_, &before_);
  }
  ~HeldSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  const sigset_t& taken() const { return taken_; }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t taken_{}, before_{};
};

/// A program of PATH with these as its standard streams; -1: this process's own. With `held` it is in a group of its
/// own, so that a terminal's Ctrl-C comes to this process alone, and begins without what is held or ignored here.
Result<pid_t> spawn(const std::vector<std::string>& words, int in, int out, int err, const HeldSignals* held) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));  // NOLINT: posix_spawn's type
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const auto& [fd, as] : {std::pair(in, 0), std::pair(out, 1), std::pair(err, 2)})
    if (fd >= 0) posix_spawn_file_actions_adddup2(&actions, fd, as);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  if (held != nullptr) {
    sigset_t fresh = held->taken();
    sigaddset(&fresh, SIGPIPE);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &held->before());
    posix_spawnattr_setsigdefault(&attributes, &fresh);
  }
  pid_t pid = -1;
  const int failed = ::posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failed == 0) return pid;
  return Error{ErrorCode::kUnavailable,
               fmt::format("{}: {}; nothing was submitted. --dry-run prints what would be", words[0],
                           failed == ENOENT ? "no such program in PATH" : std::strerror(failed)),
               failed};
}

int wait_for(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// What is there; empty at the end of the stream.
std::string read_some(int fd) {
  std::array<char, 4096> buffer{};
  ssize_t got = 0;
  do {
    got = ::read(fd, buffer.data(), buffer.size());
  } while (got < 0 && errno == EINTR);
  return {buffer.data(), static_cast<size_t>(got < 0 ? 0 : got)};
}

/// A stream whose lines are printed behind a name.
struct Lines {
  Fd fd;
  std::FILE* to = nullptr;
  std::string begun = {};

  void print(const std::string& host, std::string_view line) const {
    fmt::print(to, "{}: {}\n", host, line);
    std::fflush(to);
  }
  /// False at its end.
  bool take(const std::string& host) {
    const std::string some = read_some(fd.get());
    begun += some;
    size_t at = 0;
    for (size_t end = begun.find('\n'); end != std::string::npos; end = begun.find('\n', at)) {
      print(host, std::string_view(begun).substr(at, end - at));
      at = end + 1;
    }
    begun.erase(0, at);
    if (!begun.empty() && (some.empty() || begun.size() > kMostLineBytes)) {
      print(host, begun);
      begun.clear();
    }
    if (some.empty()) fd.reset();
    return !some.empty();
  }
};

struct Started {
  std::string host;
  pid_t pid = -1;
  Fd signals;
  Lines out, err;
  std::optional<int> code;
};

Result<Started> start(const HostCommand& command, const HeldSignals& held) {
  RT_TRY_SET(Pipe in, make_pipe());
  RT_TRY_SET(Pipe out, make_pipe());
  RT_TRY_SET(Pipe err, make_pipe());
  RT_TRY_SET(const pid_t pid, spawn(command.words, in.read.get(), out.write.get(), err.write.get(), &held));
  return Started{.host = command.host,
                 .pid = pid,
                 .signals = std::move(in.write),
                 .out = {.fd = std::move(out.read), .to = stdout},
                 .err = {.fd = std::move(err.read), .to = stderr},
                 .code = {}};
}

/// A connection that is gone takes none, and its host is reported when its ssh ends.
void pass_on(const std::vector<Started>& hosts, int signal) {
  const std::string line = fmt::format("{}\n", sigabbrev_np(signal));
  for (const Started& host : hosts) {
    if (host.signals && ::write(host.signals.get(), line.data(), line.size()) < 0 && errno != EPIPE)
      fmt::print(stderr, "{}: {} was not passed on: {}\n", host.host, line.substr(0, line.size() - 1),
                 std::strerror(errno));
  }
}

}  // namespace

Result<Submitted> run_with_input(const std::vector<std::string>& words, std::string_view input, Echo echo) {
  ::signal(SIGPIPE, SIG_IGN);  // a program that takes no input says why
  RT_TRY_SET(Pipe in, make_pipe());
  RT_TRY_SET(Pipe out, make_pipe());
  RT_TRY_SET(const pid_t pid, spawn(words, in.read.get(), out.write.get(), -1, nullptr));
  in.read.reset();
  out.write.reset();
  // It may print before it has read all: neither side waits for the other.
  ::fcntl(in.write.get(), F_SETFL, O_NONBLOCK);
  Submitted done;
  while (out.read) {
    std::array<pollfd, 2> fds = {pollfd{out.read.get(), POLLIN, 0}, pollfd{in.write.get(), POLLOUT, 0}};
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR
    if (fds[1].revents != 0) {
      const ssize_t put = ::write(in.write.get(), input.data(), input.size());
      if (put > 0) input.remove_prefix(static_cast<size_t>(put));
      if (input.empty() || (put < 0 && errno != EAGAIN && errno != EINTR)) in.write.reset();
    }
    if (fds[0].revents != 0) {
      const std::string some = read_some(out.read.get());
      done.output += some;
      if (echo == Echo::kYes) std::fwrite(some.data(), 1, some.size(), stdout);
      if (some.empty()) out.read.reset();
    }
  }
  std::fflush(stdout);
  done.code = wait_for(pid);
  return done;
}

Result<int> run_on_hosts(std::span<const HostCommand> commands) {
  ::signal(SIGPIPE, SIG_IGN);
  const HeldSignals held;
  const Fd signals(::signalfd(-1, &held.taken(), SFD_CLOEXEC));
  if (!signals) return os_error(errno, "signalfd");
  std::vector<Started> hosts;
  for (const HostCommand& command : commands) {
    Result<Started> started = start(command, held);
    if (!started.ok()) {
      pass_on(hosts, SIGTERM);
      for (const Started& host : hosts) ::kill(host.pid, SIGTERM);
      for (const Started& host : hosts) wait_for(host.pid);
      return std::move(started).error();
    }
    hosts.push_back(std::move(started).value());
  }
  for (size_t open = hosts.size(); open > 0;) {
    std::vector<pollfd> fds = {{signals.get(), POLLIN, 0}};
    std::vector<std::pair<Started*, Lines*>> of;
    for (Started& host : hosts) {
      for (Lines* lines : {&host.out, &host.err}) {
        if (!lines->fd) continue;
        fds.push_back({lines->fd.get(), POLLIN, 0});
        of.emplace_back(&host, lines);
      }
    }
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR
    if (fds[0].revents != 0) {
      signalfd_siginfo info{};
      if (::read(signals.get(), &info, sizeof info) == sizeof info) pass_on(hosts, static_cast<int>(info.ssi_signo));
    }
    for (size_t k = 0; k < of.size(); ++k) {
      auto& [host, lines] = of[k];
      if (fds[k + 1].revents == 0 || lines->take(host->host) || host->out.fd || host->err.fd) continue;
      host->signals.reset();
      host->code = wait_for(host->pid);
      if (*host->code != 0) fmt::print(stderr, "{}: ended with {}\n", host->host, *host->code);
      --open;
    }
  }
  for (const Started& host : hosts)
    if (*host.code != kLost) return *host.code;
  return Error{ErrorCode::kUnavailable, "no host could be reached, or each connection was lost; ssh says why above"};
}

}  // namespace cairn::tools
