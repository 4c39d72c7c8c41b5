#pragma once
// Stacks of other processes, from outside: they need not cooperate, so one that is stopped, dead-locked or in a loop
// shows its stacks too. elfutils' libdw attaches (ptrace), unwinds every thread, names functions and lines, detaches; a
// process that was stopped stays stopped.
//
// read_stacks() may block for as long as the kernel holds a process in an uninterruptible sleep, so the agent lets a
// process of its own do it: StackProbe runs `cairn _stacks PID...` and takes what has come when time is up.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/core/result.h"
#include "runtime/core/unique_handle.h"

namespace cairn::agent {

struct ThreadStack {
  pid_t tid = 0;
  std::string name;
  std::vector<std::string> frames;  // innermost first: "cairn::nn::Mlp<float>::forward (mlp.cc:40)"
};

struct ProcessStacks {
  pid_t pid = 0;
  std::vector<ThreadStack> threads;
  std::string problem;  // why there are none
};

/// Attaches to each and unwinds, first all of them, while they stand where they are; then names their functions, which
/// takes longer, and calls `each` in that order. Never fails as a whole: what went wrong stands in `problem`.
void read_stacks(const std::vector<pid_t>& pids, const std::function<void(const ProcessStacks&)>& each);

nlohmann::json to_json(const ProcessStacks& stacks);
/// Errors: kCorrupt.
Result<ProcessStacks> process_stacks_from_json(const nlohmann::json& json);

/// Text for a report; threads with equal frames are told once.
std::string to_text(const ProcessStacks& stacks, std::string_view indent);

/// Reads the stacks of some processes in a process of its own.
class StackProbe {
 public:
  /// `program` understands `_stacks PID...` and prints a line of JSON for each.
  static Result<StackProbe> start(const std::string& program, const std::vector<pid_t>& pids);
  StackProbe(StackProbe&& other) noexcept;
  StackProbe& operator=(StackProbe&& other) noexcept;
  ~StackProbe();

  /// Takes what is there. True when all has come.
  bool take();
  /// Waits up to `limit_ms` for the rest, then ends the probe. What has come.
  std::vector<ProcessStacks> finish(int64_t limit_ms);

 private:
  StackProbe(pid_t pid, Fd out) : pid_(pid), out_(std::move(out)) {}
  pid_t pid_ = -1;  // until it is reaped here, and so no other's
  Fd out_;
  std::string text_;
  bool ended_ = false;
};

}  // namespace cairn::agent
