#pragma once
// A start of `cairn train` on a host that does not lead: it joins the leader and does what that one says, until the run
// has ended.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "runtime/core/result.h"
#include "tools/attention_option.h"
#include "tools/comm_option.h"
#include "tools/run/agent/requests.h"
#include "tools/run/hosts/fleet.h"
#include "tools/tuning_option.h"

namespace cairn::tools {

struct FollowArgs {
  HostOptions hosts;
  std::filesystem::path run;
  int64_t threads = 0;
  CommChoice comm;  // the leader's too
  AttentionChoice attention;
  TuningArgs tuning;
  RequestOptions requests;
};

/// What becomes of a host that follows.
struct Followed {
  int code = 0;              // of the run
  std::optional<Lead> lead;  // the run goes on, and this host leads it
};

/// Until the run has ended, or this host has to lead it. Stop signals are blocked from here on.
Result<Followed> follow(const FollowArgs& args);

/// Blocks what asks this process to stop, before it has any other thread; what comes waits for a supervisor.
void block_stop_signals(const RequestOptions& requests);
/// Whether one of them waits.
bool stop_signal_waits(const RequestOptions& requests);

}  // namespace cairn::tools
