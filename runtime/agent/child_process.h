#pragma once
// One child of the supervisor: started with exec, watched through a pidfd, killed and reaped through it, so a recycled
// process number can never be hit. Where pidfds are missing (Linux before 5.3, a container's filter of system calls) a
// thread waits for the child and its number stands for it: it is no other's before reap_child(). A child dies with the
// supervisor (PR_SET_PDEATHSIG), even if that one is SIGKILLed.

#include <sys/types.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::agent {

/// What the agent answers for all its children: terminals and schedulers send these to the whole group, or to each
/// process of a job, and no child may end by them.
inline constexpr std::array kAnsweredByAgent = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU};

struct ChildSpec {
  int64_t rank = -1;                                     // of the world; -1: its number among the children
  std::vector<std::string> argv;                         // argv[0] is a path; PATH is not searched
  std::vector<std::pair<std::string, std::string>> env;  // added to the supervisor's environment, replacing equal names
  std::vector<int> inherit_fds;  // stay open in the child under the same numbers; all others above 2 are closed
  std::string log_path;          // stdout and stderr are appended to it; empty: the supervisor's own
  std::string input;             // what stdin holds; empty: /dev/null
  /// A program of somebody else's: it has a process group of its own (signal_group), all signals at their defaults, and
  /// no event pipe.
  bool foreign = false;
  int nice = 0;  // added to the supervisor's own
};

/// How a child ended: one of the two is set.
struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  // 0 unless a signal killed it
  bool ok() const { return exit_code == 0 && signal == 0; }
};

struct ChildProcess {
  pid_t pid = -1;
  Fd pidfd;                // readable once the child has ended
  bool by_number = false;  // `pidfd` is a pipe that a thread closes then
  Fd events;               // read end of its event pipe, non-blocking
  std::string log_path;
  int64_t log_start_bytes = 0;  // size of the log when the child started
};

/// Starts a child: kAnsweredByAgent are ignored in it from its first instruction on, other signals are as they are here
/// (SIGPIPE and SIGCHLD at their defaults) and none is blocked.
///
/// The child is tied to the calling *thread*: the kernel kills it when that thread ends.
/// Errors: kInvalidInput for a program or log that cannot be opened.
Result<ChildProcess> start_child(const ChildSpec& spec);

/// SIGKILL; a child that has ended already is no error.
void kill_child(const ChildProcess& child);

/// The signal goes to the process group of a foreign child that is not reaped yet.
void signal_group(const ChildProcess& child, int signal);

/// SIGKILL, and waits until the child is gone.
void end_child(const ChildProcess& child);

/// The status of a child that has ended, after which it is gone; nullopt while it runs.
Result<std::optional<ExitStatus>> reap_child(const ChildProcess& child);

/// The last lines, at most `max_lines`, that this child (not an earlier one) wrote to its log.
std::vector<std::string> log_tail(const ChildProcess& child, int64_t max_lines);

/// The state letter of /proc/PID/stat: R, S, D, T (stopped), Z ...; '?' when unknown.
char process_state(pid_t pid);

/// "exited with code 70", "was killed by signal 9 (Killed)".
std::string describe(const ExitStatus& status);

}  // namespace cairn::agent
