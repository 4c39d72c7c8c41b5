#pragma once
// A start of `cairn train` on a host that does not lead: it joins the leader and does what that one says, until the run
// has ended.

#include <cstdint>
#include <filesystem>

#include "runtime/core/result.h"
#include "tools/run/fleet.h"
#include "tools/run/requests.h"

namespace cairn::tools {

struct FollowArgs {
  HostOptions hosts;
  std::filesystem::path run;
  int64_t threads = 0;
  RequestOptions requests;
};

/// A spare host: it takes nobody's place yet, and leaves when the run of this folder has ended, with its exit code.
Result<int> wait_as_spare(const std::filesystem::path& run, const RequestOptions& requests);
/// The leader's last word, for spares: a file of RUN/cluster.
Status write_end(const std::filesystem::path& run, const std::string& incarnation, int code);

/// The exit code of the run. Stop signals are blocked from here on.
Result<int> follow(const FollowArgs& args);

/// Blocks what asks this process to stop, before it has any other thread; what comes waits for a supervisor.
void block_stop_signals(const RequestOptions& requests);
/// Whether one of them waits.
bool stop_signal_waits(const RequestOptions& requests);

}  // namespace cairn::tools
