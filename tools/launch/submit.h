#pragma once
// Hands a job to its launcher: to sbatch or kubectl, or to one ssh for each host.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/result.h"
#include "tools/launch/job.h"

namespace cairn::tools {

/// How a command ended, and what it printed.
struct Submitted {
  int code = 0;  // 128 + n: of signal n
  std::string output;
};

/// Whether what a program prints goes to stdout too.
enum class Echo { kYes, kNo };

/// Runs a program of PATH with `input` as its standard input. Its errors go to stderr. Errors: kUnavailable when it is
/// not there.
Result<Submitted> run_with_input(const std::vector<std::string>& words, std::string_view input, Echo echo = Echo::kYes);

/// Starts all commands, prints their lines behind the names of their hosts, and passes the signals on that an agent
/// takes (docs/operations/stopping.md), until all have ended. Returns the code of host 0; where its connection was lost
/// (ssh's 255), of the first host that has one. Errors: kUnavailable when ssh is not there. Threads: none else may run.
Result<int> run_on_hosts(std::span<const HostCommand> commands);

}  // namespace cairn::tools
